"""`python -m sharding.verify DIR`: the vectors of a checkpoint, through a pipeline.

Exit status 0 if everything is within tolerance, 1 if not, 2 for wrong usage, 3 when the partition,
the configuration, the checkpoint or the vectors are refused.
"""

import argparse
import pathlib
import signal
import sys
from collections.abc import Iterator, Sequence

from dsv41_jax.checkpoint import CheckpointError
from dsv41_jax.config import ConfigError
from dsv41_jax.hf_config import load_config
from dsv41_jax.inference import Model
from dsv41_jax.verify.layers import check_layers
from dsv41_jax.verify.logits import RUN_CASES, check_greedy, check_multi, check_run
from dsv41_jax.verify.measure import Measure
from dsv41_jax.verify.report import show
from dsv41_jax.verify.tolerances import Tier
from dsv41_jax.verify.vectors import Directory, VectorError, Vectors
from pallas_kernels.dispatch import resolve
from sharding.mesh import provide_cpu_devices
from sharding.options import PartitionOptions, add_partition_options, partition_options
from sharding.pipeline import Pipeline, build_pipeline
from sharding.stage_plan import PartitionError, StagePlan
from sharding.tensor_plan import TensorPlan
from sharding.verification import (
    PipelineForward,
    PipelineRun,
    check_against_one_device,
    without_exact_rows,
)

FINE, FELL_SHORT, REFUSED = 0, 1, 3
RECORDED = ("layers", "multi", "greedy", *RUN_CASES)
CASES = ("single", *RECORDED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Raises:
      SystemExit: with status 2 for wrong usage.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    options = partition_options(parser, given)
    directory = Directory(given.directory, progress=not given.json)
    try:
        config = load_config(given.directory)
        plan, tensor = options.stage_plan(config), options.tensor_plan(config)
        provide_cpu_devices(len(plan.stages) * tensor.devices)
        cases = _recorded(directory) if given.only is None else given.only
        measures = _measures(directory, cases, plan, tensor, options)
        return FINE if show(measures, as_json=given.json) else FELL_SHORT
    except (VectorError, ConfigError, PartitionError, CheckpointError) as error:
        _say(f"refused: {error}")
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sharding.verify",
        description="Compares a checkpoint's vectors with what a pipeline of stages computes",
        allow_abbrev=False,
    )
    parser.add_argument(
        "directory", type=pathlib.Path, metavar="DIR", help="checkpoint with golden_*.npz files"
    )
    add_partition_options(parser)
    parser.add_argument(
        "--only",
        type=_cases,
        metavar="CASE,...",
        help=f"out of {', '.join(CASES)}; `single` compares with one program on one device "
        "(default: every case whose file is there)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def _cases(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no such case: {', '.join(unknown)}; cases are {', '.join(CASES)}"
        )
    return names


def _recorded(directory: Directory) -> list[str]:
    found = [case for case in RECORDED if directory.has(case)]
    if not found:
        raise VectorError(f"{directory.path} has no golden_*.npz of {', '.join(RECORDED)}")
    return ["single", *found]


def _measures(
    directory: Directory,
    cases: Sequence[str],
    plan: StagePlan,
    tensor: TensorPlan,
    options: PartitionOptions,
) -> Iterator[Measure]:
    """Measures of some cases, in order; the pipeline is loaded once."""
    # Whole experts keep their roundings; channels split over devices do not.
    tier: Tier = "strict" if tensor.devices == 1 or tensor.expert_parallel else "loose"
    vectors = {case: directory.vectors("short" if case == "single" else case) for case in cases}
    positions = max(_length(directory, case) for case in cases)
    pipeline = build_pipeline(
        directory.path,
        plan,
        tensor,
        microbatches=options.microbatches(plan),
        progress=directory.progress,
    )
    stages = ",".join(map(str, plan.counts))
    _say(f"stages of {stages} layers, {tensor.devices} devices each, tier {tier}")
    run = PipelineRun(pipeline, positions=positions)
    for case in cases:
        _say(f"{case}: running; the first case of a kind compiles the stages")
        for measure in _case(case, directory, pipeline, run, vectors[case], tier):
            yield measure if tier == "strict" else without_exact_rows(measure)


def _case(
    case: str,
    directory: Directory,
    pipeline: Pipeline,
    run: PipelineRun,
    vectors: Vectors,
    tier: Tier,
) -> Iterator[Measure]:
    if case == "single":
        ids = vectors.token_ids("input_ids", pipeline.config.vocab_size)
        yield from check_against_one_device(pipeline, _model(directory), ids)
    elif case == "layers":
        positions = _length(directory, case)
        forward = PipelineForward(pipeline, directory.engram, positions=positions)
        yield from check_layers(forward, vectors, tier)
    elif case == "multi":
        yield from check_multi(run, vectors)
    elif case == "greedy":
        yield from check_greedy(run, vectors)
    else:
        yield from check_run(case, run, vectors)


def _model(directory: Directory) -> Model:
    return Model(
        directory.config, directory.params, directory.engram, directory.path, resolve(None)
    )


def _length(directory: Directory, case: str) -> int:
    """Positions of the longest sequence of a case."""
    if case == "greedy":
        vectors = directory.vectors(case)
        return vectors["prompt_ids"].size + vectors["gen_ids"].size
    return directory.vectors("short" if case == "single" else case)["input_ids"].shape[-1]


def _say(text: str) -> None:
    print(f"verify: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command quietly
    sys.exit(main())
