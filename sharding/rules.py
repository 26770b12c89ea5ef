"""Where each parameter of a stage goes: the modules' own axis names on the stage's mesh."""

import dataclasses
import math
import pathlib

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.axes import EXPERT, TENSOR, Partition
from dsv41_jax.checkpoint.loader import load_params
from dsv41_jax.expert_offload import HOST
from dsv41_jax.layer_plan import layer_spec
from dsv41_jax.model import Params, Stage
from sharding.tensor_plan import TensorPlan


def partition_of(tensor: TensorPlan) -> Partition:
    """The modules' view of a tensor plan."""
    return Partition(tensor=tensor.devices, expert=tensor.devices if tensor.expert_parallel else 1)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole value on every device of a stage."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_specs(stage: Stage) -> Params:
    """PartitionSpecs in the shape of the stage's parameter tree; allocates nothing."""
    return nn.get_partition_spec(_boxed_parameters(stage))


def parameter_shardings(stage: Stage, mesh: Mesh, specs: Params) -> Params:
    """Shardings of a stage's parameters; routed experts of offloaded layers in host memory.

    Args:
      stage: the layers.
      mesh: the stage's devices.
      specs: see `parameter_specs`.
    """
    offloaded = {f"layers_{layer}" for layer in stage.offloaded}

    def sharding(path: tuple, spec: PartitionSpec) -> NamedSharding:
        keys = [part.key for part in path]
        on_host = keys[0] in offloaded and keys[1:3] == ["ffn", "experts"]
        return NamedSharding(mesh, spec, memory_kind=HOST if on_host else None)

    return jax.tree_util.tree_map_with_path(sharding, specs)


def abstract_parameters(stage: Stage, mesh: Mesh) -> Params:
    """Shapes, dtypes and shardings of a stage's parameters over its mesh; allocates nothing."""
    boxed = _boxed_parameters(stage)

    def whole(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        axes = [*spec, *[None] * (leaf.ndim - len(spec))]
        shape = [
            size * _devices_along(mesh, axis) for size, axis in zip(leaf.shape, axes, strict=True)
        ]
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding)

    return jax.tree.map(whole, nn.unbox(boxed), nn.get_partition_spec(boxed))


def _devices_along(mesh: Mesh, axis: str | tuple[str, ...] | None) -> int:
    names = (axis,) if isinstance(axis, str) else axis or ()
    return math.prod(mesh.shape[name] for name in names)


def _boxed_parameters(stage: Stage) -> Params:
    """What one device holds, with the modules' axis names; layers that are alike traced once."""
    kinds: dict[tuple, Params] = {}
    boxed: Params = {}
    for layer in stage.layers:
        single = dataclasses.replace(stage, layers=range(layer, layer + 1))
        spec = layer_spec(stage.config, layer)
        kind = (spec.owns_kv, spec.owns_index, spec.ratio > 1, spec.engram is not None)
        kind = (*kind, single.is_first, single.is_last)
        if kind not in kinds:
            kinds[kind] = _trace_parameters(single)
        found = kinds[kind]
        boxed |= {f"layers_{layer}" if "layers_" in key else key: found[key] for key in found}
    return boxed


def _trace_parameters(stage: Stage) -> Params:
    # The modules declare per-device shapes and speak of mesh axes, so the axes must have names.
    make = jax.vmap(
        jax.vmap(stage.init, axis_name=TENSOR, axis_size=stage.partition.tensor, out_axes=None),
        axis_name=EXPERT,
        axis_size=1,
        out_axes=None,
    )
    return jax.eval_shape(make)


def load_stage_params(
    path: str | pathlib.Path, stage: Stage, mesh: Mesh, specs: Params, *, progress: bool
) -> Params:
    """Loads the parameters of a stage's layers, each device its share.

    Experts that do not divide are padded with empty ones, which no token is routed to.

    Args:
      path: checkpoint directory.
      stage: the layers.
      mesh: the stage's devices.
      specs: see `parameter_specs`.
      progress: whether to show a progress bar on stderr.

    Raises:
      CheckpointError: the directory is not a complete checkpoint of the stage's configuration.
    """
    return load_params(
        path,
        stage.config,
        layers=stage.layers,
        shardings=parameter_shardings(stage, mesh, specs),
        embedding=stage.embedding == "device",
        progress=progress,
    )
