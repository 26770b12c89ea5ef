"""The flat token batch of one step: everything a stage needs besides parameters and state."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from pallas_kernels.packed_rows import PackedRows


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
      late_rows: int32[T], the rows that layers from the last KV source on compute, in order;
        -1 in padding, which comes last. All real rows, unless a prompt's earlier ones are left
        out (bounded replay).
      num_late_rows: int32[], how many late rows are real; every logit row is one of them.
      window_from: int32[R], earliest position in a window that a row of a request may read.
      late_window_from: int32[R], likewise in layers from the last KV source on.
      engram: rows of the tables, by layer: uint8[T, columns, ...].
      embedding: bf16[T, D] rows of the tokens where the embedding is on the host, or None.
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
    late_rows: jax.Array
    num_late_rows: jax.Array
    window_from: jax.Array
    late_window_from: jax.Array
    engram: dict[int, PackedRows]
    embedding: jax.Array | None = None

    def late(self) -> "TokenBatch":
        """The same step as the layers from the last KV source on see it: late rows alone."""
        taken, real = jnp.maximum(self.late_rows, 0), self.late_rows >= 0
        rows = self.late_rows.shape[0]
        order = jnp.arange(rows, dtype=jnp.int32)
        place = jnp.zeros_like(order).at[jnp.where(real, taken, rows)].set(order, mode="drop")
        wanted = self.logit_rows
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[taken],
            positions=self.positions[taken],
            requests=jnp.where(real, self.requests[taken], -1),
            is_image=self.is_image[taken],
            num_tokens=self.num_late_rows,
            logit_rows=jnp.where(wanted >= 0, place[jnp.maximum(wanted, 0)], -1),
            window_from=self.late_window_from,
            engram=jax.tree.map(lambda a: a[taken], self.engram),
            embedding=None,
        )
