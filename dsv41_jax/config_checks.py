"""What a configuration must satisfy before anything is built from it.

Every refusal names the key of `config.json`, its value, and what would be right.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from dsv41_jax.config import (
    ConfigError,
    DraftConfig,
    EngramConfig,
    ModelConfig,
    VisionConfig,
    YarnConfig,
)

GROUP = 32  # channels that share one quantization scale


def check_config(config: ModelConfig) -> None:
    """Refuses a configuration the model cannot run.

    Raises:
      ConfigError: the first rule that is broken; sharing between layers comes first.
    """
    check_sharing(config)
    _check_text(config)
    _check_yarn(config.rope_scaling)
    if config.engram is not None:
        _check_engram(config.engram, config)
    if config.draft is not None:
        _check_draft(config.draft, config)
    if config.vision is not None:
        _check_vision(config.vision, config)


def check_sharing(config: ModelConfig) -> None:
    """Refuses sources and ratios that leave a layer without what it reads.

    Rules 2 to 7 of the partition contract, in that order.

    Raises:
      ConfigError: the first rule that is broken.
    """
    _check_ratios(config)
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_source_list(config, key)
    for layer in config.kv_source_layer_ids:
        if layer not in config.index_source_layer_ids:
            raise ConfigError(
                f"layer {layer} is in kv_source_layer_ids {list(config.kv_source_layer_ids)} but "
                f"not in index_source_layer_ids {list(config.index_source_layer_ids)}: KV sources "
                "must also publish index keys"
            )
    _check_sources_of_layers(config)
    _check_candidates(config)


def _check_ratios(config: ModelConfig) -> None:
    ratios = config.compress_ratios
    backbone = config.num_hidden_layers
    draft = config.draft.num_layers if config.draft else 0
    if not _is_int(backbone) or backbone < 1:
        _refuse("num_hidden_layers", backbone, "an integer of at least 1")
    if len(ratios) != backbone + draft:
        raise ConfigError(
            f"compress_ratios has {len(ratios)} entries: it must have one for each of the "
            f"{backbone + draft} layers ({backbone} backbone layers of num_hidden_layers and "
            f"{draft} draft layers of num_nextn_predict_layers)"
        )
    for layer, ratio in enumerate(ratios):
        if not _is_int(ratio) or ratio < 0:
            _refuse(f"compress_ratios[{layer}]", ratio, "an integer of at least 0")
        if layer >= backbone and ratio:
            _refuse(f"compress_ratios[{layer}]", ratio, "0: draft layers attend to a window only")


def _check_source_list(config: ModelConfig, key: str) -> None:
    layers: Sequence[Any] = getattr(config, key)
    last = config.num_hidden_layers - 1
    previous = -1
    for layer in layers:
        if not _is_int(layer):
            raise ConfigError(f"{key} {list(layers)} names {layer!r}: layers must be integers")
        if not 0 <= layer <= last:
            raise ConfigError(
                f"{key} {list(layers)} names layer {layer}: the backbone has layers 0 to {last}"
            )
        if layer <= previous:
            raise ConfigError(
                f"{key} {list(layers)} names layer {layer} after layer {previous}: "
                "it must be strictly ascending"
            )
        if not config.compress_ratios[layer]:
            raise ConfigError(
                f"{key} {list(layers)} names layer {layer}, whose compress_ratios entry is 0: "
                "a source must be a layer that reads compressed KV"
            )
        previous = layer


def _check_sources_of_layers(config: ModelConfig) -> None:
    compressed = [x for x in range(config.num_hidden_layers) if config.compress_ratios[x]]
    for kind, key in (("KV", "kv_source_layer_ids"), ("index", "index_source_layer_ids")):
        layers = getattr(config, key)
        for layer in compressed:
            if not layers or layers[0] > layer:
                raise ConfigError(
                    f"layer {layer} (compress_ratios entry {config.compress_ratios[layer]}) has "
                    f"no {kind} source at or before it: {key} is {list(layers)} and must name "
                    f"layer {compressed[0]}, the first compressed layer"
                )
    for layer in compressed:
        source = max(x for x in config.kv_source_layer_ids if x <= layer)
        ratio, source_ratio = config.compress_ratios[layer], config.compress_ratios[source]
        if ratio != source_ratio:
            raise ConfigError(
                f"layer {layer} has compress_ratios entry {ratio}, but its KV source, layer "
                f"{source} of kv_source_layer_ids, has {source_ratio}: both must be equal"
            )


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer_id
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    if source < 0 or blocks == 0:
        return
    indexes = config.index_source_layer_ids
    if source not in indexes:
        right = f"one of index_source_layer_ids {list(indexes)}"
        _refuse("candidate_source_layer_id", source, right)
    for layer in indexes:
        if layer > source and config.compress_ratios[layer] != config.compress_ratios[source]:
            raise ConfigError(
                f"candidate_source_layer_id is {source}, of ratio "
                f"{config.compress_ratios[source]}, but index source {layer} after it has ratio "
                f"{config.compress_ratios[layer]}: candidates are rows of one ratio"
            )
    _require_positive("candidate_block_size", size)
    rows = (blocks - 1) * size + 1
    if rows < config.index_topk:
        _refuse(
            "candidate_topk_blocks",
            blocks,
            f"larger: with candidate_block_size {size} it is sure to keep only "
            f"(blocks - 1) * size + 1 = {rows} rows, fewer than index_topk {config.index_topk}",
        )


def _check_text(config: ModelConfig) -> None:
    for key in (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "qk_rope_head_dim",
        "q_lora_rank",
        "o_groups",
        "o_lora_rank",
        "sliding_window",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "max_position_embeddings",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "routed_scaling_factor",
        "swiglu_limit",
        "gate_temp",
        "rms_norm_eps",
        "hc_mult",
        "hc_sinkhorn_iters",
        "hc_eps",
    ):
        _require_positive(key, getattr(config, key))
    if config.candidate_topk_blocks < 0:
        _refuse("candidate_topk_blocks", config.candidate_topk_blocks, "at least 0 (0: off)")
    if config.n_shared_experts != 1:
        _refuse("n_shared_experts", config.n_shared_experts, "1: a layer has one shared expert")
    for key in ("rope_theta", "compress_rope_theta"):
        if getattr(config, key) <= 1:
            _refuse(key, getattr(config, key), "above 1")
    for key in ("hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size"):
        _require_multiple(key, getattr(config, key), GROUP)
    _require_multiple("index_head_dim", config.index_head_dim, GROUP)
    _require_multiple("o_groups * o_lora_rank", config.o_groups * config.o_lora_rank, GROUP)
    if config.num_attention_heads % config.o_groups:
        _refuse(
            "o_groups",
            config.o_groups,
            f"a divisor of num_attention_heads, which is {config.num_attention_heads}",
        )
    rope = config.qk_rope_head_dim
    if rope % 2 or rope > min(config.head_dim, config.index_head_dim):
        _refuse(
            "qk_rope_head_dim",
            rope,
            f"even, and at most head_dim {config.head_dim} and "
            f"index_head_dim {config.index_head_dim}",
        )
    _require_choice("", config.num_experts_per_tok, config.n_routed_experts)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        _require_token(key, getattr(config, key), config)
    if config.image_token_id is not None:
        _require_token("image_token_id", config.image_token_id, config)


def _check_yarn(yarn: YarnConfig) -> None:
    for key in ("original_max_position_embeddings", "beta_slow"):
        _require_positive(f"rope_scaling.{key}", getattr(yarn, key))
    if yarn.factor < 1:
        _refuse("rope_scaling.factor", yarn.factor, "at least 1")
    if yarn.beta_fast <= yarn.beta_slow:
        right = f"above rope_scaling.beta_slow, which is {yarn.beta_slow}"
        _refuse("rope_scaling.beta_fast", yarn.beta_fast, right)


def _check_engram(engram: EngramConfig, config: ModelConfig) -> None:
    _check_layers("engram_layer_ids", engram.layer_ids, config)
    for name in ("n_heads", "head_dim", "vocab_size"):
        _require_positive(f"engram_{name}", getattr(engram, name))
    _require_multiple("engram_head_dim", engram.head_dim, GROUP)
    if engram.max_ngram_size < 2:
        _refuse("engram_max_ngram_size", engram.max_ngram_size, "at least 2")
    _require_token("engram_pad_token_id", engram.pad_token_id, config)
    if not 1 <= engram.compressed_vocab_size <= config.vocab_size:
        right = f"from 1 to vocab_size, which is {config.vocab_size}"
        _refuse("engram_compressed_vocab_size", engram.compressed_vocab_size, right)
    if len(engram.num_embeddings) != len(engram.layer_ids):
        right = f"one number of rows for each of engram_layer_ids {list(engram.layer_ids)}"
        _refuse("engram_num_embeddings", list(engram.num_embeddings), right)
    for rows in engram.num_embeddings:
        if rows < engram.num_columns * engram.vocab_size:
            right = (
                f"the sum of {engram.num_columns} primes that are at least "
                f"engram_vocab_size {engram.vocab_size}"
            )
            _refuse("engram_num_embeddings", rows, right)


def _check_draft(draft: DraftConfig, config: ModelConfig) -> None:
    _check_layers("dspark_target_layer_ids", draft.target_layer_ids, config)
    for name in ("block_size", "markov_rank", "n_routed_experts", "num_experts_per_tok"):
        _require_positive(f"dspark_{name}", getattr(draft, name))
    _require_choice("dspark_", draft.num_experts_per_tok, draft.n_routed_experts)
    _require_token("dspark_noise_token_id", draft.noise_token_id, config)


def _check_vision(vision: VisionConfig, config: ModelConfig) -> None:
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "patch_size",
        "downsample_ratio",
        "min_pixels",
    ):
        _require_positive(f"vision_config.{name}", getattr(vision, name))
    heads = vision.num_attention_heads
    if vision.hidden_size % (4 * heads):
        right = f"a multiple of 4 * num_attention_heads = {4 * heads}"
        _refuse("vision_config.hidden_size", vision.hidden_size, right)
    if vision.rope_theta <= 1:
        _refuse("vision_config.rope_theta", vision.rope_theta, "above 1")
    if vision.max_image_tokens < 4:
        right = "at least 4: start, one token, newline and end"
        _refuse("vision_config.max_image_tokens", vision.max_image_tokens, right)
    if vision.max_wh_ratio is not None and vision.max_wh_ratio <= 0:
        _refuse("vision_config.max_wh_ratio", vision.max_wh_ratio, "null or above 0")
    if config.image_token_id is None:
        _refuse("image_token_id", None, "a token id, since there is a vision_config")


def _check_layers(key: str, layers: Sequence[int], config: ModelConfig) -> None:
    last = config.num_hidden_layers - 1
    ascending = all(a < b for a, b in zip(layers, layers[1:], strict=False))
    if not layers or not ascending or layers[0] < 0 or layers[-1] > last:
        _refuse(key, list(layers), f"strictly ascending backbone layers, from 0 to {last}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(key: str, value: Any, right: str) -> NoReturn:
    shown = list(value) if isinstance(value, tuple) else value
    raise ConfigError(f"{key} is {shown!r}: it must be {right}")


def _require_positive(key: str, value: float) -> None:
    if value <= 0:
        _refuse(key, value, "above 0")


def _require_multiple(key: str, value: int, unit: int) -> None:
    if value % unit:
        _refuse(key, value, f"a multiple of {unit}, the channels that share one scale")


def _require_choice(prefix: str, chosen: int, experts: int) -> None:
    if chosen > experts:
        right = f"at most {prefix}n_routed_experts, which is {experts}"
        _refuse(f"{prefix}num_experts_per_tok", chosen, right)


def _require_token(key: str, token: int, config: ModelConfig) -> None:
    if not 0 <= token < config.vocab_size:
        _refuse(key, token, f"a token id below vocab_size, which is {config.vocab_size}")
