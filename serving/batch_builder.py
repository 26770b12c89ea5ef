"""From a step's plan to what the runner computes: request rows and how they are sampled."""

from collections.abc import Callable

import numpy as np

from dsv41_jax.host_batch import RequestRows
from dsv41_jax.sampling import MAX_BANNED, SamplingBatch
from serving.scheduler import ScheduledRows, StepPlan
from serving.sequence import Sequence

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
        )
        for rows in plan.rows
    ]


def sampling_batch(
    plan: StepPlan,
    find: Callable[[int], Sequence],
    *,
    logit_rows: int,
    eos_token_id: int,
) -> SamplingBatch:
    """How the step's logit rows choose their tokens, as numpy arrays.

    Args:
      plan: the step.
      find: the sequence of a number in the plan.
      logit_rows: L, rows of the result; at least as many as the plan asks for.
      eos_token_id: banned with a request's stop tokens before its `min_tokens`.
    """
    batch = empty_sampling(logit_rows)
    row = 0
    for rows in plan.rows:
        end = row + rows.logits
        batch.target[row:end] = rows.targets
        if rows.samples:
            _fill(batch, end - 1, find(rows.number), rows, eos_token_id)
        row = end
    return batch


def empty_sampling(logit_rows: int) -> SamplingBatch:
    """Padding throughout, as numpy arrays."""
    return SamplingBatch(
        temperature=np.zeros(logit_rows, np.float32),
        top_p=np.ones(logit_rows, np.float32),
        top_k=np.zeros(logit_rows, np.int32),
        min_p=np.zeros(logit_rows, np.float32),
        seed=np.zeros(logit_rows, np.uint32),
        step=np.zeros(logit_rows, np.int32),
        target=np.full(logit_rows, -1, np.int32),
        banned=np.full((logit_rows, MAX_BANNED), -1, np.int32),
    )


def _fill(
    batch: SamplingBatch, row: int, sequence: Sequence, rows: ScheduledRows, eos_token_id: int
) -> None:
    sampling = sequence.request.sampling
    generated = rows.start + len(rows.token_ids) - sequence.num_prompt
    if sampling.temperature >= _LEAST_TEMPERATURE:
        batch.temperature[row] = sampling.temperature
    batch.top_p[row] = sampling.top_p
    batch.top_k[row] = sampling.top_k
    batch.min_p[row] = sampling.min_p
    batch.seed[row] = sequence.seed
    batch.step[row] = generated
    if generated < sampling.min_tokens:
        ending = sampling.stop_token_ids + (() if sampling.ignore_eos else (eos_token_id,))
        batch.banned[row, : len(ending)] = ending
