"""Where each parameter of a stage goes: the modules' own axis names on the stage's mesh."""

import dataclasses
import pathlib

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.axes import EXPERT, TENSOR, Partition
from dsv41_jax.checkpoint.loader import load_params
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
    kinds: dict[tuple, Params] = {}
    specs: Params = {}
    for layer in stage.layers:
        single = dataclasses.replace(stage, layers=range(layer, layer + 1))
        spec = layer_spec(stage.config, layer)
        kind = (spec.owns_kv, spec.owns_index, spec.ratio > 1, spec.engram is not None)
        kind = (*kind, single.is_first, single.is_last)
        if kind not in kinds:
            kinds[kind] = _traced_specs(single)
        found = kinds[kind]
        specs |= {f"layers_{layer}" if "layers_" in key else key: found[key] for key in found}
    return specs


def _traced_specs(stage: Stage) -> Params:
    # The modules declare per-device shapes and speak of mesh axes, so the axes must have names.
    make = jax.vmap(
        jax.vmap(stage.init, axis_name=TENSOR, axis_size=stage.partition.tensor, out_axes=None),
        axis_name=EXPERT,
        axis_size=1,
        out_axes=None,
    )
    return nn.get_partition_spec(jax.eval_shape(make))


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

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return load_params(
        path, stage.config, layers=stage.layers, shardings=shardings, progress=progress
    )
