"""Whether a plan fits its devices, and the largest batch and context that would."""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dsv41_jax.config import ConfigError, ModelConfig
from sharding.limits import EngineLimits, engine_limits
from sharding.memory import (
    HostBytes,
    StageBytes,
    host_bytes,
    layer_expert_bytes,
    stage_bytes,
    stage_offloads,
)
from sharding.offload import BUFFERS, StageOffload, offload_text
from sharding.placement import TablePlacement
from sharding.stage_plan import StagePlan
from sharding.tensor_plan import TensorPlan

GIB = 2**30
_RESERVED = 2.05  # GiB of a device that the context and the collectives take
_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MOST_REQUESTS = 4096
_NAMED = 3  # components that a refusal names
_NOT_NEEDED = "--cpu-offload-gb is NOT needed: it fits without, and steps are faster"


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of accelerator.

    Attributes:
      name: as in `--devices`.
      usable: bytes that arrays can take.
    """

    name: str
    usable: int


# What the driver reports, less the reserve.
DEVICE_KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind("h100-80", int((79.65 - _RESERVED) * GIB)),
        DeviceKind("h200-141", int((140.40 - _RESERVED) * GIB)),
        DeviceKind("b200-192", int((179.06 - _RESERVED) * GIB)),
    )
}


class FitError(Exception):
    """A plan that does not fit its devices; says what is missing and what takes most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A plan with the sizes it is to serve.

    Attributes:
      config, plan, tensor: the model and how it is spread.
      microbatches: parts that a step is cut into.
      max_model_len, max_num_seqs, max_num_batched_tokens: see `EngineLimits`.
      kv_cache_memory_bytes: for the caches of one device; None for what the sizes need at most.
      placement: where Engram tables, the embedding and routed experts are.
    """

    config: ModelConfig
    plan: StagePlan
    tensor: TensorPlan
    microbatches: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None = None
    placement: TablePlacement = TablePlacement()

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return len(self.plan.stages) * self.tensor.devices

    def limits(self) -> EngineLimits:
        """The engine's sizes; raises ConfigError where they are out of range."""
        return engine_limits(
            self.config,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def stages(self) -> tuple[StageBytes, ...]:
        """Bytes of one device by stage; ConfigError where the budget is too small."""
        return stage_bytes(
            self.config,
            self.plan,
            self.tensor,
            self.limits(),
            microbatches=self.microbatches,
            budget=self.kv_cache_memory_bytes,
            placement=self.placement,
        )

    def host(self) -> HostBytes:
        """Bytes of the hosts."""
        return host_bytes(self.config, self.plan, self.tensor, self.placement)

    def offloads(self) -> tuple[StageOffload, ...]:
        """What each stage keeps in host memory; PartitionError where that saves nothing."""
        return stage_offloads(self.config, self.plan, self.tensor, self.placement)

    def offloading(self, size: int) -> "Workload":
        """The same with `size` bytes of host memory for the experts of each device."""
        placement = dataclasses.replace(self.placement, cpu_offload_bytes=size)
        return dataclasses.replace(self, placement=placement)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """How far one size can grow while the others stay; 0 where nothing fits."""

    max_num_seqs: int
    max_model_len: int


def allow_memory() -> None:
    """Lets JAX take 95 % of a GPU's memory, not the 75 % of its default.

    Works before the process uses a device; a share that the environment sets stays.
    """
    os.environ.setdefault(_SHARE, "0.95")


def check_fit(workload: Workload, usable: int, device: str) -> tuple[StageBytes, ...]:
    """Bytes by stage, if every device can hold its share.

    Args:
      workload: what is to be held.
      usable: bytes of one device.
      device: what to call it.

    Raises:
      FitError: the first stage that is too large by the most, and its largest components.
      ConfigError: sizes out of range, or a budget below one request.
    """
    stages = workload.stages()
    worst = max(range(len(stages)), key=lambda i: stages[i].total)
    held = stages[worst]
    if held.total <= usable:
        return stages
    parts = sorted(component_bytes(held).items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {gib(size)}" for name, size in parts[:_NAMED])
    raise FitError(
        f"stage {worst} needs {gib(held.total)} on each device, but a {device} has {gib(usable)} "
        f"for arrays: {gib(held.total - usable)} short. The largest: {named}. "
        f"{_way_out(workload, usable)}"
    )


def check_devices(workload: Workload, devices: Sequence[jax.Device]) -> None:
    """Refuses a workload that devices which tell their memory cannot hold; others pass.

    Raises:
      FitError: see `check_fit`.
    """
    told = _least_memory(devices)
    if told is not None:
        check_fit(workload, *told)


def offload_news(workload: Workload, devices: Sequence[jax.Device]) -> list[str]:
    """Lines about experts in host memory, and whether the devices could do without.

    Raises:
      PartitionError: that saves nothing.
    """
    lines = offload_text([offload.facts() for offload in workload.offloads()])
    told = _least_memory(devices)
    if lines and told is not None and not is_needed(workload, told[0]):
        lines.append(_NOT_NEEDED)
    return lines


def _least_memory(devices: Sequence[jax.Device]) -> tuple[int, str] | None:
    """Bytes and kind of the smallest device, or None where none tells its memory."""
    told = [
        (stats["bytes_limit"], device.device_kind)
        for device in devices
        if "bytes_limit" in (stats := device.memory_stats() or {})
    ]
    return min(told, default=None)


def _way_out(workload: Workload, usable: int) -> str:
    fitting = [name for name, kind in DEVICE_KINDS.items() if fits(workload, kind.usable)]
    kinds = f"It fits {' and '.join(fitting)}" if fitting else "No known device holds it"
    tables = "leave Engram tables on the host (--engram-placement mmap), "
    needed = least_offload(workload, usable)
    offload = f", or keep experts in host memory (--cpu-offload-gb {needed})" if needed else ""
    return (
        f"{kinds}; or {tables if workload.placement.engram == 'device' else ''}"
        f"raise --tensor-parallel-size, or use more even stages{offload}"
    )


def least_offload(workload: Workload, usable: int) -> float | None:
    """The least `--cpu-offload-gb` with which a workload fits, or None if none does."""
    layer_bytes = sum(layer_expert_bytes(workload.config, workload.tensor))
    most = max(len(stage.layers) for stage in workload.plan.stages)

    def enough(more: int) -> bool:
        return fits(workload.offloading((BUFFERS + more) * layer_bytes), usable)

    if most <= BUFFERS or not enough(most - BUFFERS):
        return None
    more = 1 + last_good(lambda count: not enough(count), most - BUFFERS)
    return (10 * (BUFFERS + more) * layer_bytes // GIB + 1) / 10


def is_needed(workload: Workload, usable: int) -> bool:
    """Whether a workload that offloads experts would not fit without."""
    return not fits(workload.offloading(0), usable)


def fits(workload: Workload, usable: int) -> bool:
    """Whether every device can hold its share; sizes out of range do not fit."""
    try:
        return all(stage.total <= usable for stage in workload.stages())
    except ConfigError:
        return False


def largest(workload: Workload, usable: int) -> Largest:
    """The largest batch at the given context, and the largest context at the given batch.

    Every request can then reach the full context at the same time, within the budget if there
    is one.
    """
    budget = workload.kv_cache_memory_bytes

    def full(**sizes: int) -> bool:
        grown = dataclasses.replace(workload, kv_cache_memory_bytes=None, **sizes)
        try:
            stages = grown.stages()
        except ConfigError:
            return False
        return all(
            stage.total <= usable and (budget is None or stage.caches <= budget) for stage in stages
        )

    def requests(count: int) -> bool:
        tokens = max(workload.max_num_batched_tokens, count)
        return full(max_num_seqs=count, max_num_batched_tokens=tokens)

    page = workload.limits().page_size
    pages = workload.config.max_position_embeddings // page
    return Largest(
        max_num_seqs=last_good(requests, _MOST_REQUESTS),
        max_model_len=page * last_good(lambda count: full(max_model_len=count * page), pages),
    )


def last_good(good: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that is good, where smaller ones are good too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


LABELS = {
    "experts": "routed experts",
    "expert_scales": "expert scales",
    "arriving": "experts from the host",
    "dense": "dense FP8",
    "embedding": "embedding, head",
    "engram": "Engram tables",
    "other": "other parameters",
    "window": "window caches",
    "kv": "compressed KV",
    "index_k": "index keys",
    "open_groups": "open groups",
    "replicas": "relay replicas",
    "temporaries": "temporaries (estimate)",
}


def component_bytes(stage: StageBytes) -> dict[str, int]:
    """Bytes by component, under the names for a reader."""
    return {label: getattr(stage, name) for name, label in LABELS.items()}


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.2f} GiB"


def parse_devices(text: str, needed: int) -> tuple[int, DeviceKind]:
    """Number and kind of devices from text such as "4xh100-80"; as many as needed if left out.

    Raises:
      ValueError: an unknown kind, or a number that is none.
    """
    match = re.fullmatch(r"(?:(\d+)x)?([a-z0-9-]+)", text)
    kind = DEVICE_KINDS.get(match[2]) if match else None
    count = int(match[1]) if match and match[1] else needed
    if kind is None or count < 1:
        raise ValueError(
            f"{text!r} must be a number of devices and their kind, such as 4xh100-80; known "
            f"kinds are {', '.join(DEVICE_KINDS)}"
        )
    return count, kind


def memory_facts(workload: Workload) -> dict[str, Any]:
    """Bytes by stage and on the hosts, as JSON values."""
    stages = workload.stages()
    return {
        "limits": {
            "max_model_len": workload.max_model_len,
            "max_num_seqs": workload.max_num_seqs,
            "max_num_batched_tokens": workload.max_num_batched_tokens,
            "kv_cache_memory_bytes": workload.kv_cache_memory_bytes,
        },
        "per_device": [
            dataclasses.asdict(stage)
            | {"parameters": stage.parameters, "caches": stage.caches, "total": stage.total}
            for stage in stages
        ],
        "host": dataclasses.asdict(workload.host()),
        "placement": {
            "engram": workload.placement.engram,
            "embedding": workload.placement.embedding,
        },
        "offload": [offload.facts() for offload in workload.offloads()],
    }


def fit_facts(workload: Workload, kind: DeviceKind, count: int) -> dict[str, Any]:
    """Whether the plan fits `count` devices of a kind, as JSON values."""
    error = None
    try:
        check_fit(workload, kind.usable, kind.name)
        if count < workload.devices:
            error = (
                f"the plan needs {workload.devices} devices, but {count} are given: use fewer "
                "stages or a smaller --tensor-parallel-size, or give more"
            )
    except FitError as problem:
        error = str(problem)
    most = largest(workload, kind.usable)
    return {
        "device": kind.name,
        "devices": count,
        "usable_bytes": kind.usable,
        "fits": error is None,
        "error": error,
        "largest_max_num_seqs": most.max_num_seqs,
        "largest_max_model_len": most.max_model_len,
        "offloads": bool(workload.placement.cpu_offload_bytes),
        "offload_needed": is_needed(workload, kind.usable),
        "kinds_that_fit": [n for n, k in DEVICE_KINDS.items() if fits(workload, k.usable)],
    }


def memory_text(facts: dict[str, Any]) -> list[str]:
    """A table of `memory_facts`."""
    stages, limits = facts["per_device"], facts["limits"]
    budget = limits["kv_cache_memory_bytes"]
    lines = [
        f"Memory of each device, GiB, for {limits['max_num_seqs']} requests of up to "
        f"{limits['max_model_len']} tokens, {limits['max_num_batched_tokens']} tokens a step, "
        f"caches {'as large as these need' if budget is None else f'within {gib(budget)}'}",
        _row("", [f"stage {i}" for i in range(len(stages))]),
    ]
    for name, label in LABELS.items():
        if any(stage[name] for stage in stages):
            lines.append(_row(label, [_cell(stage[name]) for stage in stages]))
    lines.append(_row("total", [_cell(stage["total"]) for stage in stages]))
    host = facts["host"]
    lines += offload_text(facts["offload"])
    lines.append(
        f"Hosts: {_tables_text(facts)}; up to {gib(host['loading'])} of buffers while loading; "
        f"disk {gib(host['disk'])}"
    )
    return lines


def _tables_text(facts: dict[str, Any]) -> str:
    host, placement = facts["host"], facts["placement"]
    held = "Engram tables are on the devices"
    if placement["engram"] != "device":
        where = "memory-mapped" if placement["engram"] == "mmap" else "in RAM"
        held = f"{gib(host['engram'])} of Engram tables, {where}"
    if host["experts"]:
        held += f"; {gib(host['experts'])} of routed experts, pinned"
    if host["embedding"]:
        held += f"; {gib(host['embedding'])} of embedding rows, memory-mapped"
    return held


def fit_text(facts: dict[str, Any]) -> list[str]:
    """What `fit_facts` says; the reason of a refusal is left to the caller."""
    lines = [
        f"Devices: {facts['devices']} {facts['device']} with {gib(facts['usable_bytes'])} each for "
        f"arrays: {'fits' if facts['fits'] else 'DOES NOT FIT'}",
    ]
    if facts["largest_max_num_seqs"]:
        lines.append(
            f"Largest that fits: {facts['largest_max_num_seqs']} requests at this context, or "
            f"{facts['largest_max_model_len']} tokens of context at this number of requests"
        )
    if facts["offloads"] and not facts["offload_needed"]:
        lines.append(_NOT_NEEDED)
    kinds = ", ".join(facts["kinds_that_fit"]) or "none"
    lines.append(f"Kinds that hold each stage's share: {kinds}")
    return lines


def _cell(size: int) -> str:
    return f"{size / GIB:.3f}"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<24}" + "".join(f"{cell:>10}" for cell in cells)
