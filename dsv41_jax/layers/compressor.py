"""The compressor of a KV source: products per token, then one latent per group."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from dsv41_jax.layers.linear import Linear, RMSNorm
from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation


class Compressor(nn.Module):
    """Pools `ratio` consecutive tokens into one latent (spec: compressor).

    Shapes: T rows, m = ratio, d = head_dim.
    """

    config: ModelConfig
    ratio: int
    implementation: Implementation

    def setup(self) -> None:
        """Declares the parts."""
        size = self.config.head_dim
        self.wkv = Linear(size, self.implementation)
        if self.ratio > 1:
            self.wgate = Linear(size, self.implementation)
        self.norm = RMSNorm(size, self.config.rms_norm_eps, self.implementation)

    def project(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """KV and score of each token, float32[T, d] both; without a gate the score is 0."""
        kv = self.wkv(h)
        return kv, self.wgate(h) if self.ratio > 1 else jnp.zeros_like(kv)

    def pool(self, kv: jax.Array, score: jax.Array) -> jax.Array:
        """Latents before norm and rope, bf16[T, d], of whole groups float32[T, m, d]."""
        if self.ratio > 1:
            kv = jnp.sum(kv * numerics.softmax(score, axis=1), axis=1)
        else:
            kv = kv[:, 0]
        return kv.astype(jnp.bfloat16)
