"""From a step's plan to what the runner computes: request rows and how they are sampled."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np

from dsv41_jax.host_batch import RequestRows
from dsv41_jax.sampling import NUM_ALTERNATIVES, LogitChanges, SamplingBatch
from serving.logit_rules import empty_changes
from serving.scheduler import ScheduledRows, StepPlan, UpcomingRows
from serving.sequence import Sequence
from sharding.limits import EngineLimits

_LEAST_TEMPERATURE = 1e-5  # below it the scaled logits overflow; the likeliest token is meant


def request_rows(plan: StepPlan) -> list[RequestRows]:
    """The rows of every request of the step, in the plan's order."""
    return [
        RequestRows(
            token_ids=rows.token_ids,
            start=rows.start,
            history=rows.history,
            window_pages=rows.window_pages,
            global_pages=rows.global_pages,
            slot=rows.slot,
            logits=rows.logits,
            late_from=rows.late_from,
        )
        for rows in plan.rows
    ]


def upcoming_rows(rows: Rows[UpcomingRows]) -> list[RequestRows]:
    """Rows that a step will probably have; their pages and slots are not decided yet."""
    return [
        RequestRows(
            token_ids=part.token_ids,
            start=0,
            history=part.history,
            window_pages=(),
            global_pages=(),
            slot=-1,
            logits=0,
        )
        for part in rows
    ]


def sampling_batch(
    plan: StepPlan,
    find: Callable[[int], Sequence],
    *,
    limits: EngineLimits,
    vocab_size: int,
    no_changes: LogitChanges,
) -> SamplingBatch:
    """How the step's logit rows choose their tokens, as numpy arrays.

    Args:
      plan: the step.
      find: the sequence of a number in the plan.
      limits: of the step.
      vocab_size: V.
      no_changes: `empty_changes`, wherever it lies; returned in a step that changes nothing.
    """
    batch = _plain_sampling(limits.logit_rows, no_changes)
    changing: list[tuple[int, Sequence]] = []
    row = 0
    for rows in plan.rows:
        end = row + rows.logits
        batch.target[row:end] = rows.targets
        if rows.samples:
            sequence = find(rows.number)
            _fill(batch, end - 1, sequence, rows)
            if sequence.rules is not None:
                changing.append((end - 1, sequence))
        row = end
    if not changing:
        return batch
    changes = empty_changes(limits, vocab_size)
    for change_row, (row, sequence) in enumerate(changing):
        if sequence.rules.write(changes, change_row):
            batch.change_row[row] = change_row
    return dataclasses.replace(batch, changes=changes)


def empty_sampling(limits: EngineLimits, vocab_size: int) -> SamplingBatch:
    """Padding throughout, as numpy arrays: what a step's program is compiled for."""
    return _plain_sampling(limits.logit_rows, empty_changes(limits, vocab_size))


def _plain_sampling(logit_rows: int, changes: LogitChanges) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.zeros(logit_rows, np.float32),
        top_p=np.ones(logit_rows, np.float32),
        top_k=np.zeros(logit_rows, np.int32),
        min_p=np.zeros(logit_rows, np.float32),
        seed=np.zeros(logit_rows, np.uint32),
        step=np.zeros(logit_rows, np.int32),
        target=np.full(logit_rows, -1, np.int32),
        watched=np.full((logit_rows, NUM_ALTERNATIVES), -1, np.int32),
        change_row=np.full(logit_rows, -1, np.int32),
        changes=changes,
    )


def _fill(batch: SamplingBatch, row: int, sequence: Sequence, rows: ScheduledRows) -> None:
    sampling = sequence.request.sampling
    if sampling.temperature >= _LEAST_TEMPERATURE:
        batch.temperature[row] = sampling.temperature
    batch.top_p[row] = sampling.top_p
    batch.top_k[row] = sampling.top_k
    batch.min_p[row] = sampling.min_p
    batch.seed[row] = sequence.seed
    batch.step[row] = rows.start + len(rows.token_ids) - sequence.num_prompt
    if sampling.logprob_token_ids:
        batch.watched[row, : len(sampling.logprob_token_ids)] = sampling.logprob_token_ids
