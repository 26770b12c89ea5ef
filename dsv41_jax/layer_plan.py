"""What each backbone layer computes, publishes and reads: one row per layer.

Layers are classified here and nowhere else (spec: attention, things that cross layers).
"""

import dataclasses
import enum
from typing import Literal

from dsv41_jax.config import ModelConfig

Kind = Literal["kv", "index_k", "index", "candidate"]  # what layers share


class SharingError(ValueError):
    """A layer reads something that its source layer does not provide."""


class AttentionMode(enum.Enum):
    """What a layer attends to, and what of it is its own."""

    WINDOW = "window"  # sliding window only
    FULL = "full"  # owns a compressor: publishes KV, index keys and top-k sets
    REINDEX = "reindex"  # publishes fresh top-k sets over its KV source's index keys
    REUSE = "reuse"  # reads KV and top-k sets of earlier layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One backbone layer.

    Attributes:
      layer: index in the backbone.
      mode: see `AttentionMode`.
      ratio: tokens per compressed row; 0 in window-only layers.
      kv_source: layer whose compressed KV (and index keys) this layer reads; may be itself.
      index_source: layer whose top-k set this layer attends to; may be itself.
      candidate_source: layer whose candidate blocks mask this layer's index scores, or None.
      publishes_candidates: whether this layer selects the candidate blocks.
      engram: position of this layer's table in `EngramConfig.layer_ids`, or None.
      draft_target: whether the draft reads this layer's input.
    """

    layer: int
    mode: AttentionMode
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidate_source: int | None
    publishes_candidates: bool
    engram: int | None
    draft_target: bool

    @property
    def owns_kv(self) -> bool:
        """Whether the layer has a compressor and its caches."""
        return self.mode is AttentionMode.FULL

    @property
    def owns_index(self) -> bool:
        """Whether the layer runs an indexer."""
        return self.mode in (AttentionMode.FULL, AttentionMode.REINDEX)

    @property
    def reads(self) -> tuple[tuple[Kind, int], ...]:
        """What this layer reads from other layers, each with its source layer."""
        sources: list[tuple[Kind, int | None]] = [
            ("kv", self.kv_source),
            ("index_k", self.kv_source if self.mode is AttentionMode.REINDEX else None),
            ("index", self.index_source),
            ("candidate", self.candidate_source),
        ]
        return tuple((kind, source) for kind, source in sources if source not in (None, self.layer))


def _nearest(sources: tuple[int, ...], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)


def layer_spec(config: ModelConfig, layer: int) -> LayerSpec:
    """Classifies one backbone layer of a validated configuration."""
    ratio = config.compress_ratios[layer]
    if not ratio:
        mode = AttentionMode.WINDOW
    elif layer in config.kv_source_layer_ids:
        mode = AttentionMode.FULL
    elif layer in config.index_source_layer_ids:
        mode = AttentionMode.REINDEX
    else:
        mode = AttentionMode.REUSE
    candidates = config.candidate_source_layer_id if config.candidate_topk_blocks > 0 else -1
    masked = mode in (AttentionMode.FULL, AttentionMode.REINDEX) and 0 <= candidates < layer
    return LayerSpec(
        layer=layer,
        mode=mode,
        ratio=ratio,
        kv_source=_nearest(config.kv_source_layer_ids, layer) if ratio else None,
        index_source=_nearest(config.index_source_layer_ids, layer) if ratio else None,
        candidate_source=candidates if masked else None,
        publishes_candidates=candidates == layer,
        engram=(
            config.engram.layer_ids.index(layer)
            if config.engram and layer in config.engram.layer_ids
            else None
        ),
        draft_target=config.draft is not None and layer in config.draft.target_layer_ids,
    )


def layer_plan(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """One row per backbone layer."""
    return tuple(layer_spec(config, layer) for layer in range(config.num_hidden_layers))
