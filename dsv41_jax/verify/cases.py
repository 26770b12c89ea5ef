"""The cases by name, and how each is run on a directory."""

import functools
from collections.abc import Callable, Iterator, Sequence

from dsv41_jax.verify.engram import check_engram, check_real_engram
from dsv41_jax.verify.forward import Forward
from dsv41_jax.verify.layers import check_layers
from dsv41_jax.verify.logits import RUN_CASES, check_greedy, check_multi, check_run
from dsv41_jax.verify.measure import Measure, uncompared
from dsv41_jax.verify.ops import check_ops, unchecked_ops
from dsv41_jax.verify.tolerances import Tier
from dsv41_jax.verify.vectors import Directory, VectorError
from pallas_kernels.dispatch import Implementation

IN_DIRECTORY = (
    *("ops", "engram", "layers", "multi", "text", "short", "greedy"),
    *("image", "draft"),
)
CASES = (*IN_DIRECTORY, "real_engram")
UNSUPPORTED = ("image", "draft")
_MODEL_CASES = ("layers", "multi", "greedy", *RUN_CASES)
_FILES = {"draft": "greedy"}  # recorded beside the logits of the same run


def recorded_cases(directory: Directory) -> list[str]:
    """The cases whose vectors a directory holds.

    Raises:
      VectorError: it holds none.
    """
    found = [
        case
        for case in IN_DIRECTORY
        if directory.has(_FILES.get(case, case))
        and (case != "draft" or "draft.output_ids" in directory.vectors("greedy"))
    ]
    if not found:
        raise VectorError(f"{directory.path} has no golden_*.npz")
    return found


def run_cases(
    directory: Directory,
    cases: Sequence[str],
    tier: Tier,
    implementation: Implementation,
    say: Callable[[str], None],
) -> Iterator[Measure]:
    """Measures of some cases, in the order given.

    Args:
      directory: checkpoint and vectors.
      cases: names out of `CASES`.
      tier: which limits hold for the layers.
      implementation: of the model's operations.
      say: is told what is going on; a step takes a while to compile.

    Raises:
      VectorError: vectors are missing, misshapen or contradict the configuration.
      ConfigError: the configuration is refused.
      CheckpointError: the checkpoint is refused.
    """
    for case in cases:
        if case != "real_engram" and not directory.has(_FILES.get(case, case)):
            raise VectorError(f"{directory.path} has no golden_{_FILES.get(case, case)}.npz")

    @functools.cache
    def forward() -> Forward:
        say("layers: compiling the step, which may take a minute")
        positions = max(_longest(directory, case) for case in cases if case in _MODEL_CASES)
        return Forward(
            directory.config,
            directory.params,
            directory.engram,
            positions=positions,
            implementation=implementation,
        )

    for case in cases:
        say(f"{case}: running")
        measures = list(_run(case, directory, tier, implementation, forward, say))
        if not measures:
            measures = [uncompared(case, "arrays", "the file holds nothing to compare")]
        yield from measures


def _run(
    case: str,
    directory: Directory,
    tier: Tier,
    implementation: Implementation,
    forward: Callable[[], Forward],
    say: Callable[[str], None],
) -> Iterator[Measure]:
    if case in UNSUPPORTED:
        yield uncompared(case, "case", "not supported yet")
    elif case == "engram":
        yield from check_engram(directory)
    elif case == "real_engram":
        yield from check_real_engram(directory)
    elif case == "ops":
        vectors = directory.vectors("ops")
        if unchecked := unchecked_ops(vectors):
            say(f"ops: left out, of parts the model does not have yet: {', '.join(unchecked)}")
        yield from check_ops(directory.config, vectors, implementation)
    elif case == "layers":
        yield from check_layers(forward(), directory.vectors(case), tier)
    elif case == "multi":
        yield from check_multi(forward(), directory.vectors(case))
    elif case == "greedy":
        yield from check_greedy(forward(), directory.vectors(case))
    else:
        yield from check_run(case, forward(), directory.vectors(case))


def _longest(directory: Directory, case: str) -> int:
    """Positions of the longest sequence of a case."""
    vectors = directory.vectors(case)
    if case == "greedy":
        return vectors["prompt_ids"].size + vectors["gen_ids"].size
    return vectors["input_ids"].shape[-1]
