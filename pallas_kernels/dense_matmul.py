"""Linear layers over bf16 weights, accumulated in float32."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.row_matmul import Format, row_matmul


def dense_matmul(x: jax.Array, weight: jax.Array, *, implementation: Implementation) -> jax.Array:
    """x @ weight.T: exact products of bf16 values, summed in float32.

    Shapes: M rows, K inputs, N outputs.

    Args:
      x: bf16[M, K].
      weight: bf16[N, K].
      implementation: see `dispatch.resolve`.

    Returns:
      float32[M, N], not rounded yet.
    """
    chex.assert_rank([x, weight], 2)
    chex.assert_equal(x.shape[1], weight.shape[1])
    if resolve(implementation) == "xla":
        return dense_matmul_reference(x, weight)
    return row_matmul(
        x,
        weight,
        name="dense_matmul",
        format=Format(
            load=lambda *_: None,
            decode=lambda block, _: block,
            rows=lambda rows: rows,
        ),
        implementation=implementation,
    )


def dense_matmul_reference(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Defines the result, in full float32 precision."""
    return jnp.einsum(
        "mk,nk->mn",
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
