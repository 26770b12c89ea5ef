"""What crosses a stage boundary in a step, and how the next stage takes it in."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dsv41_jax.batch import TokenBatch, page_size
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import Kind, layer_spec
from dsv41_jax.layers.block import Stream
from dsv41_jax.model import Stage, StageResult
from dsv41_jax.shared_state import ROW_KINDS, SharedState
from dsv41_jax.slots import group_slots, table_rows
from dsv41_jax.state import StageState, init_state
from pallas_kernels.packed_rows import PackedRows, scatter
from sharding.dependencies import RelayItem


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bundle:
    """Everything one stage hands to the next, by source layer where it is relayed.

    Attributes:
      stream: bf16[T, C, D] copies and their delayed float32[T, C] pre-mix.
      kv, index_k: packed row of the group that each token completes; bytes of the caches.
      index: int32[T, index_topk].
      candidate: int32[T, candidate_topk_blocks], kept blocks ascending, -1 in unused places.
    """

    stream: Stream
    kv: dict[int, PackedRows]
    index_k: dict[int, PackedRows]
    index: dict[int, jax.Array]
    candidate: dict[int, jax.Array]


def send(
    stage: Stage, items: Sequence[RelayItem], result: StageResult, received: Bundle | None
) -> Bundle:
    """What a stage passes on.

    Args:
      stage: the sender.
      items: what the relay carries over this boundary.
      result: of the stage.
      received: what the stage got itself; things of earlier stages go through unchanged.
    """
    traces = dict(zip(stage.layers, result.traces, strict=True))
    bundle = Bundle(result.stream, {}, {}, {}, {})
    for item in items:
        carried, source = getattr(bundle, item.kind), item.source
        if item.kind in ROW_KINDS:
            value = result.shared.read(item.kind, source, stage.layers[-1])
            if item.kind == "candidate":
                value = kept_blocks(value, stage.config.candidate_topk_blocks)
            carried[source] = value
        else:
            written = getattr(traces[source], item.kind) if source in traces else None
            carried[source] = written or getattr(received, item.kind)[source]
    return bundle


def receive(
    config: ModelConfig,
    replicas: Sequence[tuple[Kind, int]],
    bundle: Bundle,
    batch: TokenBatch,
    state: StageState,
) -> tuple[StageState, SharedState]:
    """Writes the step's rows to the replicas and publishes what was relayed.

    Args:
      config: the model.
      replicas: (kind, source) of caches this stage keeps copies of.
      bundle: from the stage before.
      batch: the step.
      state: the stage's caches, replicas among them.
    """
    shared = SharedState()
    table = table_rows(batch.global_pages, batch.requests)
    for kind, source in replicas:
        ratio = layer_spec(config, source).ratio
        where = group_slots(table, batch.positions, ratio, page_size(config))
        caches = getattr(state, kind)
        rows = scatter(caches[source], where, getattr(bundle, kind)[source])
        state = dataclasses.replace(state, **{kind: {**caches, source: rows}})
        shared = shared.publish(kind, source, rows)
    for source, topk in bundle.index.items():
        shared = shared.publish("index", source, topk)
    for source, kept in bundle.candidate.items():
        capacity = batch.global_pages.shape[1] * page_size(config)
        positions = capacity // layer_spec(config, source).ratio
        blocks = -(-positions // config.candidate_block_size)
        shared = shared.publish("candidate", source, block_mask(kept, blocks))
    return state, shared


def add_replicas(
    config: ModelConfig,
    state: StageState,
    replicas: Sequence[tuple[Kind, int]],
    *,
    global_pages: int,
) -> StageState:
    """Zeroed replicas beside a stage's own caches, as large as their source."""
    for kind, source in replicas:
        owner = init_state(
            config, range(source, source + 1), window_pages=0, global_pages=global_pages, slots=0
        )
        caches = {**getattr(state, kind), source: getattr(owner, kind)[source]}
        state = dataclasses.replace(state, **{kind: caches})
    return state


def kept_blocks(mask: jax.Array, limit: int) -> jax.Array:
    """int32[T, limit]: numbers of the blocks set in bool[T, B], ascending, -1 in the rest."""
    blocks = mask.shape[1]
    numbers = jnp.where(mask, jnp.arange(blocks, dtype=jnp.int32)[None], blocks)
    first = jnp.sort(numbers, axis=1)[:, :limit]
    first = jnp.pad(first, ((0, 0), (0, limit - first.shape[1])), constant_values=blocks)
    return jnp.where(first < blocks, first, -1)


def block_mask(kept: jax.Array, blocks: int) -> jax.Array:
    """bool[T, blocks] of the block numbers int32[T, K]; -1 sets nothing."""
    rows = jnp.arange(kept.shape[0])[:, None]
    columns = jnp.where(kept >= 0, kept, blocks)
    return jnp.zeros((kept.shape[0], blocks), bool).at[rows, columns].set(True, mode="drop")
