"""From a checkpoint directory to the text model's parameters, slice by slice."""

import dataclasses
import pathlib
from typing import Any

import jax
import tqdm

from dsv41_jax.checkpoint.errors import CheckpointError
from dsv41_jax.checkpoint.groups import Shardings, parameter_groups, params_tree, units_of
from dsv41_jax.checkpoint.key_map import Component, expected_tensors, layout_faults
from dsv41_jax.checkpoint.parallel_reader import UnitReader, bytes_to_read
from dsv41_jax.checkpoint.reader import Checkpoint
from dsv41_jax.config import ModelConfig


def open_checkpoint(path: str | pathlib.Path, config: ModelConfig) -> Checkpoint:
    """Opens a checkpoint and checks every tensor's name, dtype and shape; reads no data.

    Raises:
      CheckpointError: lists every fault of the files, or every difference to the layout that
        the configuration describes.
    """
    checkpoint = Checkpoint.open(path)
    faults = layout_faults(expected_tensors(config), checkpoint.tensors)
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
    progress: bool = True,
) -> dict[str, Any]:
    """Loads the text model's parameters, as stored, to devices.

    Each device gets its slice straight from the files; no tensor is put together whole. Engram
    tables, the draft and the vision part stay in the files.

    Args:
      path: checkpoint directory.
      config: its configuration.
      layers: consecutive backbone layers of one stage, all if None.
      shardings: one `NamedSharding` for each leaf, in the shape of the result; None puts
        everything on the default device. Experts that do not divide over their mesh axes are
        padded with zeros.
      progress: whether to show a progress bar with rate and remaining time on stderr.

    Returns:
      Nested dict that mirrors the tensor names; see `abstract_params`.

    Raises:
      CheckpointError: the directory is not a complete checkpoint of this configuration.
      ValueError: `layers` are not layers of the model.
    """
    groups = parameter_groups(config, layers)
    checkpoint = open_checkpoint(path, config)
    arrays: dict[tuple[str, ...], jax.Array] = {}
    with tqdm.tqdm(
        total=bytes_to_read(groups, shardings),
        desc="Loading parameters",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        reader = UnitReader(checkpoint, shardings, bar)
        for unit in units_of(groups).values():
            arrays |= reader.read(unit)
    return params_tree((group.keys, arrays[group.keys]) for group in groups)
