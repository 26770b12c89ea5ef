"""Runs a block on a flat token batch: every row is written before any row reads."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv41_jax.batch import TokenBatch, page_size
from dsv41_jax.layers.block import Block, LayerTrace, Pages, Stream, Written
from dsv41_jax.shared_state import SharedState
from dsv41_jax.slots import group_slots, table_rows
from dsv41_jax.state import OpenGroup, StageState
from pallas_kernels.packed_rows import PackedRows, gather
from pallas_kernels.paging import slot
from pallas_kernels.rowwise import map_rows

Cached = dict[str, PackedRows]  # rows of a batch by the name of the cache they stand in


def write_block(
    block: Block,
    params: Any,
    stream: Stream,
    batch: TokenBatch,
    state: StageState,
    shared: SharedState,
) -> tuple[Written, StageState, SharedState, Cached]:
    """First half of a layer over the whole batch: every row enters the caches.

    Args:
      block: the layer.
      params: its parameters, as in the checkpoint.
      stream: input of the layer, [T, ...].
      batch: the step.
      state: caches of the stage; this layer's are replaced in the result.
      shared: what earlier layers published in this step.

    Returns:
      What the second half needs, the caches, the publications, and the rows written, by the
      caches' names.
    """
    layer = block.spec.layer
    written = _write(block, params, stream, batch)
    state, window = _store_window(block, params, written, batch, state)
    cached = {"window": window}
    if block.spec.owns_kv:
        state, groups = _compress(block, params, written, batch, state)
        cached |= groups
        shared = shared.publish("kv", layer, state.kv[layer])
        shared = shared.publish("index_k", layer, state.index_k[layer])
    return written, state, shared, cached


def read_block(
    block: Block,
    params: Any,
    written: Written,
    batch: TokenBatch,
    state: StageState,
    shared: SharedState,
) -> tuple[Stream, SharedState, LayerTrace]:
    """Second half of a layer: attention over the caches, then the experts.

    Args:
      block, params, batch, shared: as in `write_block`.
      written: result of the first half, of the rows of `batch`.
      state: caches with the step's rows written.

    Raises:
      SharingError: the layer reads something nobody published to this stage.
    """
    layer = block.spec.layer
    stream, trace = _read(block, params, written, batch, state, shared)
    if block.spec.owns_index:
        shared = shared.publish("index", layer, trace.topk)
    if block.spec.publishes_candidates:
        shared = shared.publish("candidate", layer, trace.candidates)
    return stream, shared, trace


def _write(block: Block, params: Any, stream: Stream, batch: TokenBatch) -> Written:
    spec = block.spec
    engram = batch.engram[spec.layer] if spec.engram is not None else None

    def write(rows: tuple) -> Written:
        return block.apply({"params": params}, *rows, method=Block.write)

    rows = (stream, batch.positions, batch.is_image, engram)
    return map_rows(write, rows, batch.num_tokens, implementation=block.implementation)


def _store_window(
    block: Block, params: Any, written: Written, batch: TokenBatch, state: StageState
) -> tuple[StageState, PackedRows]:
    layer = block.spec.layer
    table = table_rows(batch.window_pages, batch.requests)
    where = slot(table, batch.positions[:, None], page_size(block.config))[:, 0]
    rows = block.apply(
        {"params": params},
        state.window[layer],
        where,
        written,
        batch.num_tokens,
        method=Block.write_window,
    )
    return _replace(state, "window", layer, rows), gather(rows, where)


def _compress(
    block: Block, params: Any, written: Written, batch: TokenBatch, state: StageState
) -> tuple[StageState, Cached]:
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

    def compress(rows: tuple) -> tuple:
        return block.apply({"params": params}, *rows, method=Block.compress)

    rows = (kv, score, batch.positions - (ratio - 1))
    closed = map_rows(compress, rows, batch.num_tokens, implementation=block.implementation)
    table = table_rows(batch.global_pages, batch.requests)
    where = group_slots(table, batch.positions, ratio, page_size(config))
    kv, index_k = block.apply(
        {"params": params},
        state.kv[layer],
        state.index_k[layer],
        where,
        closed,
        batch.num_tokens,
        method=Block.write_groups,
    )
    state = _replace(_replace(state, "kv", layer, kv), "index_k", layer, index_k)
    return state, {"kv": gather(kv, where), "index_k": gather(index_k, where)}


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

    earliest = batch.window_from[jnp.maximum(batch.requests, 0)]
    rows = (
        written,
        batch.positions,
        batch.requests,
        earliest,
        batch.is_image,
        topk,
        candidates,
    )
    return map_rows(read, rows, batch.num_tokens, implementation=block.implementation)


def _replace(state: StageState, field: str, layer: int, value: Any) -> StageState:
    entries = {**vars(state), field: {**getattr(state, field), layer: value}}
    return StageState(**entries)
