"""Divisions that stay divisions, and roundings that stay roundings.

XLA rewrites `a / broadcast(b)` into `a * broadcast(1 / b)` and `1 / sqrt(x)` into an
approximate reciprocal square root. Either moves the last bit of a float32, and in this model a
moved bit ends in another FP4 code. A barrier on the divisor keeps the division. Likewise
XLA:CPU drops a pair of casts to bf16 and back around a product of bf16 values.
"""

import jax
import jax.numpy as jnp


def divide(a: jax.Array, b: jax.Array | float) -> jax.Array:
    """a / b in float32, correctly rounded; `b` is broadcast to the shape of `a`."""
    return a / jax.lax.optimization_barrier(jnp.broadcast_to(jnp.float32(b), a.shape))


def rsqrt(x: jax.Array) -> jax.Array:
    """One over the square root of float32, both correctly rounded."""
    return 1 / jax.lax.optimization_barrier(jnp.sqrt(x))


def mean(x: jax.Array) -> jax.Array:
    """Mean of float32[..., K] over its last axis, kept as an axis of size 1."""
    return divide(jnp.sum(x, axis=-1, keepdims=True), float(x.shape[-1]))


def softmax(x: jax.Array, axis: int) -> jax.Array:
    """Softmax of float32 along one axis."""
    weights = jnp.exp(x - jnp.max(x, axis=axis, keepdims=True))
    return divide(weights, jnp.sum(weights, axis=axis, keepdims=True))


def round_bf16(x: jax.Array) -> jax.Array:
    """float32 values rounded to bf16, nearest even."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
