"""Attention over a sliding window and chosen compressed rows, one latent for all heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.axes import TENSOR, Partition
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import LayerSpec
from dsv41_jax.layers.compressor import Compressor
from dsv41_jax.layers.indexer import Indexer
from dsv41_jax.layers.linear import QuantizedLinear, RMSNorm, fp8_params
from pallas_kernels import kv_write, scaled_matmul, sparse_attention
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.rope import turn


class GroupedOutput(nn.Module):
    """First half of the output projection: one bf16 matrix per group of heads.

    Stored as FP8 and used dequantized; its input is not quantized (spec: numbers).
    """

    groups: int
    features: int
    implementation: Implementation

    @nn.compact
    def __call__(self, o: jax.Array) -> jax.Array:
        """bf16[T, groups * features] of bf16[T, groups * K]."""
        inputs = o.shape[1] // self.groups
        weight, scale = fp8_params(self, self.groups * self.features, inputs, (TENSOR, None))
        y = scaled_matmul.grouped_output(
            o, weight, scale, groups=self.groups, implementation=self.implementation
        )
        return y.astype(jnp.bfloat16)


class Attention(nn.Module):
    """CSA2 attention (spec: attention), split into what is written and what is read.

    Shapes: T rows, H heads held here, d = head_dim, r = rope channels, D hidden.
    """

    config: ModelConfig
    spec: LayerSpec
    partition: Partition
    implementation: Implementation

    def setup(self) -> None:
        """Declares the parts."""
        config, tensor, how = self.config, self.partition.tensor, self.implementation
        self.heads = config.num_attention_heads // tensor
        self.wq_a = QuantizedLinear(config.q_lora_rank, how)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, how)
        self.wq_b = QuantizedLinear(self.heads * config.head_dim, how, (TENSOR, None))
        self.wkv = QuantizedLinear(config.head_dim, how)
        self.kv_norm = RMSNorm(config.head_dim, config.rms_norm_eps, how)
        self.wo_a = GroupedOutput(config.o_groups // tensor, config.o_lora_rank, how)
        self.wo_b = QuantizedLinear(config.hidden_size, how, (None, TENSOR), tensor)
        self.attn_sink = self.param(
            "attn_sink",
            nn.with_partitioning(nn.initializers.zeros, (TENSOR,)),
            (self.heads,),
            jnp.float32,
        )
        if self.spec.owns_kv:
            self.compressor = Compressor(config, self.spec.ratio, how)
        if self.spec.owns_index:
            self.indexer = Indexer(config, self.spec, how)

    def write_window(
        self,
        cache: PackedRows,
        slots: jax.Array,
        latents: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        count: jax.Array,
    ) -> PackedRows:
        """Window rows with bf16[T, d] latents, before their norm, written at int32[T] slots."""
        return self._write(cache, slots, latents, self.kv_norm, rotation, count, "window")

    def compress(self, kv: jax.Array, score: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Latents bf16[T, d] of groups float32[T, m, d] and their index keys, before norms.

        The latent before rope feeds the index key; both stand at the group's first token.
        """
        latents = self.compressor.pool(kv, score)
        return latents, self.indexer.project(self.compressor.norm(latents))

    def write_groups(
        self,
        kv: PackedRows,
        index_k: PackedRows,
        slots: jax.Array,
        latents: jax.Array,
        keys: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        count: jax.Array,
    ) -> tuple[PackedRows, PackedRows]:
        """Compressed rows and index keys with the results of `compress` written."""
        compressor, indexer = self.compressor, self.indexer
        return (
            self._write(kv, slots, latents, compressor.norm, rotation, count, "kv"),
            self._write(index_k, slots, keys, indexer.k_norm, rotation, count, "index_k"),
        )

    def _write(
        self,
        cache: PackedRows,
        slots: jax.Array,
        x: jax.Array,
        norm: RMSNorm,
        rotation: tuple[jax.Array, jax.Array],
        count: jax.Array,
        row_format: kv_write.RowFormat,
    ) -> PackedRows:
        return kv_write.write_rows(
            cache,
            slots,
            x,
            norm.weight,
            *rotation,
            row_format=row_format,
            eps=norm.eps,
            count=count,
            implementation=self.implementation,
        )

    def query_latent(self, h: jax.Array) -> jax.Array:
        """bf16[T, q_lora_rank], shared by attention and indexer."""
        return self.q_norm(self.wq_a(h))

    def attend(
        self,
        qr: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        window: tuple[PackedRows, jax.Array],
        chosen: tuple[PackedRows | None, jax.Array | None],
    ) -> jax.Array:
        """Attention over cached rows, projected back to bf16[T, D].

        Args:
          qr: bf16[T, q_lora_rank].
          rotation: cos and sin, float32[T, r / 2].
          window: window rows, and int32[T, W] slots of each row's window, ascending, -1 last.
          chosen: compressed rows and int32[T, K] slots, likewise; None in window-only layers.
        """
        config = self.config
        q = self.wq_b(qr).reshape(-1, self.heads, config.head_dim)
        o = sparse_attention.sparse_attention(
            turn(q, *rotation),
            *window,
            *chosen,
            self.attn_sink,
            *rotation,
            scale=config.head_dim**-0.5,
            implementation=self.implementation,
        )
        return self.wo_b(self.wo_a(o.reshape(o.shape[0], -1)))
