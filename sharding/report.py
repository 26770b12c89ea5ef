"""What a partition means, as plain facts and as text."""

from collections.abc import Iterable, Sequence
from typing import Any

from dsv41_jax.config import ModelConfig
from sharding.compile_report import compile_text
from sharding.dependencies import Dependency, legal_cuts
from sharding.fit import fit_text, memory_text
from sharding.options import PartitionOptions
from sharding.roofline_report import roofline_text
from sharding.stage_plan import StageContents, StagePlan, nearest_legal, ranges_of
from sharding.tensor_plan import TensorPlan

Facts = dict[str, Any]


def plan_facts(
    config: ModelConfig,
    plan: StagePlan,
    options: PartitionOptions,
    tensor: TensorPlan | None,
    *,
    error: str | None,
) -> Facts:
    """Everything the plan says, as JSON values.

    Args:
      config: the model.
      plan: its stages, legal or not.
      options: what was asked for.
      tensor: what a device of a stage holds; None where it does not divide.
      error: why the partition is refused, or None.
    """
    legal = _legal_cuts(config, options)
    cut_wrongly = any(boundary.cut not in legal for boundary in plan.boundaries)
    return {
        "legal": error is None,
        "error": error,
        "num_layers": plan.num_layers,
        "pipeline_stages": list(plan.counts),
        "pipeline_microbatches": options.microbatches(plan),
        "devices": len(plan.stages) * options.tensor_parallel_size,
        "tensor": None if tensor is None else vars(tensor),
        "stages": [_stage_facts(config, stage) for stage in plan.stages],
        "dependencies": [_dependency_facts(d) for d in plan.dependencies],
        "crossings": [_dependency_facts(d) for d in plan.crossings],
        "boundaries": [
            {
                "from_stage": boundary.stage,
                "to_stage": boundary.stage + 1,
                "cut_before_layer": boundary.cut,
                "stream_bytes_per_token": boundary.stream_bytes_per_token,
                "relay_bytes_per_token": boundary.relay_bytes_per_token,
                "relay": [vars(item) for item in boundary.relay],
            }
            for boundary in plan.boundaries
        ],
        "relay": {
            "enabled": plan.relay,
            "max_bytes_per_token": options.pipeline_relay_max_bytes,
        },
        "balance": {
            "cost_unit": "weight bytes read per decode token",
            "stage_costs": [round(stage.cost) for stage in plan.stages],
            "slowest_stage": max(plan.stages, key=lambda stage: stage.cost).stage,
            "throughput_share": round(plan.balance, 4),
        },
        "legal_cuts": list(legal),
        "nearest_legal": _nearest_facts(plan.ranges, config, legal) if cut_wrongly else [],
    }


def refusal_facts(config: ModelConfig, options: PartitionOptions, error: str) -> Facts:
    """The facts of stages that do not even partition the layers, as JSON values."""
    legal = _legal_cuts(config, options)
    ranges = ranges_of(options.pipeline_stages or ())
    return {
        "legal": False,
        "error": error,
        "num_layers": config.num_hidden_layers,
        "legal_cuts": list(legal),
        "nearest_legal": _nearest_facts(ranges, config, legal),
    }


def _legal_cuts(config: ModelConfig, options: PartitionOptions) -> tuple[int, ...]:
    return legal_cuts(
        config,
        relay=options.pipeline_relay,
        relay_max_bytes=options.pipeline_relay_max_bytes,
    )


def _nearest_facts(
    ranges: Sequence[range], config: ModelConfig, legal: Sequence[int]
) -> list[Facts]:
    return [
        {"pipeline_stages": list(counts), "layers_moved": moved}
        for moved, counts in nearest_legal(ranges, config.num_hidden_layers, legal)
    ]


