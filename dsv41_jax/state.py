"""Everything a stage carries from one step to the next: one donated pytree."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv41_jax.batch import page_size
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import layer_spec
from pallas_kernels.packed_rows import PackedRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenGroup:
    """Rows of compressor groups that are not complete yet (ratio m > 1).

    Attributes:
      kv: float32[slots, m, head_dim], row p mod m holds position p.
      score: float32[slots, m, head_dim].
    """

    kv: jax.Array
    score: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageState:
    """Caches of the layers of one stage, by layer; a layer that owns none has no entry.

    Attributes:
      window: FP8 window rows, PackedRows[pages * page_size, ...], every layer.
      kv: FP4 compressed rows, PackedRows[pages * page_size / ratio, ...], KV sources.
      index_k: FP4 index keys, same rows, KV sources.
      open_group: KV sources with ratio > 1.
    """

    window: dict[int, PackedRows]
    kv: dict[int, PackedRows]
    index_k: dict[int, PackedRows]
    open_group: dict[int, OpenGroup]


def init_state(
    config: ModelConfig,
    layers: range,
    *,
    window_pages: int,
    global_pages: int,
    slots: int,
) -> StageState:
    """Zeroed caches of `layers`; nothing is allocated for layers outside.

    Args:
      config: the model.
      layers: backbone layers of the stage.
      window_pages: pages of each layer's window pool.
      global_pages: pages of each KV source's pools.
      slots: requests that can be open at once.
    """
    window, kv, index_k, open_group = {}, {}, {}, {}
    page = page_size(config)
    for layer in layers:
        spec = layer_spec(config, layer)
        window[layer] = _rows(window_pages * page, config.head_dim, config.head_dim // 32)
        if not spec.owns_kv:
            continue
        rows = global_pages * page // spec.ratio
        kv[layer] = _rows(rows, config.head_dim // 2, config.head_dim // 16)
        index_k[layer] = _rows(rows, config.index_head_dim // 2, config.index_head_dim // 32)
        if spec.ratio > 1:
            shape = (slots, spec.ratio, config.head_dim)
            open_group[layer] = OpenGroup(jnp.zeros(shape), jnp.zeros(shape))
    return StageState(window, kv, index_k, open_group)


def _rows(rows: int, code_bytes: int, scale_bytes: int) -> PackedRows:
    return PackedRows(
        jnp.zeros((rows, code_bytes), jnp.uint8), jnp.zeros((rows, scale_bytes), jnp.uint8)
    )
