"""One backbone layer: parameters and row-wise arithmetic."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.axes import WHOLE, Partition
from dsv41_jax.batch import page_size
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import LayerSpec
from dsv41_jax.layers.attention import Attention
from dsv41_jax.layers.engram import Engram
from dsv41_jax.layers.hyper_connections import Mixes, mix_params, mixes
from dsv41_jax.layers.linear import RMSNorm
from dsv41_jax.layers.moe import MoE
from dsv41_jax.slots import table_rows, window_positions
from pallas_kernels import hyper_connections
from pallas_kernels.packed_rows import (
    PackedRows,
    gather,
    pack_index,
    pack_kv,
    pack_window,
    unpack_kv,
    unpack_window,
)
from pallas_kernels.paging import slot


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """What flows from layer to layer, and from stage to stage.

    Attributes:
      x: bf16[T, C, D], the residual copies.
      pre: float32[T, C], weights that collapse the copies for the next sublayer.
    """

    x: jax.Array
    pre: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Written:
    """What the first half of a layer computes of each row, before any cache is read.

    Attributes:
      x: bf16[T, C, D], after the Engram.
      attn_in: bf16[T, D], normalized input of attention.
      attn: mixing numbers of the attention sublayer.
      window: packed window rows.
      kv, score: float32[T, d], compressor products; None unless the layer compresses.
    """

    x: jax.Array
    attn_in: jax.Array
    attn: Mixes
    window: PackedRows
    kv: jax.Array | None
    score: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerTrace:
    """Inner results of a layer, for tests and `verify`; unused ones cost nothing under jit.

    Attributes:
      attn_in, attn_out, ffn_in, ffn_out: bf16[T, D].
      engram_out: bf16[T, C, D], the stream after the Engram.
      experts: int32[T, A] and expert_weights float32[T, A].
      topk: int32[T, index_topk] the layer attends to, or None.
      index_score: float32[T, J], or None unless the layer runs an indexer.
      candidates: bool[T, blocks], or None unless the layer selects them.
      window: packed window rows of the batch.
      kv, index_k: packed rows of the group that each row would complete, or None.
    """

    attn_in: jax.Array
    attn_out: jax.Array
    ffn_in: jax.Array
    ffn_out: jax.Array
    engram_out: jax.Array
    experts: jax.Array
    expert_weights: jax.Array
    topk: jax.Array | None
    index_score: jax.Array | None
    candidates: jax.Array | None
    window: PackedRows
    kv: PackedRows | None
    index_k: PackedRows | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Caches a row reads, and the block-table rows that lead to its own.

    Attributes:
      window: this layer's window rows.
      kv, index_k: the KV source's rows, or None in window-only layers.
      window_table, global_table: int32[R, C].
    """

    window: PackedRows
    kv: PackedRows | None
    index_k: PackedRows | None
    window_table: jax.Array
    global_table: jax.Array


