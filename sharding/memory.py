"""Bytes of every stage on each of its devices, by component, from the configuration alone."""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Mapping, Sequence

from dsv41_jax.checkpoint.key_map import TensorSpec, expected_tensors
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_device import rows_per_device
from pallas_kernels.dispatch import largest_addressable
from sharding.cache_sizes import (
    CacheBudgetError,
    CacheBytes,
    CacheSizes,
    cache_bytes,
    plan_cache,
)
from sharding.limits import EngineLimits, round_up
from sharding.offload import StageOffload, plan_offload
from sharding.placement import DEFAULT_PLACEMENT, TablePlacement
from sharding.stage_plan import StageContents, StagePlan
from sharding.temporaries import step_temporaries
from sharding.tensor_plan import TensorPlan

BLOCK = 32  # elements that share a scale

# Weights whose outputs or inputs are split over the devices of a stage; the rest are whole.
_SPLIT_ROWS = re.compile(
    r"(^embed|^head|\.attn\.wq_b|\.attn\.wo_a|\.shared_experts\.w[13])\.(weight|scale)$"
    r"|\.attn\.attn_sink$"
)
_SPLIT_COLUMNS = re.compile(r"\.(attn\.wo_b|shared_experts\.w2)\.(weight|scale)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(w[123])\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageBytes:
    """What one device of a stage holds, in bytes.

    Attributes:
      experts: codes of the routed experts that stay on the device.
      expert_scales: their scales.
      arriving: room for experts that are copied from host memory.
      dense: FP8 linears with their scales.
      embedding: rows of the embedding and of the head.
      engram: rows of Engram tables, where they are on the devices.
      other: BF16 and F32 parameters.
      window, kv, index_k, open_groups: caches by group.
      replicas: caches of other stages' sources, fed by the relay.
      temporaries: what a step needs besides, an ESTIMATE.
    """

    experts: int
    expert_scales: int
    arriving: int
    dense: int
    embedding: int
    engram: int
    other: int
    window: int
    kv: int
    index_k: int
    open_groups: int
    replicas: int
    temporaries: int

    @property
    def parameters(self) -> int:
        """Of the text model: what is on the device, its tables included."""
        dense = self.dense + self.embedding + self.engram + self.other
        return self.experts + self.expert_scales + self.arriving + dense

    @property
    def caches(self) -> int:
        """Of all groups."""
        return self.window + self.kv + self.index_k + self.open_groups + self.replicas

    @property
    def total(self) -> int:
        """Everything."""
        return self.parameters + self.caches + self.temporaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBytes:
    """What the hosts hold, over all stages.

    Attributes:
      engram: Engram tables, memory-mapped or in RAM; processes share a memory map.
      embedding: the embedding's memory map, where its rows come from the host.
      experts: routed experts that are offloaded, in pinned memory.
      loading: buffers while parameters are loaded, at most: one layer of every stage.
      disk: the checkpoint.
    """

    engram: int
    embedding: int
    experts: int
    loading: int
    disk: int


def stage_bytes(
    config: ModelConfig,
    plan: StagePlan,
    tensor: TensorPlan,
    limits: EngineLimits,
    *,
    microbatches: int,
    budget: int | None = None,
    placement: TablePlacement = DEFAULT_PLACEMENT,
) -> tuple[StageBytes, ...]:
    """Bytes on each device, by stage.

    Args:
      config: the model.
      plan: its stages.
      tensor: how a stage divides over its devices.
      limits: sizes of the engine, which caches and temporaries follow.
      microbatches: parts that a step is cut into.
      budget: bytes for the caches of one device, or None for what the limits need at most.
      placement: where Engram tables, the embedding and routed experts are.

    Raises:
      ConfigError: the budget does not hold one request of max_model_len.
      PartitionError: the placement offloads too little.
    """
    tokens = round_up(-(-limits.max_num_batched_tokens // microbatches))
    offloads = stage_offloads(config, plan, tensor, placement)
    codes, scales = layer_expert_bytes(config, tensor)
    parameters = [_parameters(config, stage, tensor, placement) for stage in plan.stages]
    sizes = plan_stage_caches(config, plan, limits, budget)
    return tuple(
        StageBytes(
            **held
            | {
                "experts": held["experts"] - len(offload.layers) * codes,
                "expert_scales": held["expert_scales"] - len(offload.layers) * scales,
                "arriving": offload.arriving,
            },
            **_caches(config, stage, limits, sizes),
            temporaries=step_temporaries(
                config,
                stage,
                tensor,
                tokens=tokens,
                positions=limits.columns * limits.page_size,
                logit_rows=min(tokens, limits.logit_rows),
            ),
        )
        for held, offload, stage in zip(parameters, offloads, plan.stages, strict=True)
    )


def stage_offloads(
    config: ModelConfig, plan: StagePlan, tensor: TensorPlan, placement: TablePlacement
) -> tuple[StageOffload, ...]:
    """What each stage keeps in host memory; PartitionError where that saves nothing."""
    layer_bytes = sum(layer_expert_bytes(config, tensor))
    return plan_offload(plan, layer_bytes, placement.cpu_offload_bytes)


@functools.lru_cache(maxsize=64)
def layer_expert_bytes(config: ModelConfig, tensor: TensorPlan) -> tuple[int, int]:
    """Codes and scales of one layer's routed experts on one device; layers are alike."""
    sizes = {"weight": 0, "scale": 0}
    for name, spec in expected_tensors(config).items():
        if name.startswith("layers.0.") and ".experts.0." in name:
            share = math.prod(device_shape(name, spec, tensor)) * tensor.experts
            sizes[name.rsplit(".", 1)[1]] += share * spec.nbytes // math.prod(spec.shape)
    return sizes["weight"], sizes["scale"]


def plan_stage_caches(
    config: ModelConfig, plan: StagePlan, limits: EngineLimits, budget: int | None
) -> CacheSizes:
    """Pages and slots that every stage can hold; a request has the same pages on each.

    A budget buys no more global pages than kernels can address.

    Raises:
      ConfigError: the budget does not hold one request of max_model_len, or without a budget
        the limits need more pages than kernels can address.
    """
    units = [stage_cache_bytes(config, stage, limits.page_size) for stage in plan.stages]
    each = [plan_cache(limits, unit, budget) for unit in units]
    names = [field.name for field in dataclasses.fields(CacheSizes)]
    sizes = CacheSizes(**{name: min(getattr(size, name) for size in each) for name in names})
    pages = _addressable_pages(config, plan, limits.page_size, sizes.global_pages)
    if pages == sizes.global_pages:
        return sizes
    held = dataclasses.replace(sizes, global_pages=pages)
    if budget is None or pages < limits.columns:
        most = max(held.total_bytes(unit) for unit in units)
        raise CacheBudgetError(
            f"the caches of {limits.max_num_seqs} requests of max_model_len "
            f"{limits.max_model_len} have an array of more than 2 and up to 4 GiB, which kernels "
            f"cannot address: give kv_cache_memory_bytes {most}, which holds {pages} pages of "
            f"{limits.page_size} tokens, or lower max_num_seqs or max_model_len"
        )
    return held


def _addressable_pages(config: ModelConfig, plan: StagePlan, page_size: int, pages: int) -> int:
    """The most global pages up to `pages` whose every array a kernel can address."""
    sources = [("kv", s) for stage in plan.stages for s in stage.kv_sources]
    sources += [("index_k", s) for stage in plan.stages for s in stage.kv_sources]
    sources += [replica for stage in plan.stages for replica in stage.replicas]
    widths = {
        page_size // config.compress_ratios[source] * width
        for kind, source in sources
        for width in _row_parts(config, kind)
    }
    while True:
        fewer = min((largest_addressable(pages * w, 1) // w for w in widths), default=pages)
        if fewer == pages:
            return pages
        pages = fewer


def stage_cache_bytes(config: ModelConfig, stage: StageContents, page_size: int) -> CacheBytes:
    """Bytes per page and slot of a stage's own caches and of its replicas."""
    own = cache_bytes(config, stage.layers, page_size)
    replicas = sum(
        page_size // config.compress_ratios[source] * _row_bytes(config, kind)
        for kind, source in stage.replicas
    )
    return dataclasses.replace(own, global_page=own.global_page + replicas)


def host_bytes(
    config: ModelConfig,
    plan: StagePlan,
    tensor: TensorPlan,
    placement: TablePlacement = DEFAULT_PLACEMENT,
) -> HostBytes:
    """What the hosts of all stages need; pages of memory maps are given back under pressure."""
    expected = expected_tensors(config)
    layers = [0] * config.num_hidden_layers
    engram = 0
    for name, spec in expected.items():
        if spec.component == "engram":
            engram += spec.nbytes
        elif spec.in_params and name.startswith("layers."):
            layers[int(name.split(".", 2)[1])] += spec.nbytes
    largest = [max(layers[layer] for layer in stage.layers) for stage in plan.stages]
    head = expected["embed.weight"].nbytes
    return HostBytes(
        engram=0 if placement.engram == "device" else engram,
        embedding=head if placement.embedding == "host" else 0,
        experts=tensor.devices
        * sum(offload.host for offload in stage_offloads(config, plan, tensor, placement)),
        loading=sum(max(layer, head) for layer in largest),
        disk=sum(spec.nbytes for spec in expected.values()),
    )


def device_shape(name: str, spec: TensorSpec, tensor: TensorPlan) -> tuple[int, ...]:
    """Shape of one tensor's share on a device of its stage; of one expert, where it is one."""
    devices, shape = tensor.devices, spec.shape
    expert = _EXPERT.search(name)
    if expert:
        axis = None if tensor.expert_parallel else int(expert[2] == "w2")
    elif _SPLIT_ROWS.search(name):
        axis = 0
    else:
        axis = 1 if _SPLIT_COLUMNS.search(name) else None
    return tuple(-(-size // devices) if i == axis else size for i, size in enumerate(shape))


@functools.lru_cache(maxsize=64)  # a search for the largest sizes asks again and again
def _parameters(
    config: ModelConfig, stage: StageContents, tensor: TensorPlan, placement: TablePlacement
) -> Mapping[str, int]:
    kinds = ("experts", "expert_scales", "dense", "embedding", "engram", "other")
    totals = dict.fromkeys(kinds, 0)
    for name, spec in expected_tensors(config).items():
        if spec.component == "engram" and placement.engram == "device":
            if in_stage(stage, name):
                rows, width = spec.shape
                totals["engram"] += rows_per_device(rows, tensor.devices) * width
            continue
        if name.startswith("embed.") and placement.embedding == "host":
            continue
        expert = spec.component == "experts"
        if expert and ".experts.0." not in name:
            continue  # all experts of a layer are alike
        if not spec.in_params or not in_stage(stage, name):
            continue
        share = math.prod(device_shape(name, spec, tensor))
        share *= spec.nbytes // math.prod(spec.shape)
        key = "expert_scales" if expert and name.endswith("scale") else spec.component
        totals[key] += share * tensor.experts if expert else share
    return types.MappingProxyType(totals)


def in_stage(stage: StageContents, name: str) -> bool:
    """Whether a stage holds the parameter of the text model with this name."""
    first, rest = name.split(".", 1)
    if first == "layers":
        return int(rest.split(".", 1)[0]) in stage.layers
    return stage.embedding if first == "embed" else stage.head


def _row_parts(config: ModelConfig, kind: str) -> tuple[int, int]:
    """Bytes of codes and of scales."""
    if kind == "kv":
        return config.head_dim // 2, config.head_dim // 16
    return config.index_head_dim // 2, config.index_head_dim // BLOCK


def _row_bytes(config: ModelConfig, kind: str) -> int:
    return sum(_row_parts(config, kind))


def _caches(
    config: ModelConfig, stage: StageContents, limits: EngineLimits, sizes: CacheSizes
) -> dict[str, int]:
    unit = cache_bytes(config, stage.layers, limits.page_size)

    def rows(sources: Sequence[int], kind: str) -> int:
        positions = sizes.global_pages * limits.page_size
        width = _row_bytes(config, kind)
        return sum(positions // config.compress_ratios[source] * width for source in sources)

    return {
        "window": sizes.window_pages * unit.window_page,
        "kv": rows(stage.kv_sources, "kv"),
        "index_k": rows(stage.kv_sources, "index_k"),
        "open_groups": sizes.slots * unit.slot,
        "replicas": sum(rows([source], kind) for kind, source in stage.replicas),
    }
