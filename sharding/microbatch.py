"""Cuts a step into microbatches by tokens, and puts their results together again."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dsv41_jax.host_batch import RequestRows, round_rows
from dsv41_jax.sampling import Sampled, SamplingBatch


def cut_rows(rows: Sequence[RequestRows], count: int) -> list[list[RequestRows]]:
    """At most `count` microbatches of a step, in order, as even as they can be; none is empty.

    A request may go on in the next microbatch: everything it needs from the one before is in
    the caches, or in the history, which is cut along.
    """
    total = sum(len(row.token_ids) for row in rows)
    parts = max(1, min(count, total))
    bounds = [total * part // parts for part in range(parts + 1)]
    return [_between(rows, *pair) for pair in zip(bounds, bounds[1:], strict=False)]


def microbatch_tokens(tokens: int, count: int) -> int:
    """Bucket that holds each of `count` microbatches of a step of `tokens`."""
    return round_rows(-(-tokens // count))


def num_logits(rows: Sequence[RequestRows]) -> int:
    """Logit rows that some requests ask for."""
    return sum(row.logits for row in rows)


def sampling_rows(sampling: SamplingBatch, start: int, logit_rows: int) -> SamplingBatch:
    """`logit_rows` rows from row `start` on; past the end the last one again, as padding."""
    where = start + np.arange(logit_rows)
    rows = dataclasses.replace(sampling, changes=None)  # a table of its own, not per row
    rows = jax.tree.map(lambda a: np.take(a, where, axis=0, mode="clip"), rows)
    return dataclasses.replace(rows, changes=sampling.changes)


def join_sampled(parts: Sequence[Sampled], counts: Sequence[int], logit_rows: int) -> Sampled:
    """The microbatches' tokens in the step's order.

    Args:
      parts: numpy results.
      counts: real rows of each; they come first.
      logit_rows: rows of the result; zeros in padding.
    """

    def join(*leaves: np.ndarray) -> np.ndarray:
        real = [leaf[:count] for leaf, count in zip(leaves, counts, strict=True)]
        whole = np.concatenate(real)
        return np.pad(whole, [(0, logit_rows - len(whole))] + [(0, 0)] * (whole.ndim - 1))

    return jax.tree.map(join, *parts)


def _between(rows: Sequence[RequestRows], begin: int, end: int) -> list[RequestRows]:
    """The shares of tokens begin..end-1 of the step."""
    found, first = [], 0
    for row in rows:
        length = len(row.token_ids)
        start, stop = max(begin - first, 0), min(end - first, length)
        if start < stop:
            found.append(_part(row, start, stop))
        first += length
    return found


def _part(row: RequestRows, start: int, stop: int) -> RequestRows:
    look_back = len(row.history)
    before = np.concatenate([row.history, row.token_ids[:start]])
    wanted_from = len(row.token_ids) - row.logits
    return dataclasses.replace(
        row,
        token_ids=row.token_ids[start:stop],
        start=row.start + start,
        history=before[len(before) - look_back :],
        logits=max(0, stop - max(start, wanted_from)),
    )
