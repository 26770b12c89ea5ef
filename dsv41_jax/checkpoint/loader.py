"""From a checkpoint directory to the text model's parameters, slice by slice."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import tqdm

from dsv41_jax.checkpoint.errors import CheckpointError
from dsv41_jax.checkpoint.groups import (
    ParameterGroup,
    Shardings,
    parameter_groups,
    params_tree,
    units_of,
)
from dsv41_jax.checkpoint.key_map import Component, expected_tensors, layout_faults
from dsv41_jax.checkpoint.manifest import Manifest
from dsv41_jax.checkpoint.parallel_reader import UnitReader, bytes_to_read
from dsv41_jax.checkpoint.reader import Checkpoint
from dsv41_jax.config import ModelConfig


def open_checkpoint(path: str | pathlib.Path, config: ModelConfig) -> Checkpoint:
    """Opens a checkpoint and checks every tensor's name, dtype and shape; reads no data.

    The shards of a converted checkpoint hold what is not among the parameters.

    Raises:
      CheckpointError: lists every fault of the files, or every difference to the layout that
        the configuration describes.
    """
    expected = expected_tensors(config)
    manifest = Manifest.read(path)
    if manifest is not None:
        manifest.check(path)
        expected = {name: spec for name, spec in expected.items() if not spec.in_params}
        if not expected:
            return Checkpoint(pathlib.Path(path), {})
    checkpoint = Checkpoint.open(path)
    faults = layout_faults(expected, checkpoint.tensors)
    if faults:
        raise CheckpointError(str(path), faults)
    return checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentSize:
    """How much of a checkpoint one component is."""

    tensors: int
    nbytes: int


def component_sizes(checkpoint: Checkpoint, config: ModelConfig) -> dict[Component, ComponentSize]:
    """Number of tensors and bytes of each component that a checkpoint has.

    `load_params` leaves `draft` and `vision` alone; `engram` tables stay in the file.
    """
    expected = expected_tensors(config)
    members: dict[Component, list[int]] = {}
    for name, tensor in checkpoint.tensors.items():
        members.setdefault(expected[name].component, []).append(tensor.nbytes)
    return {
        component: ComponentSize(tensors=len(sizes), nbytes=sum(sizes))
        for component, sizes in members.items()
    }


def load_params(
    path: str | pathlib.Path,
    config: ModelConfig,
    *,
    layers: range | None = None,
    shardings: Shardings | None = None,
    embedding: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Loads the text model's parameters, as stored, to devices.

    Each device gets its slice straight from the files; no tensor is put together whole. Engram
    tables, the draft and the vision part stay in the files.

    Args:
      path: checkpoint directory, or one that `sharding.convert` wrote, for any mesh.
      config: its configuration.
      layers: consecutive backbone layers of one stage, all if None.
      shardings: one `NamedSharding` for each leaf, in the shape of the result; None puts
        everything on the default device. Experts that do not divide over their mesh axes are
        padded with zeros.
      embedding: whether the embedding is wanted, or stays in the files.
      progress: whether to show a progress bar with rate and remaining time on stderr.

    Returns:
      Nested dict that mirrors the tensor names; see `abstract_params`.

    Raises:
      CheckpointError: the directory is not a complete checkpoint of this configuration.
      ValueError: `layers` are not layers of the model.
    """
    groups = parameter_groups(config, layers, embedding=embedding)
    checkpoint = open_checkpoint(path, config)
    manifest = Manifest.read(path)
    arrays: dict[tuple[str, ...], jax.Array] = {}
    with tqdm.tqdm(
        total=bytes_to_read(groups, shardings),
        desc="Loading parameters",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        if manifest is None:
            read = UnitReader(checkpoint, shardings, bar).read
        else:
            read = _restorer(path, manifest, shardings, bar)
        for unit in units_of(groups).values():
            arrays |= read(unit)
    return params_tree((group.keys, arrays[group.keys]) for group in groups)


def _restorer(
    path: str | pathlib.Path, manifest: Manifest, shardings: Shardings | None, bar: tqdm.tqdm
) -> Callable[[list[ParameterGroup]], dict[tuple[str, ...], jax.Array]]:
    from dsv41_jax.checkpoint.store import restore_unit  # Orbax takes seconds to import

    def read(groups: list[ParameterGroup]) -> dict[tuple[str, ...], jax.Array]:
        unit = groups[0].keys[0]
        if unit not in manifest.units:
            raise CheckpointError(str(path), [f"{unit} is missing; it was converted from less"])
        arrays = restore_unit(manifest.unit_directory(path, unit), groups, shardings)
        bar.update(bytes_to_read(groups, shardings))
        return arrays

    return read
