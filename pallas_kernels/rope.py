"""Rotation of interleaved channel pairs."""

import jax
import jax.numpy as jnp


def turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the last r channels of each head as r / 2 interleaved pairs.

    Args:
      x: bf16[T, D] or bf16[T, H, D].
      cos, sin: float32[T, r / 2].

    Returns:
      Like `x`, rounded once.
    """
    rope_dim = 2 * cos.shape[-1]
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    kept, tail = x[..., :-rope_dim], x[..., -rope_dim:]
    pairs = tail.astype(jnp.float32).reshape(*tail.shape[:-1], -1, 2)
    real, imag = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([real * cos - imag * sin, real * sin + imag * cos], axis=-1)
    return jnp.concatenate([kept, turned.reshape(tail.shape).astype(x.dtype)], axis=-1)
