"""Root-mean-square norm of rows."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation, resolve


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, implementation: Implementation
) -> jax.Array:
    """weight * x / rms(x) in float32, rounded once.

    Shapes: M rows, D channels.

    Args:
      x: bf16[M, D].
      weight: bf16[D].
      eps: added to the mean square.
      implementation: see `dispatch.resolve`.

    Returns:
      bf16[M, D].
    """
    chex.assert_rank([x, weight], [2, 1])
    chex.assert_equal(x.shape[1], weight.shape[0])
    resolve(implementation)
    return rms_norm_reference(x, weight, eps=eps)


def rms_norm_reference(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Defines the result."""
    wide = x.astype(jnp.float32)
    normed = wide * numerics.rsqrt(numerics.mean(jnp.square(wide)) + eps)
    return (weight.astype(jnp.float32)[None] * normed).astype(x.dtype)
