"""Frozen configuration of the model; field names are the released config's keys."""

import dataclasses


class ConfigError(ValueError):
    """A configuration that does not describe a DeepSeek-V4.1 model this project can run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN frequency scaling (spec: attention, RoPE); used where a layer compresses.

    Attributes:
      factor: context extension factor.
      original_max_position_embeddings: trained context, in tokens.
      beta_fast, beta_slow: rotations over the trained context that bound the ramp.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """Hashed n-gram tables (keys `engram_*`).

    Attributes:
      layer_ids: backbone layers that own a table, ascending.
      num_embeddings: rows of each table.
      max_ngram_size: largest n-gram; sizes 2..max_ngram_size are hashed.
      n_heads: hashes per n-gram size.
      head_dim: channels of one row.
      vocab_size: lower bound of the bucket primes.
      pad_token_id: token that stands in where look-back is blocked.
      compressed_vocab_size: number of ids after tokens that normalize alike are merged.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    head_dim: int
    vocab_size: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def num_columns(self) -> int:
        """Rows looked up per token and layer."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """DSpark draft blocks (keys `dspark_*` and `num_nextn_predict_layers`)."""

    num_layers: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int
    num_experts_per_tok: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Vision tower and image sizes (key `vision_config`)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text model, with its optional parts; keys of `text_config` unless said otherwise.

    `compress_ratios` has one entry per backbone layer and then one per draft layer.
    `engram`, `draft` and `vision` are None where the model has no such part.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnConfig
    max_position_embeddings: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    gate_temp: float
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    engram: EngramConfig | None
    draft: DraftConfig | None
    vision: VisionConfig | None
