"""A simple estimate of what a layer costs in a decode step: the weight bytes it reads.

Decode is bound by memory: a token reads every dense weight of a layer once and those of the
experts it is routed to. Larger batches touch more experts, in every layer alike. Caches are
left out: window and chosen rows are below a megabyte per token and layer.
"""

from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import LayerSpec, layer_plan

FP8 = 1 + 1 / (32 * 32)  # bytes per weight, with its share of the block scale
FP4 = 1 / 2 + 1 / 32
BF16, F32 = 2, 4


def layer_costs(config: ModelConfig) -> tuple[float, ...]:
    """Bytes read per decode token, by backbone layer; the last one carries the head too."""
    costs = [_layer_bytes(config, spec) for spec in layer_plan(config)]
    costs[-1] += BF16 * config.vocab_size * config.hidden_size
    return tuple(costs)


def _layer_bytes(config: ModelConfig, spec: LayerSpec) -> float:
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    output = config.o_groups * config.o_lora_rank
    attention = FP8 * (
        hidden * config.q_lora_rank
        + config.q_lora_rank * heads * head_dim
        + hidden * head_dim
        + config.o_lora_rank * heads * head_dim
        + output * hidden
    )
    expert = 3 * hidden * config.moe_intermediate_size
    moe = expert * (FP4 * config.num_experts_per_tok + FP8 * config.n_shared_experts)
    gate = BF16 * config.n_routed_experts * hidden
    mixes = (2 + config.hc_mult) * config.hc_mult
    hyper_connections = 2 * F32 * mixes * config.hc_mult * hidden
    total = attention + moe + gate + hyper_connections
    if spec.owns_kv:
        matrices = 1 if spec.ratio == 1 else 2
        total += BF16 * (matrices * hidden * head_dim + head_dim * config.index_head_dim)
    if spec.owns_index:
        query = config.q_lora_rank * config.index_n_heads * config.index_head_dim
        total += FP8 * query + BF16 * hidden * config.index_n_heads
    if spec.engram is not None and config.engram is not None:
        rows = config.engram.num_columns * config.engram.head_dim
        total += FP8 * rows * hidden * (config.hc_mult + 1)
    return total
