"""What a step needs besides parameters and caches, estimated from the configuration.

The model of a layer's memory is that of the compiled programs: the residual stream, and what the
widest of its parts keeps beside it. `sharding.plan --compile` has the compiler's own figures.
"""

from dsv41_jax.config import ModelConfig
from pallas_kernels.attention_kernels import PARTIAL_BYTES, SPLIT
from sharding.stage_plan import StageContents
from sharding.tensor_plan import TensorPlan

BF16, F32 = 2, 4
_SCORES_AT_ONCE = 2**23  # index scores held at a time, if 16 rows of them are not more
_LOGIT_ARRAYS = 5  # as large as the logits, while tokens are chosen from them


def step_temporaries(
    config: ModelConfig,
    stage: StageContents,
    tensor: TensorPlan,
    *,
    tokens: int,
    positions: int,
    logit_rows: int,
) -> int:
    """Bytes on each device of a stage.

    Args:
      config: the model.
      stage: what it owns.
      tensor: how it divides over its devices.
      tokens: T of the step.
      positions: tokens of context that a request's block table reaches.
      logit_rows: L of the step.
    """
    hidden = config.hidden_size
    stream = BF16 * tokens * config.hc_mult * hidden
    parts = [_attention(config, tensor, tokens), _experts(config, tensor, tokens)]
    ratios = [config.compress_ratios[source] for source in stage.index_sources]
    if ratios:
        row = positions // min(ratios)
        parts.append(2 * F32 * min(tokens * row, max(_SCORES_AT_ONCE, 16 * row)))
    layers = stream + max(parts)
    logits = _LOGIT_ARRAYS * F32 * logit_rows * config.vocab_size if stage.head else 0
    return max(layers, logits)


def _attention(config: ModelConfig, tensor: TensorPlan, tokens: int) -> int:
    """Queries as they are multiplied and rounded, and partial sums of a chunk of rows."""
    dim = config.head_dim
    splits = -(-config.sliding_window // SPLIT) + -(-config.index_topk // SPLIT)
    queries = tokens * tensor.heads * dim
    return (F32 + BF16) * queries + min(PARTIAL_BYTES, F32 * splits * queries)


def _experts(config: ModelConfig, tensor: TensorPlan, tokens: int) -> int:
    """Results and hidden rows of every chosen expert, and the sums over experts."""
    chosen = tokens * config.num_experts_per_tok
    whole = tensor.devices == 1 or tensor.expert_parallel
    row = (BF16 if whole else F32) * config.hidden_size + BF16 * tensor.expert_intermediate
    return chosen * row + 2 * F32 * tokens * config.hidden_size
