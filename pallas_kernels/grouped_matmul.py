"""Routed experts over packed FP4 weights."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import formats, numerics
from pallas_kernels.scaled_matmul import quantized, scaled_matmul_reference


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """float32 clamped SwiGLU of bf16-rounded projections.

    Args:
      gate: float32[M, F].
      up: float32[M, F].
      limit: upper bound of `gate`, and bound of `up` on both sides.
    """
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def expert_mlp(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    w1: tuple[jax.Array, jax.Array],
    w2: tuple[jax.Array, jax.Array],
    w3: tuple[jax.Array, jax.Array],
    *,
    limit: float,
    partial: bool = False,
) -> jax.Array:
    """Sum over each row's experts of w2(swiglu(w1(x), w3(x)) * weight).

    Shapes: M rows, A experts of a row, E experts held here, D hidden, F intermediate.

    Args:
      x: bf16[M, D].
      experts: int32[M, A], which experts; an id outside 0..E-1 contributes nothing.
      weights: float32[M, A], routing weights.
      w1, w3: codes uint8[E, F, D / 2] and E8M0 scales uint8[E, F, D / 32].
      w2: codes uint8[E, D, F / 2] and E8M0 scales uint8[E, D, F / 32].
      limit: clamp of the SwiGLU.
      partial: whether F is a slice, so that a result may be rounded only after a sum
        over devices.

    Returns:
      float32[M, D], experts added in ascending order.
    """
    chex.assert_rank([x, experts, weights, *w1, *w2, *w3], [2, 2, 2, 3, 3, 3, 3, 3, 3])
    chex.assert_equal_shape([experts, weights])
    return expert_mlp_reference(x, experts, weights, w1, w2, w3, limit=limit, partial=partial)


def expert_mlp_reference(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    w1: tuple[jax.Array, jax.Array],
    w2: tuple[jax.Array, jax.Array],
    w3: tuple[jax.Array, jax.Array],
    *,
    limit: float,
    partial: bool,
) -> jax.Array:
    """Defines the result; an expert that no row chose is skipped."""
    inputs = quantized(x)

    def matmul(rows: jax.Array, packed: tuple[jax.Array, jax.Array], e: jax.Array) -> jax.Array:
        codes, scales = (jax.lax.dynamic_index_in_dim(a, e, keepdims=False) for a in packed)
        return scaled_matmul_reference(rows, formats.dequantize_fp4(codes, scales))

    def add_expert(e: jax.Array, total: jax.Array) -> jax.Array:
        chosen = experts == e
        weight = jnp.sum(jnp.where(chosen, weights, 0.0), axis=-1, keepdims=True)

        def add(total: jax.Array) -> jax.Array:
            gate = numerics.round_bf16(matmul(inputs, w1, e))
            up = numerics.round_bf16(matmul(inputs, w3, e))
            hidden = (swiglu(gate, up, limit) * weight).astype(jnp.bfloat16)
            out = matmul(quantized(hidden), w2, e)
            out = out if partial else numerics.round_bf16(out)
            return total + jnp.where(jnp.any(chosen, axis=-1, keepdims=True), out, 0.0)

        return jax.lax.cond(jnp.any(chosen), add, lambda total: total, total)

    total = jnp.zeros((x.shape[0], w2[0].shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, w1[0].shape[0], add_expert, total)
