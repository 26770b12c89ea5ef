"""One mesh per stage, all with the same axes."""

import contextlib
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dsv41_jax.axes import DATA, EXPERT, TENSOR
from sharding.stage_plan import PartitionError

AXES = (DATA, EXPERT, TENSOR)


def provide_cpu_devices(count: int) -> None:
    """Lets the CPU platform have `count` virtual devices.

    Works until JAX starts its backend, so a command calls it first; later it changes nothing,
    and neither does it change any other platform.
    """
    if count > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # the backend runs already
            jax.config.update("jax_num_cpu_devices", count)


def stage_meshes(
    num_stages: int, tensor: int, devices: Sequence[jax.Device] | None = None
) -> tuple[Mesh, ...]:
    """Meshes of `tensor` devices each, in device order.

    Args:
      num_stages: how many.
      tensor: devices per stage.
      devices: at least `num_stages * tensor`, all of JAX's if None; stages may share devices.

    Raises:
      PartitionError: there are too few.
    """
    devices = jax.devices() if devices is None else devices
    needed = num_stages * tensor
    if len(devices) < needed:
        raise PartitionError(
            f"{num_stages} pipeline stages of {tensor} devices need {needed} devices, but there "
            f"are {len(devices)} ({devices[0].platform}): use fewer stages or a smaller tensor "
            "parallel size"
        )
    return tuple(
        Mesh(np.array(devices[first : first + tensor]).reshape(1, 1, tensor), AXES)
        for first in range(0, needed, tensor)
    )
