"""`python -m sharding.convert DIR OUT`: a checkpoint as sharded Orbax directories, by stage.

What was finished before an interruption is kept: the same command goes on where it stopped. Exit
status 0 when OUT is complete, 1 when `--verify` finds a difference, 2 for wrong usage, 3 when the
checkpoint, the partition or OUT is refused.
"""

import argparse
import dataclasses
import logging
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from jax.sharding import NamedSharding

from dsv41_jax.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from dsv41_jax.checkpoint.groups import ParameterGroup, Shardings, parameter_groups, units_of
from dsv41_jax.checkpoint.key_map import TensorSpec, expected_tensors
from dsv41_jax.checkpoint.manifest import Manifest, directory_size, fingerprint
from dsv41_jax.checkpoint.parallel_reader import UnitReader, bytes_to_read
from dsv41_jax.checkpoint.writer import write_index, write_shard
from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.hf_config import load_config
from dsv41_jax.model import Stage
from sharding.mesh import provide_cpu_devices, stage_meshes
from sharding.options import add_partition_options, partition_options
from sharding.rules import parameter_specs, partition_of
from sharding.stage_plan import PartitionError, StagePlan
from sharding.tensor_plan import TensorPlan

FINE, DIFFERENT, REFUSED = 0, 1, 3
_SMALL_FILE = 64 << 20  # bytes; tokenizer and template files are copied, nothing larger is


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Raises:
      SystemExit: with status 2 for wrong usage.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    options = partition_options(parser, args)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells the tale of every directory
    try:
        config = load_config(args.directory)
        plan, tensor = options.stage_plan(config), options.tensor_plan(config)
        provide_cpu_devices(tensor.devices)
        convert(args.directory, args.out, config, plan, tensor, progress=True)
        differences = verify(args.directory, args.out, config) if args.verify else []
    except (CheckpointError, ConfigError, PartitionError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    for name in differences:
        print(f"{name} differs from the original", file=sys.stderr)
    if differences:
        return DIFFERENT
    print(f"{args.out} is complete{' and equal bit for bit' if args.verify else ''}")
    return FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sharding.convert",
        description="Writes a checkpoint as sharded Orbax directories, one per stage and layer",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=pathlib.Path, metavar="DIR", help="checkpoint directory")
    parser.add_argument(
        "out", type=pathlib.Path, metavar="OUT", help="new or interrupted directory"
    )
    parser.add_argument(
        "--verify", action="store_true", help="load both afterwards and compare every bit"
    )
    add_partition_options(parser)
    return parser


def convert(
    directory: pathlib.Path,
    out: pathlib.Path,
    config: ModelConfig,
    plan: StagePlan,
    tensor: TensorPlan,
    *,
    progress: bool,
) -> None:
    """Converts a checkpoint, or goes on with an interrupted conversion of the same one.

    Host memory holds one layer at a time, and Orbax's copies of it.

    Args:
      directory: checkpoint in the released layout.
      out: new directory, or one whose conversion was interrupted.
      config: of the checkpoint.
      plan: stages; each gets a directory.
      tensor: how many shards a split parameter has.
      progress: whether to show a progress bar on stderr.

    Raises:
      CheckpointError: the checkpoint is not complete, or `out` holds something else.
    """
    checkpoint = open_checkpoint(directory, config)
    if Manifest.read(directory) is not None:
        raise CheckpointError(
            str(directory), ["it is a converted checkpoint; convert the original instead"]
        )
    manifest = Manifest(
        source=fingerprint(directory),
        stages=plan.counts,
        tensor_parallel_size=tensor.devices,
        expert_parallel=tensor.expert_parallel,
        units={
            unit: stage
            for stage, layers in enumerate(plan.ranges)
            for unit in units_of(parameter_groups(config, layers))
        },
    )
    if not _begin(out, manifest):
        return
    _copy_small_files(directory, out)
    _write_stages(checkpoint, out, config, plan, tensor, manifest, progress=progress)
    _write_host_tensors(checkpoint, out, config)
    sizes = {unit: directory_size(manifest.unit_directory(out, unit)) for unit in manifest.units}
    dataclasses.replace(manifest, sizes=sizes).write(out)


