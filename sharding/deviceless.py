"""GPUs to compile for that are not there: programs can be checked, not run.

A compile-only topology proves that a program compiles, and shows its bytes, collectives,
fusions and roundings. It says nothing about speed: nothing is autotuned.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from importlib import metadata

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {told_bytes}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""


class NoCompilerError(RuntimeError):
    """The GPU compiler is not installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What the compiler is told of a GPU.

    Attributes:
      name: as the driver calls it.
      capability: major CUDA compute capability.
      cores: multiprocessors.
      bandwidth: bytes per second of its memory.
      l2_bytes, memory_bytes, clock_ghz: what the names say.
    """

    name: str
    capability: int
    cores: int
    bandwidth: int
    l2_bytes: int
    memory_bytes: int
    clock_ghz: float

    def target(self) -> str:
        """The description in the compiler's own words.

        A compiler that is told of a device takes 80 % of its memory for a program, and computes
        values again to stay below; one that has the device takes what JAX may allocate. So it is
        told of more, of which 80 % are all there is.
        """
        told_bytes = self.memory_bytes * 5 // 4
        return _TARGET.format(**dataclasses.asdict(self), told_bytes=told_bytes)


CHIPS = {
    "h100-80": Chip(
        name="NVIDIA H100 80GB HBM3",
        capability=9,
        cores=132,
        bandwidth=3_352_320_000_000,
        l2_bytes=52_428_800,
        memory_bytes=84_929_347_584,
        clock_ghz=1.98,
    ),
    "h200-141": Chip(
        name="NVIDIA H200 141GB HBM3e",
        capability=9,
        cores=132,
        bandwidth=4_800_000_000_000,
        l2_bytes=52_428_800,
        memory_bytes=151_397_597_184,
        clock_ghz=1.98,
    ),
    "b200-192": Chip(
        name="NVIDIA B200",
        capability=10,
        cores=148,
        bandwidth=7_672_320_000_000,
        l2_bytes=132_644_864,
        memory_bytes=191_514_411_008,
        clock_ghz=1.965,
    ),
}


def compile_only_devices(kind: str, count: int) -> Sequence[jax.Device]:
    """Devices of one host to compile for; lower under `target_of(kind)`.

    Needs the `cuda12` extra, and JAX_PLATFORMS=cpu where there is no GPU.

    Args:
      kind: one of `CHIPS`.
      count: devices.

    Raises:
      NoCompilerError: the extra is not installed.
    """
    check_compiler()
    return topologies.get_topology_desc(
        platform="cuda", target_config=CHIPS[kind].target(), topology=f"1x1x{count}"
    ).devices


def h100_devices(count: int) -> Sequence[jax.Device]:
    """`compile_only_devices` of the kind most checks are made for."""
    return compile_only_devices("h100-80", count)


def check_compiler() -> None:
    """Raises `NoCompilerError`, a sentence with the way out, without the `cuda12` extra."""
    try:
        metadata.version("jax-cuda12-plugin")
    except metadata.PackageNotFoundError:
        raise NoCompilerError(
            "compiling for GPUs needs the cuda12 extra, which is not installed: run "
            "pip install 'dsv41-jax[cuda12]' (no GPU is needed)"
        ) from None


def target_of(kind: str) -> contextlib.AbstractContextManager:
    """What to trace and lower under for a device that is not there.

    Newer JAX asks which device a kernel is for before the shardings tell it.
    """
    chip = CHIPS[kind]
    device = AbstractDevice(device_kind=chip.name, platform="gpu", num_cores=chip.cores)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
