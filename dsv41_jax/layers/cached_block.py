"""Runs a block on a flat token batch: the order of cache writes and reads."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv41_jax.batch import TokenBatch, page_size
from dsv41_jax.layers.block import Block, LayerTrace, Pages, Stream, Written
from dsv41_jax.quantization.rows import PackedRows, scatter
from dsv41_jax.rowwise import map_rows
from dsv41_jax.shared_state import SharedState
from dsv41_jax.slots import group_slots, slot, table_rows
from dsv41_jax.state import OpenGroup, StageState


def run_block(
    block: Block,
    params: Any,
    stream: Stream,
    batch: TokenBatch,
    state: StageState,
    shared: SharedState,
) -> tuple[Stream, StageState, SharedState, LayerTrace]:
    """One layer over the whole batch; every row is written before any row reads.

    Args:
      block: the layer.
      params: its parameters, as in the checkpoint.
      stream: input of the layer, [T, ...].
      batch: the step.
      state: caches of the stage; this layer's are replaced in the result.
      shared: what earlier layers published in this step.

    Returns:
      The stream, state and publications after the layer, and its trace.

    Raises:
      SharingError: the layer reads something nobody published to this stage.
    """
    spec = block.spec
    scope = f"layer_{spec.layer}"
    with jax.named_scope(scope):
        written = _write(block, params, stream, batch)
        state = _store_window(block, written, batch, state)
        kv = index_k = None
        if spec.owns_kv:
            state, kv, index_k = _compress(block, params, written, batch, state)
            shared = shared.publish("kv", spec.layer, state.kv[spec.layer])
            shared = shared.publish("index_k", spec.layer, state.index_k[spec.layer])
        stream, trace = _read(block, params, written, batch, state, shared)
        if spec.owns_index:
            shared = shared.publish("index", spec.layer, trace.topk)
        if spec.publishes_candidates:
            shared = shared.publish("candidate", spec.layer, trace.candidates)
        return stream, state, shared, _with_groups(trace, kv, index_k)


def _with_groups(
    trace: LayerTrace, kv: PackedRows | None, index_k: PackedRows | None
) -> LayerTrace:
    return trace.__class__(**{**vars(trace), "kv": kv, "index_k": index_k})


def _write(block: Block, params: Any, stream: Stream, batch: TokenBatch) -> Written:
    spec = block.spec
    engram = batch.engram[spec.layer] if spec.engram is not None else None

    def write(rows: tuple) -> Written:
        return block.apply({"params": params}, *rows, method=Block.write)

    rows = (stream, batch.positions, batch.is_image, engram)
    return map_rows(write, rows, batch.num_tokens)


def _store_window(
    block: Block, written: Written, batch: TokenBatch, state: StageState
) -> StageState:
    table = table_rows(batch.window_pages, batch.requests)
    where = slot(table, batch.positions[:, None], page_size(block.config))[:, 0]
    layer = block.spec.layer
    rows = scatter(state.window[layer], where, written.window)
    return _replace(state, "window", layer, rows)


def _compress(
    block: Block, params: Any, written: Written, batch: TokenBatch, state: StageState
) -> tuple[StageState, PackedRows, PackedRows]:
    """Closes the groups that end in this batch and keeps the rest open."""
    spec, config = block.spec, block.config
    layer, ratio = spec.layer, spec.ratio
    kv, score = written.kv[:, None], written.score[:, None]
    if ratio > 1:
        group = state.open_group[layer]
        kv = _whole_groups(written.kv, group.kv, batch, ratio)
        score = _whole_groups(written.score, group.score, batch, ratio)
        kept = OpenGroup(
            _keep_open(written.kv, group.kv, batch, ratio),
            _keep_open(written.score, group.score, batch, ratio),
        )
        state = _replace(state, "open_group", layer, kept)

    def compress(rows: tuple) -> tuple[PackedRows, PackedRows]:
        return block.apply({"params": params}, *rows, method=Block.compress)

    first = batch.positions - (ratio - 1)
    packed, index_k = map_rows(compress, (kv, score, first), batch.num_tokens)
    table = table_rows(batch.global_pages, batch.requests)
    where = group_slots(table, batch.positions, ratio, page_size(config))
    state = _replace(state, "kv", layer, scatter(state.kv[layer], where, packed))
    state = _replace(state, "index_k", layer, scatter(state.index_k[layer], where, index_k))
    return state, packed, index_k


def _whole_groups(
    rows: jax.Array, open_rows: jax.Array, batch: TokenBatch, ratio: int
) -> jax.Array:
    """float32[T, m, d]: rows at positions p - m + 1 .. p for each row's position p.

    A position before the batch comes from the request's open group.
    """
    tokens = jnp.arange(rows.shape[0], dtype=jnp.int32)
    slots = _slots(batch)
    members = []
    for back in range(ratio - 1, -1, -1):
        source = jnp.maximum(tokens - back, 0)
        in_batch = (tokens >= back) & (batch.requests[source] == batch.requests)
        kept = open_rows[jnp.maximum(slots, 0), (batch.positions - back) % ratio]
        members.append(jnp.where(in_batch[:, None], rows[source], kept))
    return jnp.stack(members, axis=1)


def _keep_open(rows: jax.Array, open_rows: jax.Array, batch: TokenBatch, ratio: int) -> jax.Array:
    """Open groups after the batch: the last m rows of each request, by position mod m."""
    total = rows.shape[0]
    later = jnp.arange(total, dtype=jnp.int32) + ratio
    request_later = batch.requests[jnp.minimum(later, total - 1)]
    last = (later >= total) | (request_later != batch.requests)
    slots = _slots(batch)
    target = jnp.where(last & (slots >= 0), slots, open_rows.shape[0])
    return open_rows.at[target, batch.positions % ratio].set(rows, mode="drop")


def _slots(batch: TokenBatch) -> jax.Array:
    """int32[T]: each row's slot of per-request state, -1 in padding."""
    slots = batch.slots[jnp.maximum(batch.requests, 0)]
    return jnp.where(batch.requests >= 0, slots, -1)


def _read(
    block: Block,
    params: Any,
    written: Written,
    batch: TokenBatch,
    state: StageState,
    shared: SharedState,
) -> tuple[Stream, LayerTrace]:
    spec = block.spec
    kv = index_k = topk = candidates = None
    if spec.kv_source is not None:
        kv = shared.read("kv", spec.kv_source, spec.layer)
    if spec.owns_index:
        index_k = shared.read("index_k", spec.kv_source, spec.layer)
    elif spec.index_source is not None:
        topk = shared.read("index", spec.index_source, spec.layer)
    if spec.candidate_source is not None:
        candidates = shared.read("candidate", spec.candidate_source, spec.layer)
    pages = Pages(state.window[spec.layer], kv, index_k, batch.window_pages, batch.global_pages)

    def read(rows: tuple) -> tuple[Stream, LayerTrace]:
        return block.apply({"params": params}, *rows, pages, method=Block.read)

    rows = (written, batch.positions, batch.requests, batch.is_image, topk, candidates)
    return map_rows(read, rows, batch.num_tokens)


def _replace(state: StageState, field: str, layer: int, value: Any) -> StageState:
    entries = {**vars(state), field: {**getattr(state, field), layer: value}}
    return StageState(**entries)
