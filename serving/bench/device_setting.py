"""The device that is checked: what it is, what it can do, and how operations run on it."""

import dataclasses
import datetime
import platform
import shutil
import subprocess

import jax
import jaxlib

from pallas_kernels.dispatch import Implementation
from sharding import deviceless
from sharding.roofline import CHIPS, Chip

_LAUNCH_SECONDS = 3e-6  # what a kernel takes at least, to choose how often it is launched
_LOOP_SECONDS = 5e-3  # of a timed call, if all goes as fast as it can
_MOST_ROUNDS = 500
_SLOWER = frozenset({"PCIe", "NVL"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Where figures come from.

    Attributes:
      device: runs everything.
      chip: its limits, or None where they are not known.
      cache_bytes: of its last cache.
      seed: of all arguments.
      quick: whether little time is given.
    """

    device: jax.Device
    chip: Chip | None
    cache_bytes: int
    seed: int
    quick: bool

    @property
    def measures(self) -> bool:
        """Whether times mean anything: kernels run on a GPU alone."""
        return self.device.platform == "gpu"

    @property
    def implementation(self) -> Implementation:
        """Of the kernels."""
        return "pallas" if self.measures else "pallas_interpret"

    @property
    def layer_implementation(self) -> Implementation:
        """Of layers: interpreted ones take long to compile, so a quick check has references."""
        return "xla" if self.quick and not self.measures else self.implementation

    def bound(self, moved: float, flops: float) -> float | None:
        """The least seconds of an operation, or None on an unknown device."""
        if self.chip is None:
            return None
        return max(moved / self.chip.memory, flops / self.chip.flops)

    def rounds(self, moved: float, flops: float, calls: int) -> int:
        """How often to launch `calls` of an operation so that dispatch does not count."""
        if not self.measures:
            return 1
        chip = self.chip or CHIPS[0]
        each = max(moved / chip.memory, flops / chip.flops) + _LAUNCH_SECONDS
        return max(4, min(_MOST_ROUNDS, round(_LOOP_SECONDS / (each * calls))))


def find_setting(seed: int, *, quick: bool) -> Setting:
    """JAX's first device, and what is known of its kind."""
    device = jax.devices()[0]
    chip = find_chip(device.device_kind) if device.platform == "gpu" else None
    name = "H100" if chip is None else chip.name
    caches = {known.name.split()[1]: known.l2_bytes for known in deviceless.CHIPS.values()}
    return Setting(
        device=device,
        chip=chip,
        cache_bytes=caches[name],
        seed=seed,
        quick=quick,
    )


def find_chip(kind: str) -> Chip | None:
    """The limits of a device that the driver calls `kind`; None where they are not known.

    Modules on PCIe cards and in pairs are slower than those whose limits are known.
    """
    words = kind.split()
    if _SLOWER.intersection(words):
        return None
    return next((chip for chip in CHIPS if chip.name in words), None)


def describe_setting(setting: Setting) -> dict[str, str | int | float | None]:
    """Device, memory, limits, versions and date, as JSON values."""
    device, chip = setting.device, setting.chip
    memory = device.memory_stats() if setting.measures else None
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "memory_bytes": None if memory is None else memory.get("bytes_limit"),
        "limits_of": chip and chip.name,
        "bandwidth": chip and chip.memory,
        "bf16_flops": chip and chip.flops,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "runtime": " ".join(device.client.platform_version.split()),
        "driver": _driver() if setting.measures else None,
        "python": platform.python_version(),
        "implementation": setting.implementation,
        "layer_implementation": setting.layer_implementation,
        "seed": setting.seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    }


def _driver() -> str | None:
    """Version of the NVIDIA driver, where its tool is at hand."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None
