"""The jitted step: parameters, caches and a batch in; logits or tokens and new caches out."""

import functools

import jax

from dsv41_jax.batch import TokenBatch
from dsv41_jax.model import Params, Stage
from dsv41_jax.sampling import Sampled, SamplingBatch, sample
from dsv41_jax.state import StageState

# Without this XLA drops roundings to bf16 between operations, which the model's numbers need.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}

_jit = functools.partial(
    jax.jit, static_argnames="stage", donate_argnames="state", compiler_options=COMPILER_OPTIONS
)


@_jit
def forward(
    stage: Stage, params: Params, state: StageState, batch: TokenBatch
) -> tuple[jax.Array, StageState]:
    """One step of the whole model.

    Args:
      stage: every layer of the model.
      params: its parameters.
      state: its caches; donated, so use the returned ones from here on.
      batch: the step's tokens.

    Returns:
      logits: float32[L, V], of the batch's logit rows.
      state: the caches after the step.
    """
    result = stage(params, state, batch)
    return result.head.logits, result.state


@_jit
def forward_and_sample(
    stage: Stage,
    params: Params,
    state: StageState,
    batch: TokenBatch,
    sampling: SamplingBatch,
) -> tuple[Sampled, StageState]:
    """One step of the whole model and a token for each logit row (see `forward`)."""
    result = stage(params, state, batch)
    sampled = sample(
        result.head.logits, sampling, batch.num_logits, implementation=stage.implementation
    )
    return sampled, result.state