class Block(nn.Module):
    """Parameters and row-wise arithmetic of one layer (spec: a forward step)."""

    config: ModelConfig
    spec: LayerSpec
    partition: Partition = WHOLE

    def setup(self) -> None:
        """Declares the parts."""
        config = self.config
        self.attn = Attention(config, self.spec, self.partition)
        self.ffn = MoE(config, self.partition)
        self.attn_norm = RMSNorm(config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.rms_norm_eps)
        self.attn_mix = mix_params(self, "hc_attn", config)
        self.ffn_mix = mix_params(self, "hc_ffn", config)
        if self.spec.engram is not None:
            self.engram = Engram(config)

    def __call__(self) -> None:
        """Visits every parameter, so that `init` makes them all."""
        config, spec = self.config, self.spec
        rows = jnp.zeros((1,), jnp.int32)
        text = jnp.zeros((1,), bool)
        stream = Stream(
            jnp.zeros((1, config.hc_mult, config.hidden_size), jnp.bfloat16),
            jnp.zeros((1, config.hc_mult)),
        )
        engram = None
        if spec.engram is not None:
            table = (1, config.engram.num_columns, config.engram.head_dim)
            engram = pack_window(jnp.zeros(table, jnp.bfloat16))
        written = self.write(stream, rows, text, engram)
        kv = index_k = topk = candidates = None
        if spec.owns_kv:
            group = jnp.zeros((1, spec.ratio, config.head_dim))
            self.compress(group, group, rows)
        if spec.ratio:
            kv = pack_kv(jnp.zeros((1, config.head_dim), jnp.bfloat16))
            index_k = pack_index(jnp.zeros((1, config.index_head_dim), jnp.bfloat16))
            topk = jnp.zeros((1, config.index_topk), jnp.int32)
        if spec.candidate_source is not None:
            positions = page_size(config) // spec.ratio
            candidates = jnp.ones((1, -(-positions // config.candidate_block_size)), bool)
        pages = Pages(written.window, kv, index_k, rows[None], rows[None])
        self.read(written, rows, rows, rows, text, topk, candidates, pages)

    def write(
        self,
        stream: Stream,
        positions: jax.Array,
        is_image: jax.Array,
        engram: PackedRows | None,
    ) -> Written:
        """First half: what each row adds to the caches.

        Args:
          stream: [T, ...].
          positions: int32[T].
          is_image: bool[T].
          engram: table rows of this layer, or None where it has no Engram.
        """
        x = stream.x
        if self.spec.engram is not None:
            x = self.engram(x, engram, is_image)
        attn_in = self.attn_norm(hyper_connections.collapse(x, stream.pre))
        kv = score = None
        if self.spec.owns_kv:
            kv, score = self.attn.compressor.project(attn_in)
        return Written(
            x=x,
            attn_in=attn_in,
            attn=mixes(self.attn_mix, self.config, x),
            window=self.attn.window_rows(attn_in, positions),
            kv=kv,
            score=score,
        )

    def compress(
        self, kv: jax.Array, score: jax.Array, positions: jax.Array
    ) -> tuple[PackedRows, PackedRows]:
        """Packed KV and index keys of groups float32[T, m, d] that stand at int32[T]."""
        return self.attn.compressed_rows(kv, score, positions)

    def read(
        self,
        written: Written,
        positions: jax.Array,
        requests: jax.Array,
        earliest: jax.Array,
        is_image: jax.Array,
        topk: jax.Array | None,
        candidates: jax.Array | None,
        pages: Pages,
    ) -> tuple[Stream, LayerTrace]:
        """Second half: attention over the caches, then the experts.

        Args:
          written: the first half's result, [T, ...].
          positions, requests, is_image: as in `TokenBatch`, [T].
          earliest: int32[T], first position that a row may read in its window.
          topk: int32[T, index_topk] of the index source, where that is another layer.
          candidates: bool[T, blocks] of the candidate source, where this layer is masked.
          pages: the caches, with this step's rows written.
        """
        config, spec = self.config, self.spec
        qr = self.attn.query_latent(written.attn_in)
        index_score = selected = None
        if spec.owns_index:
            index_score, topk, selected = self._index(
                written.attn_in, qr, positions, requests, candidates, pages
            )
        keys, valid = self._keys(positions, requests, earliest, topk, pages)
        attn_out = self.attn.attend(qr, positions, keys, valid)
        x = hyper_connections.expand(written.x, attn_out, *written.attn[1:], implementation="xla")

        pre, post, comb = mixes(self.ffn_mix, config, x)
        ffn_in = self.ffn_norm(hyper_connections.collapse(x, written.attn[0]))
        ffn_out, experts, expert_weights = self.ffn(ffn_in, is_image)
        stream = Stream(hyper_connections.expand(x, ffn_out, post, comb, implementation="xla"), pre)
        return stream, LayerTrace(
            attn_in=written.attn_in,
            attn_out=attn_out,
            ffn_in=ffn_in,
            ffn_out=ffn_out,
            engram_out=written.x,
            experts=experts,
            expert_weights=expert_weights,
            topk=topk,
            index_score=index_score,
            candidates=selected,
            window=written.window,
            kv=None,
            index_k=None,
        )

    def _index(
        self,
        attn_in: jax.Array,
        qr: jax.Array,
        positions: jax.Array,
        requests: jax.Array,
        candidates: jax.Array | None,
        pages: Pages,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        indexer = self.attn.indexer
        table = table_rows(pages.global_table, requests)
        rows_per_page = page_size(self.config) // self.spec.ratio
        scores = indexer.scores(attn_in, qr, positions, pages.index_k, table, rows_per_page)
        topk, selected, scores = indexer.select(scores, candidates, positions)
        return scores, topk, selected

    def _keys(
        self,
        positions: jax.Array,
        requests: jax.Array,
        earliest: jax.Array,
        topk: jax.Array | None,
        pages: Pages,
    ) -> tuple[jax.Array, jax.Array]:
        """Keys float32[T, K, d] and bool[T, K]: window slots ascending, then compressed ones."""
        window, page = self.config.sliding_window, page_size(self.config)
        visible = window_positions(positions, earliest, window)
        table = table_rows(pages.window_table, requests)
        where = slot(table, visible, page)
        keys, valid = unpack_window(gather(pages.window, where)), where >= 0
        if topk is None:
            return keys, valid
        table = table_rows(pages.global_table, requests)
        where = slot(table, topk, page // self.spec.ratio)
        chosen = unpack_kv(gather(pages.kv, where))
        return (
            jnp.concatenate([keys, chosen], axis=1),
            jnp.concatenate([valid, where >= 0], axis=1),
        )
