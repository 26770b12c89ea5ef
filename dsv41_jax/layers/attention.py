"""Attention over a sliding window and chosen compressed rows, one latent for all heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.axes import TENSOR, Partition
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import LayerSpec
from dsv41_jax.layers.compressor import Compressor
from dsv41_jax.layers.indexer import Indexer
from dsv41_jax.layers.linear import QuantizedLinear, RMSNorm, fp8_params, matmul
from dsv41_jax.layers.rotary import layer_frequencies, rotate
from pallas_kernels import formats, sparse_attention
from pallas_kernels.packed_rows import PackedRows, pack_kv, pack_window


class GroupedOutput(nn.Module):
    """First half of the output projection: one bf16 matrix per group of heads.

    Stored as FP8 and used dequantized; its input is not quantized (spec: numbers).
    """

    groups: int
    features: int

    @nn.compact
    def __call__(self, o: jax.Array) -> jax.Array:
        """bf16[T, groups * features] of bf16[T, groups, K]."""
        weight, scale = fp8_params(self, self.groups * self.features, o.shape[-1], (TENSOR, None))
        matrix = formats.dequantize_weight(weight, scale)
        matrix = matrix.reshape(self.groups, self.features, o.shape[-1])
        y = jnp.stack([matmul(o[:, g], matrix[g]) for g in range(self.groups)], axis=1)
        return y.astype(jnp.bfloat16).reshape(o.shape[0], -1)


class Attention(nn.Module):
    """CSA2 attention (spec: attention), split into what is written and what is read.

    Shapes: T rows, H heads held here, d = head_dim, D hidden.
    """

    config: ModelConfig
    spec: LayerSpec
    partition: Partition

    def setup(self) -> None:
        """Declares the parts."""
        config, tensor = self.config, self.partition.tensor
        self.heads = config.num_attention_heads // tensor
        self.groups = config.o_groups // tensor
        self.wq_a = QuantizedLinear(config.q_lora_rank)
        self.q_norm = RMSNorm(config.rms_norm_eps)
        self.wq_b = QuantizedLinear(self.heads * config.head_dim, (TENSOR, None))
        self.wkv = QuantizedLinear(config.head_dim)
        self.kv_norm = RMSNorm(config.rms_norm_eps)
        self.wo_a = GroupedOutput(self.groups, config.o_lora_rank)
        self.wo_b = QuantizedLinear(config.hidden_size, (None, TENSOR), tensor)
        self.attn_sink = self.param(
            "attn_sink",
            nn.with_partitioning(nn.initializers.zeros, (TENSOR,)),
            (self.heads,),
            jnp.float32,
        )
        if self.spec.owns_kv:
            self.compressor = Compressor(config, self.spec.ratio)
        if self.spec.owns_index:
            self.indexer = Indexer(config, self.spec)
        self.freqs = layer_frequencies(config, self.spec.ratio)

    def window_rows(self, h: jax.Array, positions: jax.Array) -> PackedRows:
        """Packed window KV of bf16[T, D] at int32[T] positions."""
        return pack_window(rotate(self.kv_norm(self.wkv(h)), positions, self.freqs))

    def compressed_rows(
        self, kv: jax.Array, score: jax.Array, positions: jax.Array
    ) -> tuple[PackedRows, PackedRows]:
        """Packed KV and index keys of whole groups float32[T, m, d].

        The latent before rope feeds the index key; both stand at the group's first token.
        """
        latents = self.compressor.pool(kv, score)
        rows = pack_kv(rotate(latents, positions, self.freqs))
        return rows, self.indexer.keys(latents, positions)

    def query_latent(self, h: jax.Array) -> jax.Array:
        """bf16[T, q_lora_rank], shared by attention and indexer."""
        return self.q_norm(self.wq_a(h))

    def attend(
        self, qr: jax.Array, positions: jax.Array, keys: jax.Array, valid: jax.Array
    ) -> jax.Array:
        """Attention over gathered keys, projected back to bf16[T, D].

        Args:
          qr: bf16[T, q_lora_rank].
          positions: int32[T].
          keys: float32[T, K, d], window slots first, ascending, then compressed ones.
          valid: bool[T, K].
        """
        config = self.config
        q = self.wq_b(qr).reshape(-1, self.heads, config.head_dim)
        o = sparse_attention.sparse_attention_reference(
            rotate(q, positions, self.freqs),
            keys,
            valid,
            self.attn_sink,
            scale=config.head_dim**-0.5,
        )
        o = rotate(o, positions, self.freqs, inverse=True)
        return self.wo_b(self.wo_a(o.reshape(o.shape[0], self.groups, -1)))
