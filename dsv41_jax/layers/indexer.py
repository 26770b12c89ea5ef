"""The indexer: keys of a KV source, queries and scores of every index source."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import LayerSpec
from dsv41_jax.layers.linear import Linear, QuantizedLinear, RMSNorm
from pallas_kernels import index_topk
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_rows import PackedRows, pack_index, unpack_index
from pallas_kernels.rope import turn
from pallas_kernels.rowwise import map_chunks

SCORES_AT_ONCE = 2**23  # float32 scores held at a time while rows are chosen, if 16 rows allow


class Indexer(nn.Module):
    """Scores compressed positions for a query (spec: indexer).

    Shapes: T rows, J compressed positions a request can hold, d = head_dim.
    """

    config: ModelConfig
    spec: LayerSpec
    implementation: Implementation

    def setup(self) -> None:
        """Declares the parts."""
        config, how = self.config, self.implementation
        self.wq_b = QuantizedLinear(config.index_n_heads * config.index_head_dim, how)
        self.weights_proj = Linear(config.index_n_heads, how)
        if self.spec.owns_kv:
            self.wk = Linear(config.index_head_dim, how)
            self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps, how)

    def project(self, latents: jax.Array) -> jax.Array:
        """Index keys before norm and rope, bf16[T, index_head_dim], of bf16[T, d] latents."""
        return self.wk(latents).astype(jnp.bfloat16)

    def queries(
        self, h: jax.Array, qr: jax.Array, rotation: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Queries float32[T, heads, index_head_dim], dequantized, and weights bf16[T, heads].

        Args:
          h: bf16[T, D], the sublayer's input.
          qr: bf16[T, q_lora_rank].
          rotation: cos and sin, float32[T, r / 2].
        """
        config = self.config
        q = self.wq_b(qr).reshape(-1, config.index_n_heads, config.index_head_dim)
        q = unpack_index(pack_index(turn(q, *rotation)))
        factor = np.float32(config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        weights = self.weights_proj(h).astype(jnp.bfloat16)
        return q, (weights.astype(jnp.float32) * factor).astype(jnp.bfloat16)

    def choose(
        self,
        queries: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        keys: PackedRows,
        table: jax.Array,
        candidates: jax.Array | None,
        rows_per_page: int,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Top-k set and candidate blocks of each row; rows are walked a few at a time.

        Args:
          queries: see `queries`.
          positions: int32[T].
          keys: index keys of the KV source.
          table: int32[T, C], block-table rows.
          candidates: bool[T, ceil(J / block)] of the candidate source, where this layer has one.
          rows_per_page: compressed rows on one page.

        Returns:
          topk: int32[T, index_topk], ascending, -1 unused and last.
          candidates: bool[T, ceil(J / block)] if this layer selects them, else None.
          scores: float32[T, J], -inf where a position is not visible or not a candidate.
        """

        def rows(part: tuple) -> tuple[jax.Array, jax.Array | None, jax.Array]:
            (q, weights), positions, table, candidates = part
            visible = jnp.where(table[:, 0] >= 0, (positions + 1) // self.spec.ratio, 0)
            scores = index_topk.paged_index_scores(
                q,
                weights,
                keys,
                table,
                visible,
                rows_per_page=rows_per_page,
                implementation=self.implementation,
            )
            return self.select(scores, candidates, positions)

        most = SCORES_AT_ONCE // (table.shape[1] * rows_per_page)
        return map_chunks(rows, (queries, positions, table, candidates), most)

    def select(
        self, scores: jax.Array, candidates: jax.Array | None, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """What `choose` returns, of float32[T, J] scores that know no candidates yet."""
        config = self.config
        if candidates is not None:
            mask = jnp.repeat(candidates, config.candidate_block_size, axis=1)
            scores = jnp.where(mask[:, : scores.shape[1]], scores, -jnp.inf)
        selected = None
        if self.spec.publishes_candidates:
            selected = index_topk.select_candidate_blocks(
                scores,
                (positions + 1) // self.spec.ratio - 1,
                block_size=config.candidate_block_size,
                topk_blocks=config.candidate_topk_blocks,
                implementation=self.implementation,
            )
        topk = index_topk.topk_positions(
            scores, k=config.index_topk, implementation=self.implementation
        )
        return topk, selected, scores
