"""Norms and linear layers; parameters are shaped [out, in] as in the checkpoint."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41_jax.axes import TENSOR
from pallas_kernels import dense_matmul, rms_norm, scaled_matmul
from pallas_kernels.dispatch import Implementation


class RMSNorm(nn.Module):
    """weight * x / rms(x) in float32, rounded once to bf16.

    Attributes:
      size: channels.
      eps: added to the mean square.
      implementation: of the operation.
    """

    size: int
    eps: float
    implementation: Implementation

    def setup(self) -> None:
        """Declares the weight, which fused operations take from here."""
        self.weight = self.param("weight", nn.initializers.ones, (self.size,), jnp.bfloat16)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes bf16[T, size]."""
        return rms_norm.rms_norm(x, self.weight, eps=self.eps, implementation=self.implementation)


class Linear(nn.Module):
    """x @ weight.T over a bf16 weight, accumulated in float32.

    Attributes:
      features: outputs held here.
      implementation: of the product.
    """

    features: int
    implementation: Implementation

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[T, features] of bf16[T, K], not rounded yet."""
        shape = (self.features, x.shape[-1])
        weight = self.param("weight", nn.initializers.zeros, shape, jnp.bfloat16)
        return dense_matmul.dense_matmul(x, weight, implementation=self.implementation)


class QuantizedLinear(nn.Module):
    """Linear over an FP8 weight with 32x32 scales; the input is quantized on the way.

    Attributes:
      features: outputs held here.
      implementation: of the product.
      axes: mesh axis that splits outputs and inputs, or None.
      devices: how many devices split the inputs; their partial results are summed.
    """

    features: int
    implementation: Implementation
    axes: tuple[str | None, str | None] = (None, None)
    devices: int = 1

    @nn.compact
    def product(self, x: jax.Array) -> jax.Array:
        """float32[T, features] of bf16[T, K]: this device's share, not rounded."""
        weight, scale = fp8_params(self, self.features, x.shape[-1], self.axes)
        return scaled_matmul.scaled_matmul(x, weight, scale, implementation=self.implementation)

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


def sum_devices(x: jax.Array, devices: int) -> jax.Array:
    """Sum of `x` over the devices of the tensor axis; `x` itself where there is one."""
    return jax.lax.psum(x, TENSOR) if devices > 1 else x
