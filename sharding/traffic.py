"""What a step really moves from stage to stage, from the traced programs."""

import math
import re
from typing import Any

import jax

from sharding.pipeline import Pipeline
from sharding.stage_runner import Bucket, StageRunner


def carried_bytes(pipeline: Pipeline, tokens: int) -> tuple[int, ...]:
    """Bytes of every bundle of a step, by boundary; traces the stages and runs nothing.

    Args:
      pipeline: the stages.
      tokens: T of the step, a multiple of the row tile.
    """
    bucket = Bucket(tokens=tokens, requests=1, columns=4, logit_rows=tokens)
    found, received = [], None
    for stage in pipeline.stages[:-1]:
        state = jax.eval_shape(
            lambda s=stage: s.make_state(window_pages=1, global_pages=1, slots=1)
        )
        batch = stage.batch([], bucket)
        received, _ = jax.eval_shape(stage.program, stage.params, state, batch, received, None)
        found.append(_nbytes(received))
    return tuple(found)


def _nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def all_reduces(stage: StageRunner, *, tokens: int) -> int:
    """Sums over a stage's devices in its compiled step, as they stand in the program's text.

    A sum inside the loop over row tiles counts once.

    Args:
      stage: the stage; it must be the first, which receives nothing.
      tokens: T of the step.
    """
    bucket = Bucket(tokens=tokens, requests=1, columns=4, logit_rows=tokens)
    state = stage.init_state(window_pages=1, global_pages=1, slots=1)
    lowered = stage.program.lower(stage.params, state, stage.batch([], bucket), None, None)
    return len(re.findall(r" all-reduce(?:-start)?\(", lowered.compile().as_text()))
