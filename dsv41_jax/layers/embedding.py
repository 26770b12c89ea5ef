"""Token embedding and output head, split over the vocabulary where devices share a stage."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.axes import TENSOR, Partition
from dsv41_jax.config import ModelConfig
from dsv41_jax.layers.linear import sum_devices
from pallas_kernels import dense_matmul
from pallas_kernels.dispatch import Implementation


class Embedding(nn.Module):
    """bf16 rows of the vocabulary."""

    config: ModelConfig
    partition: Partition

    @nn.compact
    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """bf16[T, D] of int32[T]."""
        config, devices = self.config, self.partition.tensor
        rows = config.vocab_size // devices
        weight = self.param(
            "weight",
            nn.with_partitioning(nn.initializers.zeros, (TENSOR, None)),
            (rows, config.hidden_size),
            jnp.bfloat16,
        )
        local = token_ids
        if devices > 1:
            local = token_ids - jax.lax.axis_index(TENSOR) * rows
        here = (local >= 0) & (local < rows)
        found = jnp.where(here[:, None], weight[jnp.where(here, local, 0)], jnp.bfloat16(0))
        return sum_devices(found, devices)


class Head(nn.Module):
    """Projection to the vocabulary, in full float32."""

    config: ModelConfig
    partition: Partition
    implementation: Implementation

    @nn.compact
    def __call__(self, normed: jax.Array) -> jax.Array:
        """float32[T, V] logits of bf16[T, D]."""
        config, devices = self.config, self.partition.tensor
        weight = self.param(
            "weight",
            nn.with_partitioning(nn.initializers.zeros, (TENSOR, None)),
            (config.vocab_size // devices, config.hidden_size),
            jnp.bfloat16,
        )
        logits = dense_matmul.dense_matmul(normed, weight, implementation=self.implementation)
        if devices > 1:
            logits = jax.lax.all_gather(logits, TENSOR, axis=1, tiled=True)
        return logits
