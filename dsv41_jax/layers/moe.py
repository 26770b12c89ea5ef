"""Mixture of experts: router, routed FP4 experts, shared FP8 expert."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.axes import EXPERT_AXES, TENSOR, Partition
from dsv41_jax.config import ModelConfig
from dsv41_jax.layers.linear import QuantizedLinear, sum_devices
from pallas_kernels import dense_matmul, grouped_matmul, numerics
from pallas_kernels.dispatch import Implementation


class Gate(nn.Module):
    """Picks experts by square-root-softplus affinity; float32 throughout (spec: MoE).

    The correction bias decides which experts are picked, never their weight.
    """

    config: ModelConfig
    implementation: Implementation

    @nn.compact
    def __call__(self, x: jax.Array, is_image: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Routes bf16[T, D]; bool[T] says which rows use the image bias.

        Returns:
          experts: int32[T, A], in descending biased affinity, ties to the lower id.
          weights: float32[T, A], summing to the routed scaling factor.
        """
        config = self.config
        zeros, count = nn.initializers.zeros, config.n_routed_experts
        weight = self.param("weight", zeros, (count, x.shape[-1]), jnp.bfloat16)
        bias = self.param("bias", zeros, (count,), jnp.float32)
        bias_vl = self.param("bias_vl", zeros, (count,), jnp.float32)
        logits = dense_matmul.dense_matmul(x, weight, implementation=self.implementation)
        return route(logits, bias, bias_vl, is_image, config=config)


def route(
    logits: jax.Array,
    bias: jax.Array,
    bias_vl: jax.Array,
    is_image: jax.Array,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Experts int32[T, A] and weights float32[T, A] of router logits float32[T, E]."""
    affinity = jnp.sqrt(jax.nn.softplus(logits / config.gate_temp))
    biased = affinity + jnp.where(is_image[:, None], bias_vl[None], bias[None])
    _, experts = jax.lax.top_k(biased, config.num_experts_per_tok)
    weights = jnp.take_along_axis(affinity, experts, axis=-1)
    if config.num_experts_per_tok > 1:
        weights = numerics.divide(weights, jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, weights * config.routed_scaling_factor


class PackedExperts(nn.Module):
    """One projection of all experts held here, FP4 codes with E8M0 scales."""

    experts: int
    features: int
    inputs: int
    axes: tuple[str | tuple[str, ...] | None, ...]

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        """uint8[E, features, inputs / 2] and uint8[E, features, inputs / 32]."""
        init = nn.with_partitioning(nn.initializers.zeros, self.axes)
        shape = (self.experts, self.features)
        weight = self.param("weight", init, (*shape, self.inputs // 2), jnp.uint8)
        return weight, self.param("scale", init, (*shape, self.inputs // 32), jnp.uint8)


class Experts(nn.Module):
    """The routed experts, split by expert or along their intermediate channels."""

    config: ModelConfig
    partition: Partition
    implementation: Implementation

    @nn.compact
    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """float32[T, D]: this device's share of the experts' sum (see `expert_mlp`)."""
        config, partition = self.config, self.partition
        by_expert = partition.expert > 1
        split = 1 if by_expert else partition.tensor
        count = -(-config.n_routed_experts // partition.expert)
        inner = config.moe_intermediate_size // split
        first = EXPERT_AXES if by_expert else None
        across = None if by_expert else TENSOR
        hidden = config.hidden_size
        w1 = PackedExperts(count, inner, hidden, (first, across, None), name="w1")()
        w2 = PackedExperts(count, hidden, inner, (first, None, across), name="w2")()
        w3 = PackedExperts(count, inner, hidden, (first, across, None), name="w3")()
        if by_expert:
            experts = experts - jax.lax.axis_index(EXPERT_AXES) * count
        return grouped_matmul.expert_mlp(
            x,
            experts,
            weights,
            w1,
            w2,
            w3,
            limit=config.swiglu_limit,
            partial=split > 1,
            implementation=self.implementation,
        )


class SharedExpert(nn.Module):
    """The expert every token visits; same clamps, no routing weight."""

    config: ModelConfig
    partition: Partition
    implementation: Implementation

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[T, D] of bf16[T, D]: this device's share, not rounded."""
        config, tensor, how = self.config, self.partition.tensor, self.implementation
        inner = config.n_shared_experts * config.moe_intermediate_size // tensor
        gate = QuantizedLinear(inner, how, (TENSOR, None), name="w1")(x).astype(jnp.float32)
        up = QuantizedLinear(inner, how, (TENSOR, None), name="w3")(x).astype(jnp.float32)
        hidden = grouped_matmul.swiglu(gate, up, config.swiglu_limit).astype(jnp.bfloat16)
        return QuantizedLinear(config.hidden_size, how, (None, TENSOR), name="w2").product(hidden)


class MoE(nn.Module):
    """Routed experts plus the shared one, summed in float32 and rounded once."""

    config: ModelConfig
    partition: Partition
    implementation: Implementation

    def setup(self) -> None:
        """Declares the parts."""
        config, partition, how = self.config, self.partition, self.implementation
        self.gate = Gate(config, how)
        self.experts = Experts(config, partition, how)
        self.shared_experts = SharedExpert(config, partition, how)

    def __call__(
        self, x: jax.Array, is_image: jax.Array, is_real: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """bf16[T, D] of bf16[T, D], with the experts and weights that were chosen.

        Padding rows, where bool[T] `is_real` is False, visit no routed expert.
        """
        experts, weights = self.gate(x, is_image)
        visited = jnp.where(is_real[:, None], experts, -1)
        routed, shared = self.experts(x, visited, weights), self.shared_experts(x)
        return sum_experts(routed, shared, self.partition), experts, weights


def sum_experts(routed: jax.Array, shared: jax.Array, partition: Partition) -> jax.Array:
    """bf16[T, D]: routed plus shared experts over all devices, in one sum.

    The shared expert is rounded before it is added, as on one device. Where experts are split
    along their channels no rounding of theirs is left to keep, and half the bytes are sent.

    Args:
      routed: float32[T, D], this device's share of the routed experts.
      shared: float32[T, D], its share of the shared expert.
      partition: the devices.
    """
    if partition.tensor > 1 and partition.expert == 1:
        return sum_devices(routed + shared, partition.tensor).astype(jnp.bfloat16)
    if partition.tensor > 1:
        both = sum_devices(jnp.concatenate([routed, shared], axis=-1), partition.tensor)
        routed, shared = jnp.split(both, 2, axis=-1)
    return (routed + shared.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16)
