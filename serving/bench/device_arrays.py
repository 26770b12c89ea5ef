"""Random parameters, caches and steps of full size, made on the device."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.batch import TokenBatch, page_size
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_table import empty_rows
from dsv41_jax.host_batch import RequestRows, build_batch, round_rows
from dsv41_jax.layer_plan import layer_spec
from dsv41_jax.shared_state import SharedState
from dsv41_jax.state import StageState, init_state
from pallas_kernels.packed_rows import PackedRows

_E2M1_SPREAD = 3.0  # root mean square of the values of random E2M1 codes
_MIDDLE = 127  # E8M0 of one
_DRAWN_EXPERTS = 8
_NOT_NAN = 0xBF  # clears a bit of every E4M3 code that is NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step to time.

    Attributes:
      name: "decode 4" or "prefill 512".
      tokens: real rows.
      requests: that share them.
      context: tokens of each request in the caches before.
    """

    name: str
    tokens: int
    requests: int
    context: int

    @property
    def rows(self) -> int:
        """Rows with padding, as in a server."""
        return round_rows(self.tokens)

    def columns(self, config: ModelConfig) -> int:
        """Pages of a request."""
        return -(-(self.context + self.tokens // self.requests) // page_size(config))


def random_parameters(abstract: Any, seed: int) -> Any:
    """Parameters of given shapes: valid codes, products about as large as their inputs.

    Args:
      abstract: pytree of `ShapeDtypeStruct`s, as `Stage.init` has it.
      seed: of the values.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    shapes = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}
    key = jax.random.key(seed, impl="rbg")
    made = [
        _draw(jax.random.fold_in(key, number), *_distribution(name, shapes), leaf.shape, leaf.dtype)
        for number, (name, leaf) in enumerate(shapes.items())
    ]
    return jax.tree.unflatten(tree, made)


def _distribution(name: str, shapes: dict[str, jax.ShapeDtypeStruct]) -> tuple[float, float]:
    """Mean and spread of a parameter's values; of scales the exponent in the middle, and 1."""
    leaf = shapes[name]
    if name.endswith("scale") and leaf.dtype == jnp.uint8:
        weight = shapes[f"{name.removesuffix('scale')}weight"]
        packed = weight.dtype == jnp.uint8
        inputs, spread = weight.shape[-1] * (2 if packed else 1), _E2M1_SPREAD if packed else 1
        return _MIDDLE - round(math.log2(spread * math.sqrt(inputs))), 1
    if leaf.dtype == jnp.uint8:
        return 0, 0
    if leaf.dtype == jnp.float8_e4m3fn:
        return 0, 1
    if len(leaf.shape) > 1:
        return 0, leaf.shape[-1] ** -0.5
    return (1, 0.1) if name.endswith(("norm.weight", "q_weight", "k_weight")) else (0, 0.2)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _draw(
    key: jax.Array, mean: float, spread: float, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Values of a distribution; bytes are all alike, or near the middle of a scale's."""
    if dtype == jnp.uint8:
        # Experts repeat the first few: generators need several times the memory of their result.
        some = (min(shape[0], _DRAWN_EXPERTS), *shape[1:]) if len(shape) == 3 else shape
        codes = jax.random.bits(key, some, jnp.uint8)
        times = -(-shape[0] // some[0])
        codes = jnp.tile(codes, (times, *[1] * (len(shape) - 1)))[: shape[0]]
        return codes % jnp.uint8(3) + jnp.uint8(mean - 1) if spread else codes
    return (mean + spread * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def random_caches(
    config: ModelConfig, layers: range, *, step: Step, seed: int, replicas: bool
) -> StageState:
    """Caches full of valid rows for every request of a step.

    Args:
      config: the model.
      layers: that own the caches.
      step: its requests have pages of their own.
      seed: of the bytes.
      replicas: whether only what other layers read is wanted.
    """

    @jax.jit
    def make(key: jax.Array) -> StageState:
        pages = step.requests * step.columns(config)
        state = init_state(
            config,
            layers,
            window_pages=1 if replicas else pages,
            global_pages=pages,
            slots=step.requests,
        )
        parts = {}
        for number, kind in enumerate(("window", "kv", "index_k")):
            parts[kind] = {
                layer: _random_rows(kind, rows, jax.random.fold_in(key, 64 * number + layer))
                for layer, rows in getattr(state, kind).items()
            }
        return dataclasses.replace(state, **parts)

    return make(jax.random.key(seed, impl="rbg"))


def _random_rows(kind: str, rows: PackedRows, key: jax.Array) -> PackedRows:
    codes = jax.random.bits(jax.random.fold_in(key, 0), rows.codes.shape, jnp.uint8)
    scales = jax.random.bits(jax.random.fold_in(key, 1), rows.scales.shape, jnp.uint8)
    if kind == "kv":  # E4M3 scales between 1/8 and 1/2
        return PackedRows(codes, jnp.uint8(0x20) + scales % jnp.uint8(0x10))
    mask = jnp.uint8(_NOT_NAN if kind == "window" else 0xFF)
    return PackedRows(codes & mask, jnp.uint8(_MIDDLE - 2) + scales % jnp.uint8(3))


def random_batch(config: ModelConfig, layers: range, step: Step, seed: int) -> TokenBatch:
    """The tokens of a step, with table rows for the Engram layers among `layers`."""
    rng, columns = np.random.default_rng(seed), step.columns(config)
    each = step.tokens // step.requests
    look_back = config.engram.max_ngram_size - 1 if config.engram else 0
    rows = [
        RequestRows(
            token_ids=rng.integers(0, config.vocab_size, each),
            start=step.context,
            history=np.full(look_back, -1),
            window_pages=range(request * columns, (request + 1) * columns),
            global_pages=range(request * columns, (request + 1) * columns),
            slot=request,
            logits=1,
        )
        for request in range(step.requests)
    ]
    batch = build_batch(
        config,
        rows,
        tokens=step.rows,
        requests=step.requests,
        columns=columns,
        logit_rows=round_rows(step.requests),
        engram=None,
    )
    found = config.engram.layer_ids if config.engram else ()
    engram = {}
    if any(layer in layers for layer in found):
        empty = empty_rows(config.engram, [layer for layer in found if layer in layers], step.rows)
        engram = {
            layer: PackedRows(
                rng.integers(0, 256, table.codes.shape, np.uint8) & np.uint8(_NOT_NAN),
                rng.integers(_MIDDLE - 1, _MIDDLE + 2, table.scales.shape, np.uint8),
            )
            for layer, table in empty.items()
        }
    return dataclasses.replace(batch, engram=engram)


def published(config: ModelConfig, layer: int, batch: TokenBatch, caches: StageState) -> Any:
    """What earlier layers publish for one layer, spread over everything that a row sees.

    Args:
      config: the model.
      layer: the reader.
      batch: the step, of numpy arrays.
      caches: of the source layers.
    """
    shared, spec = SharedState(), layer_spec(config, layer)
    rows, page = len(batch.positions), page_size(config)
    visible = (batch.positions[:, None] + 1) // max(spec.ratio, 1)
    for kind, source in spec.reads:
        if kind == "index":
            order = np.arange(config.index_topk)[None]
            spread = np.where(
                visible >= config.index_topk, order * visible // config.index_topk, order
            )
            value = np.where(spread < visible, spread, -1).astype(np.int32)
        elif kind == "candidate":
            positions = batch.global_pages.shape[1] * page // spec.ratio
            value = np.ones((rows, -(-positions // config.candidate_block_size)), bool)
        else:
            value = getattr(caches, kind)[source]
        shared = shared.publish(kind, source, value)
    return shared
