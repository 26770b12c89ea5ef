"""GPUs to compile for that are not there: programs can be checked, not run.

A compile-only topology proves that a program compiles, and shows its bytes, collectives,
fusions and roundings. It says nothing about speed: nothing is autotuned.
"""

from collections.abc import Sequence

import jax
from jax.experimental import topologies

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100_devices(count: int) -> Sequence[jax.Device]:
    """Compile-only H100s of one host.

    Needs the `cuda12` extra, and JAX_PLATFORMS=cpu where there is no GPU.

    Args:
      count: devices.
    """
    return topologies.get_topology_desc(
        platform="cuda", target_config=_H100, topology=f"1x1x{count}"
    ).devices
