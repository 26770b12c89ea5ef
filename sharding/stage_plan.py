"""Which layers run on which stage, what crosses between stages, and whether it may.

Needs a configuration and layer counts: no weight, no device, no module.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from dsv41_jax.config import ModelConfig
from dsv41_jax.config_checks import check_config
from dsv41_jax.layer_plan import Kind, LayerSpec, layer_plan
from sharding.dependencies import (
    Dependency,
    RelayItem,
    dependencies,
    legal_cuts,
    relay_items,
)
from sharding.partitions import balanced_partition, counts_of, nearest_partitions
from sharding.step_cost import layer_costs

NAMED_CROSSINGS = 4  # how many a refusal spells out
NEAREST = 3  # how many legal partitions it offers


class PartitionError(ValueError):
    """Stages that do not partition the layers, or that cut through what layers share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """What goes from stage `stage` to the next one in every step.

    Attributes:
      stage: the sending stage.
      cut: first layer of the receiving stage.
      stream_bytes_per_token: the residual copies in bf16 and the delayed pre-mix in fp32.
      relay: what the relay adds; empty where nothing crosses or the relay is off.
    """

    stage: int
    cut: int
    stream_bytes_per_token: int
    relay: tuple[RelayItem, ...]

    @property
    def relay_bytes_per_token(self) -> int:
        """What the relay adds to the stream."""
        return sum(item.bytes_per_token for item in self.relay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageContents:
    """What one stage owns and allocates; nothing else exists on its devices.

    Attributes:
      stage: index in the pipeline.
      layers: backbone layers, each with a window cache.
      kv_sources: layers with a compressor, a compressed cache and index keys.
      index_sources: layers that choose top-k sets.
      candidate_source: layer that chooses candidate blocks, or None.
      open_groups: KV sources of ratio > 1, which keep incomplete groups.
      engram_layers: layers with an Engram table.
      replicas: (kind, source) of caches fed by the relay; kinds `kv` and `index_k`.
      embedding, vision: on the first stage.
      head, draft: on the last stage.
      cost: estimated weight bytes read per decode token.
    """

    stage: int
    layers: range
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int | None
    open_groups: tuple[int, ...]
    engram_layers: tuple[int, ...]
    replicas: tuple[tuple[Kind, int], ...]
    embedding: bool
    vision: bool
    head: bool
    draft: bool
    cost: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Contiguous stages of the backbone and everything that follows from them.

    Attributes:
      num_layers: backbone layers.
      stages: contents by stage.
      dependencies: what layers read from other layers, by consumer.
      boundaries: what travels from each stage but the last.
      relay: whether shared things may cross stages.
    """

    num_layers: int
    stages: tuple[StageContents, ...]
    dependencies: tuple[Dependency, ...]
    boundaries: tuple[Boundary, ...]
    relay: bool

    @property
    def ranges(self) -> tuple[range, ...]:
        """Layers of every stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of every stage."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def crossings(self) -> tuple[Dependency, ...]:
        """Dependencies between layers of different stages."""
        return tuple(dependency for dependency in self.dependencies if dependency.crosses)

    @property
    def balance(self) -> float:
        """Mean stage cost over the highest: the share of a perfect pipeline's throughput."""
        costs = [stage.cost for stage in self.stages]
        return sum(costs) / len(costs) / max(costs)


def build_stage_plan(
    config: ModelConfig,
    *,
    stages: Sequence[int] | None = None,
    num_stages: int | None = None,
    relay: bool = False,
    relay_max_bytes: int | None = None,
) -> StagePlan:
    """Lays the layers out over stages and refuses what cannot run.

    Args:
      config: the model; its own rules are checked first.
      stages: layers per stage; None to choose.
      num_stages: how many stages to choose when `stages` is None: the legal partition with the
        best balance of estimated step cost. One stage when this is None as well.
      relay: whether shared things may cross stages.
      relay_max_bytes: most bytes per token that the relay may carry over one hop.

    Raises:
      ConfigError: the configuration breaks a rule of its own.
      PartitionError: the stages do not partition the layers, or cut through what is shared.
    """
    check_config(config)
    if stages is None:
        wanted = 1 if num_stages is None else num_stages
        stages = choose_counts(config, wanted, relay=relay, relay_max_bytes=relay_max_bytes)
    elif num_stages is not None and num_stages != len(stages):
        raise PartitionError(
            f"{num_stages} pipeline stages are wanted, but the layer counts {_join(stages)} "
            f"describe {len(stages)}: give one count per stage"
        )
    ranges = ranges_of(stages)
    try:
        plan = lay_out(config, ranges, relay=relay)
    except PartitionError as error:
        legal = legal_cuts(config, relay=relay, relay_max_bytes=relay_max_bytes)
        nearest = _nearest_text(ranges, config.num_hidden_layers, legal)
        raise PartitionError(f"{error}. {nearest}") from None
    check_crossings(config, plan, relay_max_bytes=relay_max_bytes)
    return plan


def ranges_of(counts: Iterable[int]) -> tuple[range, ...]:
    """Consecutive layer ranges of the given lengths, from layer 0."""
    ranges: list[range] = []
    start = 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return tuple(ranges)


def check_ranges(ranges: Sequence[range], num_layers: int) -> None:
    """Rule 1: stages partition all layers.

    Raises:
      PartitionError: a stage is empty, or layers are missing or held twice.
    """
    shown = ", ".join(f"[{r.start}, {r.stop})" for r in ranges) or "none"
    end = 0
    problem = "" if ranges else "there is no stage"
    for stage, layers in enumerate(ranges):
        if layers.step != 1 or layers.stop <= layers.start:
            problem = f"stage {stage} has no layers"
        elif layers.start > end:
            first = "do not start at layer 0" if stage == 0 else f"leave a hole at layer {end}"
            problem = f"the stages {first}"
        elif layers.start < end:
            problem = f"stages {stage - 1} and {stage} overlap at layer {layers.start}"
            if stage == 0:
                problem = "the stages do not start at layer 0"
        if problem:
            break
        end = layers.stop
    if not problem and end != num_layers:
        problem = f"the stages end at layer {end}, but num_hidden_layers is {num_layers}"
    if problem:
        raise PartitionError(
            f"stage ranges {shown} are refused: {problem}; stages must partition all layers "
            f"0 to {num_layers - 1} in order"
        )


def lay_out(config: ModelConfig, ranges: Sequence[range], *, relay: bool) -> StagePlan:
    """What the given stages own and exchange, whether or not it may cross.

    Raises:
      PartitionError: the ranges do not partition the layers.
    """
    check_ranges(ranges, config.num_hidden_layers)
    specs = layer_plan(config)
    reads = dependencies(specs, ranges)
    costs = layer_costs(config)
    return StagePlan(
        num_layers=config.num_hidden_layers,
        stages=tuple(
            _contents(config, stage, ranges, specs, reads if relay else (), costs)
            for stage in range(len(ranges))
        ),
        dependencies=reads,
        boundaries=tuple(
            Boundary(
                stage=stage,
                cut=layers.start,
                stream_bytes_per_token=config.hc_mult * (2 * config.hidden_size + 4),
                relay=relay_items(config, layers.start) if relay else (),
            )
            for stage, layers in enumerate(ranges[1:])
        ),
        relay=relay,
    )


def choose_counts(
    config: ModelConfig, num_stages: int, *, relay: bool, relay_max_bytes: int | None
) -> tuple[int, ...]:
    """Layers per stage of the legal partition with the best balance of step cost.

    Raises:
      PartitionError: there is none with that many stages.
    """
    cuts = legal_cuts(config, relay=relay, relay_max_bytes=relay_max_bytes)
    if num_stages < 1:
        raise PartitionError(f"{num_stages} pipeline stages are wanted: there must be at least 1")
    chosen = balanced_partition(layer_costs(config), num_stages, cuts)
    if chosen is None:
        raise PartitionError(
            f"no partition into {num_stages} stages is legal: "
            f"{_finest(config.num_hidden_layers, cuts)}. {_way_out(relay)}"
        )
    return counts_of(chosen, config.num_hidden_layers)


def check_crossings(config: ModelConfig, plan: StagePlan, *, relay_max_bytes: int | None) -> None:
    """Rule 8: what layers share stays in a stage, or the relay carries it within its budget.

    Raises:
      PartitionError: with the crossings and the nearest legal partitions.
    """
    legal = legal_cuts(config, relay=plan.relay, relay_max_bytes=relay_max_bytes)
    illegal = [boundary for boundary in plan.boundaries if boundary.cut not in legal]
    if not illegal:
        return
    if plan.relay:
        worst = max(illegal, key=lambda boundary: boundary.relay_bytes_per_token)
        items = ", ".join(
            f"{item.kind} of layer {item.source}: {item.bytes_per_token}" for item in worst.relay
        )
        reason = (
            f"partition {_join(plan.counts)} makes the relay carry "
            f"{worst.relay_bytes_per_token} bytes per token from stage {worst.stage} to stage "
            f"{worst.stage + 1} ({items}), more than the allowed {relay_max_bytes}"
        )
    else:
        crossings = plan.crossings
        named = "; ".join(str(crossing) for crossing in crossings[:NAMED_CROSSINGS])
        more = len(crossings) - NAMED_CROSSINGS
        reason = f"partition {_join(plan.counts)} cuts through what layers share: {named}"
        reason += f"; and {more} more" if more > 0 else ""
    nearest = _nearest_text(plan.ranges, plan.num_layers, legal)
    raise PartitionError(f"{reason}. {nearest}. {_way_out(plan.relay)}")


def nearest_legal(
    ranges: Sequence[range], num_layers: int, legal: Sequence[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(layers moved, layers per stage) of the legal partitions nearest to `ranges`."""
    found = nearest_partitions(ranges, num_layers, legal, limit=NEAREST)
    return tuple((moved, counts_of(cuts, num_layers)) for moved, cuts in found)


def _nearest_text(ranges: Sequence[range], num_layers: int, legal: Sequence[int]) -> str:
    nearest = nearest_legal(ranges, num_layers, legal)
    if not nearest:
        return f"No partition into {len(ranges)} stages is legal: {_finest(num_layers, legal)}"
    shown = " or ".join(
        f"{_join(counts)} ({moved} {'layer' if moved == 1 else 'layers'} moved)"
        for moved, counts in nearest
    )
    return f"Nearest legal: {shown}"


def _finest(num_layers: int, legal: Sequence[int]) -> str:
    counts = _join(counts_of(tuple(legal), num_layers))
    return f"the finest legal partition has {len(legal) + 1}: {counts}"


def _way_out(relay: bool) -> str:
    if relay:
        return "Raise --pipeline-relay-max-bytes, or use fewer or other stages"
    return "Or turn on --pipeline-relay, which carries what crosses"


def _contents(
    config: ModelConfig,
    stage: int,
    ranges: Sequence[range],
    specs: Sequence[LayerSpec],
    relayed: Sequence[Dependency],
    costs: Sequence[float],
) -> StageContents:
    layers = ranges[stage]
    local = [specs[layer] for layer in layers]
    replicas = {
        (dependency.kind, dependency.source): None
        for dependency in relayed
        if dependency.crosses
        and dependency.consumer_stage == stage
        and dependency.kind in ("kv", "index_k")
    }
    first, last = stage == 0, stage == len(ranges) - 1
    return StageContents(
        stage=stage,
        layers=layers,
        kv_sources=tuple(spec.layer for spec in local if spec.owns_kv),
        index_sources=tuple(spec.layer for spec in local if spec.owns_index),
        candidate_source=next((spec.layer for spec in local if spec.publishes_candidates), None),
        open_groups=tuple(spec.layer for spec in local if spec.owns_kv and spec.ratio > 1),
        engram_layers=tuple(spec.layer for spec in local if spec.engram is not None),
        replicas=tuple(replicas),
        embedding=first,
        vision=first and config.vision is not None,
        head=last,
        draft=last and config.draft is not None,
        cost=sum(costs[layer] for layer in layers),
    )


def _join(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers)
