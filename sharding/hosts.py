"""Meshes whose devices belong to several processes: what a process may ask, and how it places."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sharding.rules import replicated
from sharding.stage_plan import PartitionError


def own_devices(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Those that are this process's."""
    here = jax.process_index()
    return [device for device in devices if device.process_index == here]


def processes_of(mesh: Mesh) -> list[int]:
    """The processes that devices of a mesh belong to, ascending."""
    return sorted({device.process_index for device in mesh.devices.flat})


def check_processes(meshes: Sequence[Mesh], count: int) -> None:
    """Refuses stages that this project does not run on several processes.

    Args:
      meshes: by stage.
      count: processes in all.

    Raises:
      PartitionError: names the stage or the process.
    """
    first = processes_of(meshes[0])
    for stage, mesh in enumerate(meshes):
        if processes_of(mesh) != first:
            raise PartitionError(
                f"pipeline stage 0 is on processes {first}, but stage {stage} on "
                f"{processes_of(mesh)}: stages on different processes are not supported; use one "
                "stage and a --tensor-parallel-size of all devices"
            )
    idle = [process for process in range(count) if process not in first]
    if idle:
        needed = sum(mesh.size for mesh in meshes)
        raise PartitionError(
            f"the partition has {needed} devices, and none of process {idle[0]}'s: start fewer "
            "processes, or raise --tensor-parallel-size to all devices"
        )


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
