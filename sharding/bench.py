"""`python -m sharding.bench DIR`: what a pipeline's step sends, sums and overlaps.

Exit status 0 if the traffic is the plan's and no layer sums more than twice, 1 if not, 2 for wrong
usage, 3 when the partition, the configuration or the checkpoint is refused.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dsv41_jax.checkpoint import CheckpointError
from dsv41_jax.config import ConfigError
from dsv41_jax.hf_config import load_config
from dsv41_jax.inference import columns_for, request_rows, window_ring
from sharding.mesh import provide_cpu_devices
from sharding.microbatch import microbatch_tokens
from sharding.options import add_partition_options, partition_options, positive
from sharding.pipeline import Pipeline, build_pipeline
from sharding.stage_plan import PartitionError
from sharding.stage_runner import Bucket
from sharding.traffic import all_reduces, carried_bytes

FINE, FELL_SHORT, REFUSED = 0, 1, 3
MOST_SUMS = 2  # of a layer: after attention and after the experts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Raises:
      SystemExit: with status 2 for wrong usage.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    options = partition_options(parser, given)
    try:
        config = load_config(given.directory)
        plan, tensor = options.stage_plan(config), options.tensor_plan(config)
        provide_cpu_devices(len(plan.stages) * tensor.devices)
        microbatches = options.microbatches(plan)
        pipeline = build_pipeline(given.directory, plan, tensor, microbatches=microbatches)
    except (ConfigError, PartitionError, CheckpointError) as error:
        print(f"bench: refused: {error}", file=sys.stderr)
        return REFUSED
    traffic = measure_traffic(pipeline, given.tokens)
    facts = traffic | measure_dispatch(pipeline, given.tokens)
    if given.json:
        print(json.dumps(facts))
    else:
        print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    return FINE if traffic["ok"] else FELL_SHORT


def measure_traffic(pipeline: Pipeline, tokens: int) -> dict[str, Any]:
    """Bytes of a microbatch over every boundary, by the plan and by the programs, and its sums.

    Args:
      pipeline: loaded stages.
      tokens: tokens of a step.
    """
    rows = microbatch_tokens(tokens, pipeline.microbatches)
    planned = [
        rows * (boundary.stream_bytes_per_token + boundary.relay_bytes_per_token)
        for boundary in pipeline.plan.boundaries
    ]
    carried = list(carried_bytes(pipeline, rows))
    first = pipeline.stages[0]
    sums, layers = 0, len(first.step.stage.layers)
    if first.mesh.size > 1:
        sums = all_reduces(first, tokens=rows) - 1  # one of the embedding
    return {
        "ok": planned == carried and sums <= MOST_SUMS * layers,
        "microbatches": pipeline.microbatches,
        "microbatch_rows": rows,
        "planned_microbatch_bytes": planned,
        "carried_microbatch_bytes": carried,
        "first_stage_layers": layers,
        "first_stage_all_reduces": sums,
    }


def measure_dispatch(pipeline: Pipeline, tokens: int) -> dict[str, Any]:
    """Seconds until a step's microbatches are dispatched, the first is done, and all are.

    Args:
      pipeline: loaded stages.
      tokens: tokens of the step; one request of random ids.
    """
    config = pipeline.config
    ids = np.random.default_rng(0).integers(0, config.vocab_size, tokens)
    rows = request_rows(config, ids.tolist(), 0, tokens, tokens)
    pages = columns_for(config, tokens)
    size = microbatch_tokens(tokens, pipeline.microbatches)
    bucket = Bucket(tokens=size, requests=1, columns=pages, logit_rows=size)
    pools = {"window_pages": window_ring(config, tokens), "global_pages": pages, "slots": 1}
    jax.block_until_ready(pipeline.step(pipeline.init_state(**pools), [rows], bucket, None)[1])
    states = jax.block_until_ready(pipeline.init_state(**pools))
    began = time.perf_counter()
    results, states = pipeline.step(states, [rows], bucket, None)
    dispatched = time.perf_counter() - began
    unfinished = sum(not result.value.is_ready() for result in results)
    results[0].value.block_until_ready()
    first = time.perf_counter() - began
    jax.block_until_ready((results[-1].value, states))
    return {
        "dispatch_seconds": round(dispatched, 4),
        "first_microbatch_seconds": round(first, 4),
        "step_seconds": round(time.perf_counter() - began, 4),
        "unfinished_when_all_are_dispatched": unfinished,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sharding.bench",
        description="Measures what a pipeline's step sends, sums and overlaps",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=pathlib.Path, metavar="DIR", help="checkpoint directory")
    add_partition_options(parser)
    parser.add_argument(
        "--tokens", type=positive, default=256, metavar="N", help="tokens of a step; %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
