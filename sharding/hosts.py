"""Meshes whose devices belong to several processes: what a process may ask, and how it places."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import replicated
from sharding.stage_plan import PartitionError, StagePlan

_ALL = "all"  # an axis of all devices of a mesh


def own_devices(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Those that are this process's."""
    here = jax.process_index()
    return [device for device in devices if device.process_index == here]


def processes_of(mesh: Mesh) -> list[int]:
    """The processes that devices of a mesh belong to, ascending."""
    return sorted({device.process_index for device in mesh.devices.flat})


def on_one_process(meshes: Sequence[Mesh]) -> bool:
    """Whether all devices of some meshes are the same process's."""
    return len({process for mesh in meshes for process in processes_of(mesh)}) == 1


def stage_devices() -> list[jax.Device]:
    """All devices in the order of the stages: process 0, which chooses tokens, has the last."""
    devices = jax.devices()
    first = [device for device in devices if device.process_index == 0]
    return [device for device in devices if device.process_index != 0] + first


def check_processes(meshes: Sequence[Mesh], plan: StagePlan, count: int) -> None:
    """Refuses stages that this project does not run on several processes.

    Args:
      meshes: by stage.
      plan: the stages.
      count: processes in all.

    Raises:
      PartitionError: names the stage or the process.
    """
    used = {process for mesh in meshes for process in processes_of(mesh)}
    idle = [process for process in range(count) if process not in used]
    if idle:
        needed = sum(mesh.size for mesh in meshes)
        raise PartitionError(
            f"the partition has {needed} devices, and none of process {idle[0]}'s: start fewer "
            "processes, or raise --tensor-parallel-size or the number of stages to all devices"
        )
    for stage, boundary in enumerate(plan.boundaries):
        if boundary.relay and not on_one_process(meshes[stage : stage + 2]):
            raise PartitionError(
                f"the relay of pipeline stage {stage} to {stage + 1} would pass from processes "
                f"{processes_of(meshes[stage])} to {processes_of(meshes[stage + 1])}, which is not "
                "supported: cut where nothing is relayed, or keep both stages on one process"
            )


def connect(meshes: Sequence[Mesh]) -> None:
    """Lets the devices of each stage, and of two that follow each other, find their peers.

    Peers wait for each other half a minute only when they meet first, but long afterwards. So
    this is called while the processes are in step, before some load or compile more than others.

    Args:
      meshes: by stage.
    """
    groups = [mesh.devices.ravel() for mesh in meshes]
    groups += [np.concatenate(pair) for pair in zip(groups, groups[1:], strict=False)]
    for group in groups:
        mesh = Mesh(group, (_ALL,))
        own = own_devices(group)
        if not own or on_one_process([mesh]):
            continue
        sharding = NamedSharding(mesh, PartitionSpec(_ALL))
        ones = jax.make_array_from_single_device_arrays(
            (group.size,), sharding, [jax.device_put(np.ones(1, np.float32), d) for d in own]
        )
        program = jax.shard_map(
            _meet, mesh=mesh, in_specs=PartitionSpec(_ALL), out_specs=PartitionSpec()
        )
        jax.block_until_ready(jax.jit(program)(ones))


def _meet(one: jax.Array) -> jax.Array:
    """A sum and a permutation: what stages do later."""
    return jax.lax.psum(jax.lax.ppermute(one, _ALL, [(0, 1)]), _ALL)


def place(value: Any, mesh: Mesh) -> Any:
    """Starts to copy a pytree to every device of a mesh; all its processes hold the same value."""
    sharding = replicated(mesh)
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    # device_put would compare the value across processes, in a program of its own.
    copies = [jax.device_put(value, device) for device in own_devices(mesh.devices.flat)]

    def join(*shards: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(np.shape(shards[0]), sharding, shards)

    return jax.tree.map(join, *copies)
