"""The indexer: keys of a KV source, queries and scores of every index source."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import LayerSpec
from dsv41_jax.layers.linear import Linear, QuantizedLinear, RMSNorm
from dsv41_jax.layers.rotary import layer_frequencies, rotate
from pallas_kernels import index_topk
from pallas_kernels.packed_rows import PackedRows, gather, pack_index, unpack_index
from pallas_kernels.paging import slot


class Indexer(nn.Module):
    """Scores compressed positions for a query (spec: indexer).

    Shapes: T rows, J compressed positions a request can hold, d = head_dim.
    """

    config: ModelConfig
    spec: LayerSpec

    def setup(self) -> None:
        """Declares the parts."""
        config = self.config
        self.wq_b = QuantizedLinear(config.index_n_heads * config.index_head_dim)
        self.weights_proj = Linear(config.index_n_heads)
        if self.spec.owns_kv:
            self.wk = Linear(config.index_head_dim)
            self.k_norm = RMSNorm(config.rms_norm_eps)
        self.freqs = layer_frequencies(config, self.spec.ratio)

    def keys(self, latents: jax.Array, positions: jax.Array) -> PackedRows:
        """Packed index keys of bf16[T, d] latents that stand at int32[T] positions."""
        key = self.k_norm(self.wk(latents).astype(jnp.bfloat16))
        return pack_index(rotate(key, positions, self.freqs))

    def scores(
        self,
        h: jax.Array,
        qr: jax.Array,
        positions: jax.Array,
        cache: PackedRows,
        pages: jax.Array,
        rows_per_page: int,
    ) -> jax.Array:
        """float32[T, J], -inf where a compressed position is not visible yet.

        Keys are read in fixed chunks, as many as the furthest row of the tile needs.

        Args:
          h: bf16[T, D], the sublayer's input.
          qr: bf16[T, q_lora_rank].
          positions: int32[T].
          cache: index keys of the KV source.
          pages: int32[T, C], block-table rows.
          rows_per_page: compressed rows on one page.
        """
        config, ratio = self.config, self.spec.ratio
        q = self.wq_b(qr).reshape(-1, config.index_n_heads, config.index_head_dim)
        q = unpack_index(pack_index(rotate(q, positions, self.freqs)))
        factor = np.float32(config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        weights = self.weights_proj(h).astype(jnp.bfloat16)
        weights = (weights.astype(jnp.float32) * factor).astype(jnp.bfloat16)

        capacity = pages.shape[1] * rows_per_page
        chunk = index_topk.KEY_CHUNK
        visible = jnp.where(pages[:, 0] >= 0, (positions + 1) // ratio, 0)

        def score_chunk(index: jax.Array, scores: jax.Array) -> jax.Array:
            row = index * chunk + jnp.arange(chunk, dtype=jnp.int32)[None]
            usable = (row < visible[:, None]) & (row < capacity)
            where = slot(pages, jnp.where(usable, row, -1), rows_per_page)
            keys = unpack_index(gather(cache, where))
            part = index_topk.index_scores(q, weights, keys)
            part = jnp.where(where >= 0, part, -jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(scores, part, index * chunk, 1)

        chunks = -(-capacity // chunk)
        empty = jnp.full((h.shape[0], chunks * chunk), -jnp.inf)
        needed = jnp.minimum((jnp.max(visible) + chunk - 1) // chunk, chunks)
        return jax.lax.fori_loop(0, needed, score_chunk, empty)[:, :capacity]

    def select(
        self, scores: jax.Array, candidates: jax.Array | None, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Top-k set and candidate blocks of scored rows.

        Args:
          scores: float32[T, J].
          candidates: bool[T, ceil(J / block)] of the candidate source, where this layer has one.
          positions: int32[T].

        Returns:
          topk: int32[T, index_topk], ascending, -1 unused and last.
          candidates: bool[T, ceil(J / block)] if this layer selects them, else None.
          scores: float32[T, J], masked by the candidates given.
        """
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
            )
        topk = index_topk.topk_positions(scores, k=config.index_topk)
        return topk, selected, scores
