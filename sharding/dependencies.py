"""What layers read from each other, and what a cut between them would have to carry."""

import dataclasses
from collections.abc import Sequence

from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import Kind, LayerSpec, layer_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dependency:
    """Layer `consumer` reads the `kind` that layer `source` publishes."""

    kind: Kind
    source: int
    consumer: int
    source_stage: int
    consumer_stage: int

    @property
    def crosses(self) -> bool:
        """Whether source and consumer are on different stages."""
        return self.source_stage != self.consumer_stage

    def __str__(self) -> str:
        return (
            f"{self.kind} of layer {self.source} (stage {self.source_stage}) is read by "
            f"layer {self.consumer} (stage {self.consumer_stage})"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelayItem:
    """What the relay carries over one hop, once, however many layers read it.

    Attributes:
      kind, source: what it is and which layer publishes it.
      bytes_per_token: bytes in a step of fixed shape: one row per token of the step. A source
        of ratio m finishes a row at every m-th token of a request, at most one per token.
    """

    kind: Kind
    source: int
    bytes_per_token: int


def dependencies(specs: Sequence[LayerSpec], ranges: Sequence[range]) -> tuple[Dependency, ...]:
    """Everything a layer reads from another one, by consumer; its own things are none."""
    stage_of = {layer: stage for stage, layers in enumerate(ranges) for layer in layers}
    return tuple(
        Dependency(
            kind=kind,
            source=source,
            consumer=spec.layer,
            source_stage=stage_of[source],
            consumer_stage=stage_of[spec.layer],
        )
        for spec in specs
        for kind, source in spec.reads
    )


def relay_items(config: ModelConfig, cut: int) -> tuple[RelayItem, ...]:
    """What must be carried over a cut before layer `cut`, wherever the other cuts are."""
    spanning = {
        (kind, source): None
        for spec in layer_plan(config)[cut:]
        for kind, source in spec.reads
        if source < cut
    }
    return tuple(
        RelayItem(kind=kind, source=source, bytes_per_token=_relay_bytes(config, kind))
        for kind, source in spanning
    )


def legal_cuts(
    config: ModelConfig, *, relay: bool = False, relay_max_bytes: int | None = None
) -> tuple[int, ...]:
    """Layers before which the model may be cut; any choice of them is a legal partition."""
    limit = relay_max_bytes if relay else 0
    cuts = range(1, config.num_hidden_layers)
    if limit is None:
        return tuple(cuts)
    return tuple(
        cut
        for cut in cuts
        if sum(item.bytes_per_token for item in relay_items(config, cut)) <= limit
    )


def _relay_bytes(config: ModelConfig, kind: Kind) -> int:
    """Bytes of one row: packed as in the caches, or int32 positions and block numbers."""
    sizes = {
        "kv": config.head_dim // 2 + config.head_dim // 16,
        "index_k": config.index_head_dim // 2 + config.index_head_dim // 32,
        "index": 4 * config.index_topk,
        "candidate": 4 * config.candidate_topk_blocks,
    }
    return sizes[kind]
