"""Builds the padded token batch of a step from each request's share of it (numpy)."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsv41_jax.batch import TokenBatch
from dsv41_jax.config import ModelConfig
from dsv41_jax.embedding_table import EmbeddingTable
from dsv41_jax.engram_table import EngramRows
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.rowwise import ROW_TILE


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestRows:
    """One request's share of a step.

    Attributes:
      token_ids: int[n], the tokens that this step processes.
      start: absolute position of the first.
      history: int[max_ngram_size - 1], the ids before `start`, oldest first; -1 where there
        is none or the token is an image's.
      window_pages: page of the window pool by table column; -1 where none is kept.
      global_pages: likewise for compressed KV and index keys.
      slot: row of per-request state, distinct among live requests.
      logits: how many of the last rows want logits.
      late_from: first position that layers from the last KV source on compute; 0 is exact. A
        later one (bounded replay) is at most a window before the end of the prompt, and the
        same in every step of the request.
    """

    token_ids: np.ndarray
    start: int
    history: np.ndarray
    window_pages: Sequence[int]
    global_pages: Sequence[int]
    slot: int
    logits: int
    late_from: int = 0


def round_rows(rows: int) -> int:
    """The smallest whole number of row tiles that holds `rows`, at least one."""
    return ROW_TILE * max(1, -(-rows // ROW_TILE))


def lookup_of(
    rows: Sequence[RequestRows], tokens: int
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """What `EngramRows.step_rows` is asked for a bucket of `tokens`."""
    return [row.token_ids for row in rows], [row.history for row in rows], tokens


def build_batch(
    config: ModelConfig,
    rows: Sequence[RequestRows],
    *,
    tokens: int,
    requests: int,
    columns: int,
    logit_rows: int,
    engram: EngramRows | None,
    embedding: EmbeddingTable | None = None,
) -> TokenBatch:
    """Pads the requests' rows to a bucket.

    Args:
      config: the model.
      rows: the requests, in the order of the logit rows.
      tokens: T of the bucket.
      requests: R of the bucket.
      columns: C of the bucket.
      logit_rows: L of the bucket.
      engram: where rows of the stage's Engram layers come from, or None if it has none.
      embedding: the table of the first stage where it is on the host.

    Returns:
      A batch whose leaves are numpy arrays, or what `engram` gives.

    Raises:
      ValueError: the rows do not fit the bucket.
    """
    total = sum(len(row.token_ids) for row in rows)
    wanted = sum(row.logits for row in rows)
    for name, size, limit in (
        ("tokens", total, tokens),
        ("requests", len(rows), requests),
        ("logit rows", wanted, logit_rows),
        ("table columns", max((len(r.global_pages) for r in rows), default=0), columns),
    ):
        if size > limit:
            raise ValueError(f"{size} {name} do not fit a bucket of {limit}")
    late = _late_rows(rows)
    batch = TokenBatch(
        token_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        requests=np.full(tokens, -1, np.int32),
        is_image=np.zeros(tokens, bool),
        num_tokens=np.int32(total),
        window_pages=np.full((requests, columns), -1, np.int32),
        global_pages=np.full((requests, columns), -1, np.int32),
        slots=np.full(requests, -1, np.int32),
        logit_rows=np.full(logit_rows, -1, np.int32),
        num_logits=np.int32(wanted),
        late_rows=np.pad(late, (0, tokens - len(late)), constant_values=-1),
        num_late_rows=np.int32(len(late)),
        window_from=np.zeros(requests, np.int32),
        late_window_from=np.zeros(requests, np.int32),
        engram={} if engram is None else _engram_rows(engram, rows, tokens),
    )
    first = logit = 0
    for request, row in enumerate(rows):
        last = first + len(row.token_ids)
        batch.token_ids[first:last] = row.token_ids
        batch.positions[first:last] = np.arange(row.start, row.start + last - first)
        batch.requests[first:last] = request
        batch.window_pages[request, : len(row.window_pages)] = row.window_pages
        batch.global_pages[request, : len(row.global_pages)] = row.global_pages
        batch.slots[request] = row.slot
        batch.late_window_from[request] = row.late_from
        batch.logit_rows[logit : logit + row.logits] = np.arange(last - row.logits, last)
        first, logit = last, logit + row.logits
    if embedding is not None:
        batch = dataclasses.replace(batch, embedding=embedding.rows(batch.token_ids))
    return batch


def _engram_rows(
    engram: EngramRows, rows: Sequence[RequestRows], tokens: int
) -> dict[int, PackedRows]:
    return engram.step_rows(*lookup_of(rows, tokens))


def _late_rows(rows: Sequence[RequestRows]) -> np.ndarray:
    """int32[n]: batch rows at or after their request's `late_from`."""
    kept, first = [np.zeros(0, np.int32)], 0
    for row in rows:
        count = len(row.token_ids)
        skipped = min(max(row.late_from - row.start, 0), count)
        if row.logits > count - skipped:
            raise ValueError(
                f"{row.logits} logit rows are wanted of a request whose last "
                f"{count - skipped} rows alone reach the head (late_from {row.late_from})"
            )
        kept.append(np.arange(first + skipped, first + count, dtype=np.int32))
        first += count
    return np.concatenate(kept)