def _stage_facts(config: ModelConfig, stage: StageContents) -> Facts:
    ratios = [config.compress_ratios[layer] for layer in stage.kv_sources]
    kv_row = config.head_dim // 2 + config.head_dim // 16
    index_row = config.index_head_dim // 2 + config.index_head_dim // 32
    return {
        "stage": stage.stage,
        "first_layer": stage.layers.start,
        "last_layer": stage.layers.stop - 1,
        "num_layers": len(stage.layers),
        "kv_sources": list(stage.kv_sources),
        "index_sources": list(stage.index_sources),
        "candidate_source": stage.candidate_source,
        "open_groups": list(stage.open_groups),
        "engram_layers": list(stage.engram_layers),
        "replicas": [{"kind": kind, "source": source} for kind, source in stage.replicas],
        "embedding": stage.embedding,
        "vision": stage.vision,
        "draft": stage.draft,
        "head": stage.head,
        "window_row_bytes": len(stage.layers) * (config.head_dim + config.head_dim // 32),
        "compressed_bytes_per_token": sum((kv_row + index_row) / ratio for ratio in ratios),
    }


def _dependency_facts(dependency: Dependency) -> Facts:
    return vars(dependency)


def plan_text(facts: Facts) -> str:
    """The facts of `plan_facts` for a reader; the reason of a refusal is left to the caller."""
    lines = [
        f"{facts['num_layers']} layers in {_count(len(facts['stages']), 'stage')}: "
        f"{_join(facts['pipeline_stages'])} on {_count(facts['devices'], 'device')}, "
        f"{_count(facts['pipeline_microbatches'], 'microbatch', 'microbatches')}, "
        f"relay {'on' if facts['relay']['enabled'] else 'off'}",
        "",
        "Stages",
    ]
    lines += [_stage_text(stage) for stage in facts["stages"]]
    if facts["tensor"] is not None and facts["tensor"]["devices"] > 1:
        lines += ["", "Each device of a stage", f"  {_tensor_text(facts['tensor'])}"]
    lines += ["", "Dependencies (source layer -> reading layers)"]
    lines += _grouped(facts["dependencies"]) or ["  none"]
    lines += ["", f"Crossings: {len(facts['crossings']) or 'none'}"]
    lines += [
        f"  {d['kind']:<9} layer {d['source']} (stage {d['source_stage']}) -> "
        f"layer {d['consumer']} (stage {d['consumer_stage']})"
        for d in facts["crossings"]
    ]
    if facts["boundaries"]:
        lines += ["", "Boundaries (bytes per token of a step)"]
        lines += [_boundary_text(boundary) for boundary in facts["boundaries"]]
    lines += ["", *_balance_text(facts)]
    if "memory" in facts:
        lines += ["", *memory_text(facts["memory"])]
    if "device" in facts.get("fit", {}):
        lines += fit_text(facts["fit"])
    if "compiled" in facts:
        usable = facts.get("fit", {}).get("usable_bytes")
        lines += ["", *compile_text(facts["compiled"], usable)]
    if "roofline" in facts:
        lines += ["", *roofline_text(facts["roofline"])]
    if facts["nearest_legal"]:
        lines += ["", f"Legal cuts: before layer {_join(facts['legal_cuts'])}"]
        lines.append("Nearest legal partitions")
        lines += [
            f"  {_join(near['pipeline_stages'])}  ({_count(near['layers_moved'], 'layer')} moved)"
            for near in facts["nearest_legal"]
        ]
    return "\n".join(lines)


def _stage_text(stage: Facts) -> str:
    owned = [
        ("embedding", stage["embedding"]),
        ("vision", stage["vision"]),
        (f"KV sources {_join(stage['kv_sources'])}", stage["kv_sources"]),
        (f"index sources {_join(stage['index_sources'])}", stage["index_sources"]),
        (f"candidate source {stage['candidate_source']}", stage["candidate_source"] is not None),
        (f"Engram {_join(stage['engram_layers'])}", stage["engram_layers"]),
        (
            "replicas "
            + _join(f"{item['kind']} of {item['source']}" for item in stage["replicas"]),
            stage["replicas"],
        ),
        ("draft", stage["draft"]),
        ("head", stage["head"]),
    ]
    shown = "; ".join(text for text, present in owned if present) or "window-only layers"
    layers = f"layers {_span(stage['first_layer'], stage['last_layer'])}"
    caches = (
        f"caches: {stage['window_row_bytes']} bytes per window position, "
        f"{stage['compressed_bytes_per_token']:g} per token of context"
    )
    return f"  {stage['stage']}  {layers:<13} ({stage['num_layers']})  {shown}\n     {caches}"


def _tensor_text(tensor: Facts) -> str:
    experts = f"{tensor['experts']} routed experts of {tensor['expert_intermediate']} channels"
    if tensor["padding_experts"]:
        experts += f" ({tensor['padding_experts']} empty in all)"
    return (
        f"{tensor['heads']} heads, {_count(tensor['output_groups'], 'output group')}, "
        f"{tensor['vocabulary']} vocabulary rows, {tensor['shared_intermediate']} channels of "
        f"the shared expert, {experts}"
    )


def _boundary_text(boundary: Facts) -> str:
    line = (
        f"  stage {boundary['from_stage']} -> {boundary['to_stage']}: "
        f"stream {boundary['stream_bytes_per_token']}"
    )
    if not boundary["relay"]:
        return line
    items = ", ".join(
        f"{item['kind']} of layer {item['source']} {item['bytes_per_token']}"
        for item in boundary["relay"]
    )
    return f"{line}, relay {boundary['relay_bytes_per_token']} ({items})"


def _balance_text(facts: Facts) -> list[str]:
    balance = facts["balance"]
    costs = ", ".join(f"{cost / 1e6:.4g}" for cost in balance["stage_costs"])
    lines = [f"Estimated step cost by stage (MB of weights read per decode token): {costs}"]
    if len(facts["stages"]) > 1:
        share = balance["throughput_share"]
        lines.append(
            f"Stage {balance['slowest_stage']} sets the pace: with every stage busy the pipeline "
            f"reaches {share:.0%} of what equal stages would; the imbalance costs {1 - share:.0%}"
        )
    return lines


def _grouped(dependencies: Sequence[Facts]) -> list[str]:
    consumers: dict[tuple[str, int], list[int]] = {}
    for dependency in dependencies:
        key = (dependency["kind"], dependency["source"])
        consumers.setdefault(key, []).append(dependency["consumer"])
    order = ("kv", "index_k", "index", "candidate")
    groups = sorted(consumers.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    return [f"  {kind:<9} {source} -> {_runs(layers)}" for (kind, source), layers in groups]


def _runs(layers: Sequence[int]) -> str:
    """Ascending layers with consecutive ones joined: 3-7, 9."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(_span(first, last) for first, last in runs)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _join(values: Iterable[object]) -> str:
    return ",".join(str(value) for value in values)
