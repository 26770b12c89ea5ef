"""`python -m sharding.distributed DIR`: processes that share a mesh, agreed on one plan.

Every process loads the slices that its own devices hold. Exit status 0 when all agree and have
loaded, 2 for wrong usage, 3 when the plans differ or anything is refused.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from dsv41_jax.checkpoint import CheckpointError
from dsv41_jax.checkpoint.loader import load_params
from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.hf_config import load_config
from dsv41_jax.model import Stage
from sharding.launchers import LaunchError, add_process_options, find_processes, initialize
from sharding.mesh import stage_meshes
from sharding.options import add_partition_options, partition_options
from sharding.rules import parameter_specs, partition_of
from sharding.stage_plan import PartitionError, StagePlan
from sharding.tensor_plan import TensorPlan


class PlanMismatchError(Exception):
    """Processes that were started with different plans."""


def plan_digest(config: ModelConfig, plan: StagePlan, tensor: TensorPlan, **sizes: Any) -> str:
    """Names everything that all processes must have alike.

    Args:
      config: the model.
      plan: its stages.
      tensor: how a stage divides.
      **sizes: whatever else decides about shapes, as JSON values.
    """
    facts = {
        "config": dataclasses.asdict(config),
        "stages": plan.counts,
        "relay": plan.relay,
        "tensor": dataclasses.asdict(tensor),
        "sizes": sizes,
        "jax": jax.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def agree(digest: str) -> None:
    """Waits for all processes and compares their plans.

    Raises:
      PlanMismatchError: on every process, with the digests of two that differ.
    """
    own = np.frombuffer(bytes.fromhex(digest), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, own.size)
    digests = [bytes(row).hex() for row in gathered]
    for process, other in enumerate(digests):
        if other != digests[0]:
            raise PlanMismatchError(
                f"process {process} has plan {other[:16]}, but process 0 has {digests[0][:16]}: "
                "start all with the same checkpoint, partition, sizes and versions"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in one of the processes; returns its exit status.

    Raises:
      SystemExit: with status 2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sharding.distributed",
        description="Joins the processes of a run, compares their plans and loads their shares",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=pathlib.Path, metavar="DIR", help="checkpoint directory")
    add_process_options(parser)
    add_partition_options(parser)
    args = parser.parse_args(argv)
    options = partition_options(parser, args)
    try:
        processes = find_processes(
            os.environ, coordinator=args.coordinator, count=args.processes, index=args.process
        )
    except LaunchError as error:
        parser.error(str(error))
    try:
        config = load_config(args.directory)
        plan, tensor = options.stage_plan(config), options.tensor_plan(config)
        initialize(processes)
        agree(plan_digest(config, plan, tensor))
        _load(args.directory, config, plan, tensor)
    except (CheckpointError, ConfigError, PartitionError, PlanMismatchError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 3
    except (RuntimeError, ValueError) as error:
        print(f"refused: the processes cannot be joined: {error}", file=sys.stderr)
        return 3
    return 0


def _load(
    directory: pathlib.Path, config: ModelConfig, plan: StagePlan, tensor: TensorPlan
) -> None:
    """Loads what this process's devices hold, and says how much that is."""
    meshes = stage_meshes(len(plan.stages), tensor.devices)
    here = jax.process_index()
    for contents, mesh in zip(plan.stages, meshes, strict=True):
        if not any(device.process_index == here for device in mesh.devices.flat):
            continue
        specs = parameter_specs(Stage(config, contents.layers, partition_of(tensor)))
        shardings = jax.tree.map(lambda spec, mesh=mesh: NamedSharding(mesh, spec), specs)
        params = load_params(
            directory, config, layers=contents.layers, shardings=shardings, progress=False
        )
        held = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(params)
            for shard in leaf.addressable_shards
        )
        print(f"process {here} of {jax.process_count()}: stage {contents.stage}, {held} bytes")


if __name__ == "__main__":
    sys.exit(main())
