"""Which layers' routed experts stay in host memory, and what that costs and saves."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

from dsv41_jax.expert_offload import BUFFERS
from sharding.stage_plan import PartitionError, StagePlan

GIB = 2**30
# JAX pins 64 GB in all on GPUs unless told otherwise.
_PINNED_LIMIT, _PINNED_DEFAULT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
_LINK = 64e9  # bytes per second that PCIe 5.0 x16 moves at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOffload:
    """Routed experts of a stage in host memory; bytes are those of each of its devices.

    Attributes:
      layers: whose experts are there, the stage's last ones. The layers before them are as fast
        as ever, and the first copy has a layer of the stage to hide behind.
      host: bytes in host memory; every step copies as many.
      arriving: room on the device for those that compute and those that arrive.
    """

    layers: tuple[int, ...]
    host: int
    arriving: int

    @property
    def saved(self) -> int:
        """Bytes that the device need not hold."""
        return self.host - self.arriving

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self) | {"saved": self.saved}


NOTHING_OFFLOADED = StageOffload(layers=(), host=0, arriving=0)


def plan_offload(plan: StagePlan, layer_bytes: int, budget: int) -> tuple[StageOffload, ...]:
    """The layers of each stage whose experts stay in host memory: as many as the budget holds.

    A stage of so few layers that nothing would be saved keeps its experts.

    Args:
      plan: the stages.
      layer_bytes: one layer's routed experts on one device.
      budget: bytes of host memory for each device; 0 offloads nothing.

    Raises:
      PartitionError: the budget saves nothing on any stage.
    """
    stages = tuple(_offload(stage.layers, layer_bytes, budget) for stage in plan.stages)
    if budget and not any(stage.layers for stage in stages):
        count, least = budget // layer_bytes, (BUFFERS + 1) * layer_bytes
        layers = "1 layer" if count == 1 else f"{count} layers"
        held = f"the routed experts of {layers}" if count else "no layer's routed experts"
        most = max(len(stage.layers) for stage in plan.stages)
        way_out = f"give {math.ceil(10 * least / GIB) / 10:g} or more, or 0"
        if most <= BUFFERS:
            way_out = f"no stage has more than {most} layers, so leave it at 0"
        raise PartitionError(
            f"--cpu-offload-gb {budget / GIB:.4g} holds {held} ({layer_bytes / GIB:.4g} GiB a "
            f"layer on each device) and saves nothing, as a device keeps room for {BUFFERS} "
            f"layers, one that computes and one that arrives: {way_out}"
        )
    return stages


def allow_pinned(size: int) -> None:
    """Lets JAX pin `size` bytes of host memory beside what it may by default.

    Works before the process uses a device; a limit that the environment sets stays.
    """
    os.environ.setdefault(_PINNED_LIMIT, str(_PINNED_DEFAULT + math.ceil(size / GIB)))


def _offload(layers: range, layer_bytes: int, budget: int) -> StageOffload:
    count = min(len(layers), budget // layer_bytes)
    if count <= BUFFERS:
        return NOTHING_OFFLOADED
    return StageOffload(
        layers=tuple(layers[len(layers) - count :]),
        host=count * layer_bytes,
        arriving=BUFFERS * layer_bytes,
    )


def offload_text(stages: Sequence[dict[str, Any]]) -> list[str]:
    """Lines about the stages that offload, of `StageOffload.facts` of each."""
    lines = []
    for i, stage in enumerate(stages):
        if stage["layers"]:
            first, last = stage["layers"][0], stage["layers"][-1]
            host, saved = (f"{stage[name] / GIB:.2f} GiB" for name in ("host", "saved"))
            lines.append(
                f"Stage {i} keeps the routed experts of layers {first}-{last} in host memory: "
                f"{host} for each device save {saved} of it; every step copies them, which takes "
                f"{1e3 * stage['host'] / _LINK:.0f} ms or more over PCIe 5.0 x16"
            )
    return lines
