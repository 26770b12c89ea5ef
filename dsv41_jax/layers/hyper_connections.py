"""The mixing parameters of one sublayer."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.config import ModelConfig
from pallas_kernels import hyper_connections
from pallas_kernels.dispatch import Implementation

MixParams = tuple[jax.Array, jax.Array, jax.Array]
Mixes = tuple[jax.Array, jax.Array, jax.Array]


def mix_params(module: nn.Module, prefix: str, config: ModelConfig) -> MixParams:
    """Declares `{prefix}_fn`, `{prefix}_scale` and `{prefix}_base` on `module`."""
    copies = config.hc_mult
    outputs = (2 + copies) * copies
    zeros = nn.initializers.zeros
    return (
        module.param(f"{prefix}_fn", zeros, (outputs, copies * config.hidden_size), jnp.float32),
        module.param(f"{prefix}_scale", zeros, (3,), jnp.float32),
        module.param(f"{prefix}_base", zeros, (outputs,), jnp.float32),
    )


def mixes(
    params: MixParams, config: ModelConfig, x: jax.Array, implementation: Implementation
) -> Mixes:
    """pre float32[T, C], post float32[T, C] and comb float32[T, C, C] of bf16[T, C, D]."""
    return hyper_connections.mixes(
        x,
        *params,
        sinkhorn_iters=config.hc_sinkhorn_iters,
        hc_eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        implementation=implementation,
    )
