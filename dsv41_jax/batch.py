"""The flat token batch of one step: everything a stage needs besides parameters and state."""

import dataclasses
import math

import jax

from dsv41_jax.config import ModelConfig
from dsv41_jax.quantization.rows import PackedRows

ROW_TILE = 16  # rows mapped together on CPU; every T and L is a multiple of it


def page_size(config: ModelConfig) -> int:
    """Tokens per cache page, in every group: at least 16, and whole groups of each ratio."""
    groups = math.lcm(*(ratio for ratio in config.compress_ratios if ratio))
    return groups * -(-16 // groups)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Prefill and decode rows of one step in one array of T tokens.

    Rows of one request are consecutive and their positions ascend by one. The real rows come
    first; padding rows have request -1. R request rows, C block-table columns, L logit rows.

    Attributes:
      token_ids: int32[T].
      positions: int32[T], absolute.
      requests: int32[T], row of the block tables; -1 in padding.
      is_image: bool[T].
      num_tokens: int32[], how many rows are real.
      window_pages: int32[R, C], page of the window pool that holds positions
        [c * page_size, (c + 1) * page_size) of a request; -1 where none is kept.
      global_pages: int32[R, C], likewise for compressed KV and index keys.
      slots: int32[R], row of per-request state (open groups); -1 in padding.
      logit_rows: int32[L], rows of the batch whose logits are wanted; -1 in padding.
      num_logits: int32[], how many logit rows are real; they come first.
      engram: rows looked up by the host, by layer: uint8[T, columns, ...].
    """

    token_ids: jax.Array
    positions: jax.Array
    requests: jax.Array
    is_image: jax.Array
    num_tokens: jax.Array
    window_pages: jax.Array
    global_pages: jax.Array
    slots: jax.Array
    logit_rows: jax.Array
    num_logits: jax.Array
    engram: dict[int, PackedRows]
