"""Norms and linear layers; parameters are shaped [out, in] as in the checkpoint."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.axes import TENSOR
from pallas_kernels import numerics, scaled_matmul


class RMSNorm(nn.Module):
    """weight * x / rms(x) in float32, back to the input's dtype.

    Attributes:
      eps: added to the mean square.
    """

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes the last axis of bf16[..., D]."""
        weight = self.param("weight", nn.initializers.ones, x.shape[-1:], jnp.bfloat16)
        wide = x.astype(jnp.float32)
        normed = wide * numerics.rsqrt(numerics.mean(jnp.square(wide)) + self.eps)
        scale = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
        return (scale * normed).astype(x.dtype)


class Linear(nn.Module):
    """x @ weight.T over a bf16 weight, accumulated in float32.

    Attributes:
      features: outputs held here.
      axes: mesh axis that splits outputs and inputs, or None.
    """

    features: int
    axes: tuple[str | None, str | None] = (None, None)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[T, features] of bf16[T, K], not rounded yet."""
        weight = self.param(
            "weight",
            nn.with_partitioning(nn.initializers.zeros, self.axes),
            (self.features, x.shape[-1]),
            jnp.bfloat16,
        )
        return matmul(x, weight)


class QuantizedLinear(nn.Module):
    """Linear over an FP8 weight with 32x32 scales; the input is quantized on the way.

    Attributes:
      features: outputs held here.
      axes: mesh axis that splits outputs and inputs, or None.
      devices: how many devices split the inputs; their partial results are summed.
    """

    features: int
    axes: tuple[str | None, str | None] = (None, None)
    devices: int = 1

    @nn.compact
    def product(self, x: jax.Array) -> jax.Array:
        """float32[T, features] of bf16[T, K]: this device's share, not rounded."""
        weight, scale = fp8_params(self, self.features, x.shape[-1], self.axes)
        return scaled_matmul.scaled_matmul(x, weight, scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        """bf16[T, features] of bf16[T, K]."""
        return sum_devices(self.product(x), self.devices).astype(jnp.bfloat16)


def fp8_params(
    module: nn.Module, features: int, inputs: int, axes: tuple[str | None, str | None]
) -> tuple[jax.Array, jax.Array]:
    """Declares `weight` e4m3[features, inputs] and `scale` uint8, one per 32x32 block."""
    init = nn.with_partitioning(nn.initializers.zeros, axes)
    weight = module.param("weight", init, (features, inputs), jnp.float8_e4m3fn)
    blocks = (-(-features // 32), -(-inputs // 32))
    return weight, module.param("scale", init, blocks, jnp.uint8)


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """float32[..., N] of x[..., K] @ weight[N, K].T in full float32 precision.

    On bf16 arguments the products are exact, so this is a bf16 matmul that accumulates in
    float32.
    """
    return jnp.einsum(
        "...k,nk->...n",
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def sum_devices(x: jax.Array, devices: int) -> jax.Array:
    """Sum of `x` over the devices of the tensor axis; `x` itself where there is one."""
    return jax.lax.psum(x, TENSOR) if devices > 1 else x
