"""Engram: hashed n-gram rows gated into the stream."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.layers.linear import QuantizedLinear
from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_rows import PackedRows, unpack_window


class Engram(nn.Module):
    """Adds a gated value per copy of the stream (spec: Engram).

    The table rows come from the host. Shapes: T rows, C copies, D hidden, G columns.
    """

    config: ModelConfig
    implementation: Implementation

    @nn.compact
    def __call__(self, x: jax.Array, rows: PackedRows, is_image: jax.Array) -> jax.Array:
        """bf16[T, C, D]: the stream with the Engram added; image tokens keep theirs.

        Args:
          x: bf16[T, C, D].
          rows: FP8 table rows, codes uint8[T, G, head_dim].
          is_image: bool[T].
        """
        copies, hidden = x.shape[1:]
        ones = nn.initializers.ones
        q_weight = self.param("q_weight", ones, (copies, hidden), jnp.bfloat16)
        k_weight = self.param("k_weight", ones, (copies, hidden), jnp.bfloat16)
        looked_up = unpack_window(rows).astype(jnp.bfloat16).reshape(x.shape[0], -1)
        wkv = QuantizedLinear((copies + 1) * hidden, self.implementation, name="wkv")
        kv = wkv(looked_up)
        kv = kv.astype(jnp.float32).reshape(-1, copies + 1, hidden)
        key, value = kv[:, :copies], kv[:, copies:]

        eps = self.config.rms_norm_eps
        stream = x.astype(jnp.float32)
        weight = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
        dot = jnp.sum(stream * weight[None] * key, axis=-1)
        dot = dot * numerics.rsqrt(numerics.mean(jnp.square(stream))[..., 0] + eps)
        dot = dot * numerics.rsqrt(numerics.mean(jnp.square(key))[..., 0] + eps) * hidden**-0.5
        magnitude = jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6))
        gate = jax.nn.sigmoid(jnp.where(jnp.signbit(dot), -magnitude, magnitude))
        gate = jnp.where(is_image[:, None], 0.0, gate)
        return (stream + gate[..., None] * value).astype(jnp.bfloat16)
