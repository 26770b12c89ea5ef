"""Smaller configurations that keep another one's shapes per layer: fewer layers, experts, rows."""

import dataclasses
from collections.abc import Iterable, Sequence

from dsv41_jax.config import ConfigError, DraftConfig, EngramConfig, ModelConfig
from dsv41_jax.config_checks import check_config
from dsv41_jax.engram_hash import bucket_primes
from dsv41_jax.layer_plan import layer_plan


def pick_layers(config: ModelConfig, count: int) -> tuple[int, ...]:
    """Layers that stand for all kinds of a model, as many as wanted, ascending.

    First come one source of each ratio, then a layer with an Engram table, fresh top-k sets,
    one that reads from others and one with a window only, then the rest in order.

    Raises:
      ConfigError: the model has fewer layers.
    """
    specs = layer_plan(config)
    if not 1 <= count <= len(specs):
        raise ConfigError(f"{count} layers are wanted of a model that has {len(specs)}")
    sources = [spec for spec in specs if spec.owns_kv]
    kinds = [
        [next(s for s in sources if s.ratio == r) for r in sorted({s.ratio for s in sources})],
        [spec for spec in specs if spec.engram is not None][:1],
        [spec for spec in specs if spec.owns_index and not spec.owns_kv][:1],
        [spec for spec in reversed(specs) if spec.ratio and not spec.owns_index][:1],
        [spec for spec in specs if not spec.ratio][:1],
        list(specs),
    ]
    order = dict.fromkeys(spec.layer for kind in kinds for spec in kind)
    return tuple(sorted(list(order)[:count]))


def keep_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The model of some backbone layers of another one, with their ids moved up.

    Raises:
      ConfigError: a layer is not the model's, or reads from one that is not kept.
    """
    count = config.num_hidden_layers
    if (
        not layers
        or list(layers) != sorted(set(layers))
        or not 0 <= layers[0] <= layers[-1] < count
    ):
        raise ConfigError(
            f"layers {list(layers)} must be ascending layers of the model, from 0 to {count - 1}"
        )
    place = {layer: i for i, layer in enumerate(layers)}

    def moved(ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(place[layer] for layer in ids if layer in place)

    kept = dataclasses.replace(
        config,
        num_hidden_layers=len(layers),
        compress_ratios=(
            *(config.compress_ratios[layer] for layer in layers),
            *config.compress_ratios[count:],
        ),
        kv_source_layer_ids=moved(config.kv_source_layer_ids),
        index_source_layer_ids=moved(config.index_source_layer_ids),
        candidate_source_layer_id=place.get(config.candidate_source_layer_id, -1),
        engram=config.engram and _keep_tables(config.engram, place),
        draft=config.draft and _keep_targets(config.draft, len(layers)),
    )
    check_config(kept)
    return kept


def _keep_tables(engram: EngramConfig, place: dict[int, int]) -> EngramConfig | None:
    layers = tuple(place[layer] for layer in engram.layer_ids if layer in place)
    if not layers:
        return None
    return _with_tables(engram, layers, engram.vocab_size)


def _keep_targets(draft: DraftConfig, layers: int) -> DraftConfig:
    count = min(len(draft.target_layer_ids), layers)
    return dataclasses.replace(draft, target_layer_ids=tuple(range(layers - count, layers)))


def _with_tables(engram: EngramConfig, layers: tuple[int, ...], smallest: int) -> EngramConfig:
    """Tables whose columns have `smallest` rows or a little more."""
    sized = dataclasses.replace(
        engram, layer_ids=layers, vocab_size=smallest, num_embeddings=(0,) * len(layers)
    )
    rows = bucket_primes(sized).reshape(len(layers), -1).sum(axis=1)
    return dataclasses.replace(sized, num_embeddings=tuple(int(count) for count in rows))


def with_sizes(
    config: ModelConfig,
    *,
    experts: int | None = None,
    engram_rows: int | None = None,
    compressed_vocab_size: int | None = None,
) -> ModelConfig:
    """The same layers with fewer experts or smaller Engram tables.

    Args:
      config: the model.
      experts: routed experts of a layer; the draft gets as many at most.
      engram_rows: about how many rows a table has.
      compressed_vocab_size: what a tokenizer's texts normalize to.

    Raises:
      ConfigError: a size the model cannot have.
    """
    draft, engram = config.draft, config.engram
    if experts is not None:
        active = min(config.num_experts_per_tok, experts)
        if draft is not None:
            routed = min(draft.n_routed_experts, experts)
            draft = dataclasses.replace(
                draft,
                n_routed_experts=routed,
                num_experts_per_tok=min(draft.num_experts_per_tok, routed),
            )
        config = dataclasses.replace(config, n_routed_experts=experts, num_experts_per_tok=active)
    if engram is not None and engram_rows is not None:
        smallest = max(2, engram_rows // engram.num_columns)
        engram = _with_tables(engram, engram.layer_ids, smallest)
    if engram is not None and compressed_vocab_size is not None:
        engram = dataclasses.replace(engram, compressed_vocab_size=compressed_vocab_size)
    config = dataclasses.replace(config, draft=draft, engram=engram)
    check_config(config)
    return config
