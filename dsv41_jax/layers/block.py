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
from dsv41_jax.layers.rotary import angles, layer_frequencies
from dsv41_jax.slots import table_rows, window_positions
from pallas_kernels import hyper_connections
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_rows import PackedRows, pack_index, pack_kv, pack_window
from pallas_kernels.paging import slot
from pallas_kernels.rowwise import ROW_TILE

Rotation = tuple[jax.Array, jax.Array]  # cos and sin, float32[T, r / 2]


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
    """What the first half of a layer computes of each row, before any cache is touched.

    Attributes:
      x: bf16[T, C, D], after the Engram.
      attn_in: bf16[T, D], normalized input of attention.
      attn: mixing numbers of the attention sublayer.
      window: bf16[T, d], window latents before their norm.
      rotation: of the rows' positions.
      kv, score: float32[T, d], compressor products; None unless the layer compresses.
    """

    x: jax.Array
    attn_in: jax.Array
    attn: Mixes
    window: jax.Array
    rotation: Rotation
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
      window: packed rows of the batch, as they stand in the window cache.
      kv, index_k: packed rows of the group that each row completes, or None.
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
    window: PackedRows | None
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
    implementation: Implementation = "xla"

    def setup(self) -> None:
        """Declares the parts."""
        config, how = self.config, self.implementation
        self.attn = Attention(config, self.spec, self.partition, how)
        self.ffn = MoE(config, self.partition, how)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, how)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, how)
        self.attn_mix = mix_params(self, "hc_attn", config)
        self.ffn_mix = mix_params(self, "hc_ffn", config)
        if self.spec.engram is not None:
            self.engram = Engram(config, how)

    def __call__(self) -> None:
        """Visits every parameter, so that `init` makes them all."""
        config, spec = self.config, self.spec
        rows = jnp.zeros((ROW_TILE,), jnp.int32)
        text = jnp.zeros((ROW_TILE,), bool)
        stream = Stream(
            jnp.zeros((ROW_TILE, config.hc_mult, config.hidden_size), jnp.bfloat16),
            jnp.zeros((ROW_TILE, config.hc_mult)),
        )
        engram = None
        if spec.engram is not None:
            table = (ROW_TILE, config.engram.num_columns, config.engram.head_dim)
            engram = pack_window(jnp.zeros(table, jnp.bfloat16))
        written = self.write(stream, rows, text, engram)
        window = pack_window(written.window)
        window = self.write_window(window, rows, written, rows[0])
        kv = index_k = topk = candidates = None
        if spec.ratio:
            kv = pack_kv(jnp.zeros((1, config.head_dim), jnp.bfloat16))
            index_k = pack_index(jnp.zeros((1, config.index_head_dim), jnp.bfloat16))
            topk = jnp.zeros((ROW_TILE, config.index_topk), jnp.int32)
        if spec.owns_kv:
            group = jnp.zeros((ROW_TILE, spec.ratio, config.head_dim))
            closed = self.compress(group, group, rows)
            kv, index_k = self.write_groups(kv, index_k, rows, closed, rows[0])
        if spec.candidate_source is not None:
            positions = page_size(config) // spec.ratio
            candidates = jnp.ones((ROW_TILE, -(-positions // config.candidate_block_size)), bool)
        pages = Pages(window, kv, index_k, rows[:1][None], rows[:1][None])
        self.read(written, rows, rows, rows, text, topk, candidates, pages)

    def write(
        self,
        stream: Stream,
        positions: jax.Array,
        is_image: jax.Array,
        engram: PackedRows | None,
    ) -> Written:
        """First half: the Engram, and everything that enters the caches.

        Args:
          stream: [T, ...].
          positions: int32[T].
          is_image: bool[T].
          engram: looked-up rows [T, columns, ...], where the layer has an Engram.
        """
        x = stream.x
        if self.spec.engram is not None:
            x = self.engram(x, engram, is_image)
        attn_in = self._collapse(x, stream.pre, self.attn_norm)
        kv = score = None
        if self.spec.owns_kv:
            kv, score = self.attn.compressor.project(attn_in)
        return Written(
            x=x,
            attn_in=attn_in,
            attn=mixes(self.attn_mix, self.config, x, self.implementation),
            window=self.attn.wkv(attn_in),
            rotation=self._rotation(positions),
            kv=kv,
            score=score,
        )

    def write_window(
        self, cache: PackedRows, slots: jax.Array, written: Written, count: jax.Array
    ) -> PackedRows:
        """The layer's window rows with the first `count` rows written at int32[T] slots."""
        return self.attn.write_window(cache, slots, written.window, written.rotation, count)

    def compress(
        self, kv: jax.Array, score: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, Rotation]:
        """Latents bf16[T, d] and index keys, before norms, of groups that stand at int32[T].

        Args:
          kv, score: float32[T, m, d], the groups' products.
          positions: of each group's first token.
        """
        return *self.attn.compress(kv, score), self._rotation(positions)

    def write_groups(
        self,
        kv: PackedRows,
        index_k: PackedRows,
        slots: jax.Array,
        closed: tuple[jax.Array, jax.Array, Rotation],
        count: jax.Array,
    ) -> tuple[PackedRows, PackedRows]:
        """The KV source's rows and index keys with `compress`'s result written at the slots."""
        return self.attn.write_groups(kv, index_k, slots, *closed, count)

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
        config, spec, how = self.config, self.spec, self.implementation
        qr = self.attn.query_latent(written.attn_in)
        table = table_rows(pages.global_table, requests)
        index_score = selected = chosen = None
        if spec.owns_index:
            topk, selected, index_score = self.attn.indexer.choose(
                self.attn.indexer.queries(written.attn_in, qr, written.rotation),
                positions,
                pages.index_k,
                table,
                candidates,
                page_size(config) // spec.ratio,
            )
        if topk is not None:
            chosen = slot(table, topk, page_size(config) // spec.ratio)
        window = slot(
            table_rows(pages.window_table, requests),
            window_positions(positions, earliest, config.sliding_window),
            page_size(config),
        )
        attn_out = self.attn.attend(
            qr, written.rotation, (pages.window, window), (pages.kv, chosen)
        )
        _, post, comb = written.attn
        x = hyper_connections.expand(written.x, attn_out, post, comb, implementation=how)

        pre, post, comb = mixes(self.ffn_mix, config, x, how)
        ffn_in = self._collapse(x, written.attn[0], self.ffn_norm)
        ffn_out, experts, expert_weights = self.ffn(ffn_in, is_image, requests >= 0)
        x_out = hyper_connections.expand(x, ffn_out, post, comb, implementation=how)
        return Stream(x_out, pre), LayerTrace(
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
            window=None,
            kv=None,
            index_k=None,
        )

    def _collapse(self, x: jax.Array, pre: jax.Array, norm: RMSNorm) -> jax.Array:
        return hyper_connections.collapse_norm(
            x, pre, norm.weight, eps=norm.eps, implementation=self.implementation
        )[1]

    def _rotation(self, positions: jax.Array) -> Rotation:
        return angles(positions, layer_frequencies(self.config, self.spec.ratio))
