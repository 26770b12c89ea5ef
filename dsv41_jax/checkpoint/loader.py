"""From a checkpoint directory to the text model's parameters, tensor by tensor."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tqdm

from dsv41_jax.checkpoint.errors import CheckpointError
from dsv41_jax.checkpoint.key_map import (
    Component,
    TensorSpec,
    expected_tensors,
    layout_faults,
    parameter_path,
)
from dsv41_jax.checkpoint.reader import Checkpoint
from dsv41_jax.config import ModelConfig

# Scales and packed FP4 codes are bytes to the model.
PARAMETER_DTYPES: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}

Placement = Callable[[tuple[str, ...], np.ndarray], jax.Array]

_ALIGNMENT = 64  # JAX on CPU takes over an aligned host buffer and copies any other


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One leaf of the parameter tree and the tensors that fill it.

    Attributes:
      keys: path of the leaf.
      shape: of the leaf; the experts' tensors are stacked along a new first axis.
      dtype: of the leaf.
      names: the tensors, in the order of the first axis; one where nothing is stacked.
      stacked: whether there is such an axis.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    names: tuple[str, ...]
    stacked: bool

    @property
    def nbytes(self) -> int:
        """Size of the leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


def _in_stage(config: ModelConfig, layers: range, keys: tuple[str, ...]) -> bool:
    if keys[0] == "embed":
        return 0 in layers
    if keys[0] in ("norm", "head"):
        return config.num_hidden_layers - 1 in layers
    return int(keys[0].removeprefix("layers_")) in layers


def _checked_layers(config: ModelConfig, layers: range | None) -> range:
    count = config.num_hidden_layers
    if layers is None:
        return range(count)
    if not layers or layers.step != 1 or layers.start < 0 or layers.stop > count:
        raise ValueError(
            f"{layers} are no consecutive layers of a model with layers 0..{count - 1}"
        )
    return layers


def parameter_groups(config: ModelConfig, layers: range | None = None) -> list[ParameterGroup]:
    """The leaves of a stage's parameter tree, in layer order.

    Args:
      config: the model.
      layers: consecutive backbone layers, all if None. The embedding belongs to the first
        layer, the final norm and the head to the last.
    """
    layers = _checked_layers(config, layers)
    members: dict[tuple[str, ...], list[tuple[str, TensorSpec, bool]]] = {}
    for name, spec in expected_tensors(config).items():
        if not spec.in_params:
            continue
        path = parameter_path(name)
        if _in_stage(config, layers, path.keys):
            stacked = path.expert is not None
            members.setdefault(path.keys, []).append((name, spec, stacked))
    groups = []
    for keys, tensors in members.items():
        names, specs, (stacked, *_) = zip(*tensors, strict=True)
        shape = (len(names), *specs[0].shape) if stacked else specs[0].shape
        groups.append(ParameterGroup(keys, shape, PARAMETER_DTYPES[specs[0].dtype], names, stacked))
    return groups


def _tree(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for keys, leaf in leaves:
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return root


def abstract_params(config: ModelConfig, layers: range | None = None) -> dict[str, Any]:
    """The tree `load_params` returns, as `jax.ShapeDtypeStruct`s; no file is needed."""
    return _tree(
        (group.keys, jax.ShapeDtypeStruct(group.shape, group.dtype))
        for group in parameter_groups(config, layers)
    )


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


def _aligned_bytes(shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].reshape(shape)


class _StageReader:
    """Reads a stage's groups in file order, one top-level entry of the tree at a time.

    Host memory in flight is bounded by the groups of one layer; where the device takes over
    host buffers, nothing exists twice.
    """

    def __init__(self, checkpoint: Checkpoint, place: Placement, progress: tqdm.tqdm) -> None:
        self._checkpoint = checkpoint
        self._place = place
        self._progress = progress

    def _position(self, name: str) -> tuple[str, int]:
        tensor = self._checkpoint.tensors[name]
        return tensor.shard, tensor.begin

    def read(self, groups: list[ParameterGroup]) -> dict[tuple[str, ...], jax.Array]:
        """Device arrays of some groups, by path."""
        pieces = [(name, group, i) for group in groups for i, name in enumerate(group.names)]
        pieces.sort(key=lambda piece: self._position(piece[0]))
        buffers: dict[tuple[str, ...], np.ndarray] = {}
        missing = {group.keys: len(group.names) for group in groups}
        arrays = {}
        for name, group, i in pieces:
            if group.keys not in buffers:
                *rows, columns = group.shape
                buffers[group.keys] = _aligned_bytes((*rows, columns * group.dtype.itemsize))
            buffer = buffers[group.keys]
            data = self._checkpoint.read_bytes(name)
            np.copyto(buffer[i] if group.stacked else buffer, data)
            self._progress.update(data.nbytes)
            missing[group.keys] -= 1
            if not missing[group.keys]:
                whole = buffers.pop(group.keys).view(group.dtype)
                arrays[group.keys] = self._place(group.keys, whole).block_until_ready()
        return arrays


def load_params(
    path: str | pathlib.Path,
    config: ModelConfig,
    *,
    layers: range | None = None,
    place: Placement = lambda keys, value: jax.device_put(value),
    progress: bool = True,
) -> dict[str, Any]:
    """Loads the text model's parameters, as stored, to devices.

    Engram tables, the draft and the vision part stay in the files.

    Args:
      path: checkpoint directory.
      config: its configuration.
      layers: consecutive backbone layers of one stage, all if None.
      place: puts a leaf, given its path and its values, on its devices; whole on the default
        device unless told otherwise.
      progress: whether to show a progress bar on stderr.

    Returns:
      Nested dict that mirrors the tensor names; see `abstract_params`.

    Raises:
      CheckpointError: the directory is not a complete checkpoint of this configuration.
      ValueError: `layers` are not layers of the model.
    """
    groups = parameter_groups(config, layers)
    checkpoint = open_checkpoint(path, config)
    units: dict[str, list[ParameterGroup]] = {}
    for group in groups:
        units.setdefault(group.keys[0], []).append(group)
    arrays: dict[tuple[str, ...], jax.Array] = {}
    with tqdm.tqdm(
        total=sum(group.nbytes for group in groups),
        desc="Loading parameters",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        reader = _StageReader(checkpoint, place, bar)
        for unit in units.values():
            arrays |= reader.read(unit)
    return _tree((group.keys, arrays[group.keys]) for group in groups)