def _begin(out: pathlib.Path, manifest: Manifest) -> bool:
    """Prepares the directory; False if nothing is left to do."""
    found = Manifest.read(out)
    if found is None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(str(out), ["it is not empty; name a new directory"])
        out.mkdir(parents=True, exist_ok=True)
        manifest.write(out)
        return True
    for name, what in (
        ("source", "of another checkpoint"),
        ("stages", "with other stages"),
        ("tensor_parallel_size", "with another tensor parallel size"),
        ("expert_parallel", "with experts split otherwise"),
    ):
        if getattr(found, name) != getattr(manifest, name):
            raise CheckpointError(
                str(out), [f"it holds a conversion {what}; name a new directory, or remove it"]
            )
    return not found.complete


def _copy_small_files(directory: pathlib.Path, out: pathlib.Path) -> None:
    for path in directory.iterdir():
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if path.is_file() and not weights and path.stat().st_size < _SMALL_FILE:
            shutil.copyfile(path, out / path.name)


def _write_stages(
    checkpoint: Checkpoint,
    out: pathlib.Path,
    config: ModelConfig,
    plan: StagePlan,
    tensor: TensorPlan,
    manifest: Manifest,
    *,
    progress: bool,
) -> None:
    from dsv41_jax.checkpoint.store import remove_unfinished, save_unit

    remove_unfinished(out)
    [mesh] = stage_meshes(1, tensor.devices, jax.devices("cpu"))
    groups = parameter_groups(config)
    with tqdm.tqdm(
        total=bytes_to_read(groups, None),
        desc="Converting parameters",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for layers in plan.ranges:
            specs = parameter_specs(Stage(config, layers, partition_of(tensor)))
            shardings: Shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            for unit, leaves in units_of(parameter_groups(config, layers)).items():
                path = manifest.unit_directory(out, unit)
                if path.is_dir():
                    bar.update(bytes_to_read(leaves, None))
                    continue
                save_unit(path, _read(checkpoint, leaves, shardings, bar))


def _read(
    checkpoint: Checkpoint, leaves: list[ParameterGroup], shardings: Shardings, bar: tqdm.tqdm
) -> dict[str, Any]:
    arrays = UnitReader(checkpoint, shardings, bar).read(leaves)
    tree: dict[str, Any] = {}
    for keys, array in arrays.items():
        node = tree
        for key in keys[1:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = array
    return tree


def _write_host_tensors(checkpoint: Checkpoint, out: pathlib.Path, config: ModelConfig) -> None:
    """Copies Engram tables, draft and vision part, a shard each, as they are."""
    parts: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in expected_tensors(config).items():
        if not spec.in_params:
            part = f"engram_{name.split('.')[1]}" if spec.component == "engram" else spec.component
            parts.setdefault(part, {})[name] = spec
    weight_map = {}
    for i, specs in enumerate(parts.values(), 1):
        shard = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        weight_map |= dict.fromkeys(specs, shard)
        if not (out / shard).exists():
            unfinished = out / f"{shard}.tmp"
            write_shard(unfinished, specs, (checkpoint.read(name) for name in specs))
            unfinished.rename(out / shard)
    if parts:
        write_index(
            out, weight_map, sum(s.nbytes for part in parts.values() for s in part.values())
        )


def verify(directory: pathlib.Path, out: pathlib.Path, config: ModelConfig) -> list[str]:
    """Parameters whose bits differ between a checkpoint and its conversion.

    Host memory holds one layer of both at a time.

    Raises:
      CheckpointError: one of them is not complete.
    """
    from dsv41_jax.checkpoint.store import restore_unit

    before, after = open_checkpoint(directory, config), open_checkpoint(out, config)
    manifest = Manifest.read(out)
    different = []
    with tqdm.tqdm(disable=True) as bar:
        reader = UnitReader(before, None, bar)
        for unit, leaves in units_of(parameter_groups(config)).items():
            first = reader.read(leaves)
            second = restore_unit(manifest.unit_directory(out, unit), leaves, None)
            different += [
                ".".join(keys)
                for keys, one in first.items()
                if not np.array_equal(_bits(one), _bits(second[keys]))
            ]
            del first, second  # before the next ones are read
    different += [
        name
        for name in after.tensors
        if not np.array_equal(before.read_bytes(name), after.read_bytes(name))
    ]
    return different


def _bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
