"""The leaves of the parameter tree, which tensors fill them, and where they go."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dsv41_jax.checkpoint.key_map import TensorSpec, expected_tensors, parameter_path
from dsv41_jax.config import ModelConfig

Shardings = dict[str, Any]  # NamedShardings in the shape of the parameter tree

# Scales and packed FP4 codes are bytes to the model.
PARAMETER_DTYPES: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}


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


def parameter_groups(
    config: ModelConfig, layers: range | None = None, *, embedding: bool = True
) -> list[ParameterGroup]:
    """The leaves of a stage's parameter tree, in layer order.

    Args:
      config: the model.
      layers: consecutive backbone layers, all if None. The embedding belongs to the first
        layer, the final norm and the head to the last.
      embedding: whether the embedding is among the first layer's.
    """
    layers = _checked_layers(config, layers)
    members: dict[tuple[str, ...], list[tuple[str, TensorSpec, bool]]] = {}
    for name, spec in expected_tensors(config).items():
        if not spec.in_params:
            continue
        path = parameter_path(name)
        if _in_stage(config, layers, path.keys) and (embedding or path.keys[0] != "embed"):
            stacked = path.expert is not None
            members.setdefault(path.keys, []).append((name, spec, stacked))
    groups = []
    for keys, tensors in members.items():
        names, specs, (stacked, *_) = zip(*tensors, strict=True)
        shape = (len(names), *specs[0].shape) if stacked else specs[0].shape
        groups.append(ParameterGroup(keys, shape, PARAMETER_DTYPES[specs[0].dtype], names, stacked))
    return groups


def params_tree(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Nested dict of leaves given by their paths."""
    root: dict[str, Any] = {}
    for keys, leaf in leaves:
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return root


def units_of(groups: Iterable[ParameterGroup]) -> dict[str, list[ParameterGroup]]:
    """Leaves by the top-level entry of the tree that they belong to, in order."""
    units: dict[str, list[ParameterGroup]] = {}
    for group in groups:
        units.setdefault(group.keys[0], []).append(group)
    return units


def sharding_of(
    shardings: Shardings | None, keys: tuple[str, ...]
) -> jax.sharding.NamedSharding | None:
    """The sharding of one leaf."""
    node: Any = shardings
    for key in keys if shardings is not None else ():
        node = node[key]
    return node


def placed_shape(
    group: ParameterGroup, sharding: jax.sharding.NamedSharding | None
) -> tuple[int, ...]:
    """Shape of a leaf on its devices: stacked experts are padded until they divide."""
    if sharding is None or not group.stacked or not sharding.spec or sharding.spec[0] is None:
        return group.shape
    axes = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
    pieces = math.prod(sharding.mesh.shape[axis] for axis in axes)
    return (-(-group.shape[0] // pieces) * pieces, *group.shape[1:])


def abstract_params(
    config: ModelConfig, layers: range | None = None, shardings: Shardings | None = None
) -> dict[str, Any]:
    """The tree `load_params` returns, as `jax.ShapeDtypeStruct`s; no file is needed."""

    groups = parameter_groups(config, layers)
    return params_tree((group.keys, abstract_leaf(group, shardings)) for group in groups)


def abstract_leaf(group: ParameterGroup, shardings: Shardings | None) -> jax.ShapeDtypeStruct:
    """One leaf as it lies on its devices."""
    sharding = sharding_of(shardings, group.keys)
    return jax.ShapeDtypeStruct(placed_shape(group, sharding), group.dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Part:
    """A box of a leaf and the devices of this process that hold it.

    Attributes:
      start, stop: bounds along each axis.
      devices: empty for the default device.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    devices: tuple[jax.Device, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))


def parts_of(shape: tuple[int, ...], sharding: jax.sharding.NamedSharding | None) -> list[Part]:
    """The different boxes that the devices of this process hold of a leaf."""
    if sharding is None:
        return [Part((0,) * len(shape), shape, ())]
    boxes: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        sizes = zip(index, shape, strict=True)
        box = tuple(part.indices(size)[:2] for part, size in sizes)
        boxes.setdefault(box, []).append(device)
    return [
        Part(tuple(a for a, _ in box), tuple(b for _, b in box), tuple(devices))
        for box, devices in boxes.items()
    ]


def assemble(
    shape: tuple[int, ...],
    sharding: jax.sharding.NamedSharding | None,
    values: Iterable[tuple[Part, np.ndarray]],
) -> jax.Array:
    """The array of a leaf from its boxes, which are copied to each device that holds them."""
    if sharding is None:
        [(_, value)] = values
        return jax.device_put(value)
    places = {device: device for device in sharding.addressable_devices}
    if sharding.memory_kind is not None:
        kind = sharding.memory_kind
        places = {d: jax.sharding.SingleDeviceSharding(d, memory_kind=kind) for d in places}
    arrays = [jax.device_put(value, places[d]) for part, value in values for d in part.devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
