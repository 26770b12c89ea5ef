"""Hyper-connections: the mixing numbers of a residual stream, collapse and expand."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation, resolve


def mixes(
    x: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The numbers that collapse and expand a stream around one sublayer, all float32.

    Shapes: T rows, C copies, D hidden.

    Args:
      x: bf16[T, C, D].
      fn: float32[(2 + C) * C, C * D].
      scale: float32[3], of pre, post and comb.
      base: float32[(2 + C) * C].
      sinkhorn_iters: normalizations of comb, the softmax included.
      hc_eps: added to pre and inside comb's normalizations.
      norm_eps: added to the mean square.
      implementation: see `dispatch.resolve`.

    Returns:
      pre float32[T, C], post float32[T, C], comb float32[T, C, C] (old copy, new copy).
    """
    chex.assert_rank([x, fn, scale, base], [3, 2, 1, 1])
    resolve(implementation)
    flat = x.astype(jnp.float32).reshape(x.shape[0], -1)
    mean_square = numerics.mean(jnp.square(flat))
    product = jnp.einsum("tk,nk->tn", flat, fn, precision=jax.lax.Precision.HIGHEST)
    m = product * numerics.rsqrt(mean_square + norm_eps)
    return split_sinkhorn(
        m, scale, base, copies=x.shape[1], sinkhorn_iters=sinkhorn_iters, hc_eps=hc_eps
    )


def split_sinkhorn(
    m: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    copies: int,
    sinkhorn_iters: int,
    hc_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits float32[T, (2 + C) * C] into pre, post and the doubly normalized comb."""
    c = copies
    base = base[None]
    pre = jax.nn.sigmoid(m[:, :c] * scale[0] + base[:, :c]) + hc_eps
    post = 2 * jax.nn.sigmoid(m[:, c : 2 * c] * scale[1] + base[:, c : 2 * c])
    comb = (m[:, 2 * c :] * scale[2] + base[:, 2 * c :]).reshape(-1, c, c)
    comb = numerics.softmax(comb, axis=-1) + hc_eps
    comb = numerics.divide(comb, jnp.sum(comb, axis=-2, keepdims=True) + hc_eps)

    def normalize(_: jax.Array, comb: jax.Array) -> jax.Array:
        comb = numerics.divide(comb, jnp.sum(comb, axis=-1, keepdims=True) + hc_eps)
        return numerics.divide(comb, jnp.sum(comb, axis=-2, keepdims=True) + hc_eps)

    return pre, post, jax.lax.fori_loop(0, sinkhorn_iters - 1, normalize, comb)


def collapse(x: jax.Array, pre: jax.Array) -> jax.Array:
    """bf16[T, D]: the copies of bf16[T, C, D] weighted by float32[T, C], rounded once."""
    chex.assert_equal_shape_prefix([x, pre], 2)
    return jnp.sum(x.astype(jnp.float32) * pre[..., None], axis=1).astype(jnp.bfloat16)


def collapse_norm(
    x: jax.Array, pre: jax.Array, weight: jax.Array, *, eps: float, implementation: Implementation
) -> tuple[jax.Array, jax.Array]:
    """The collapsed stream and its RMS norm.

    Shapes: T rows, C copies, D hidden.

    Args:
      x: bf16[T, C, D], the stream.
      pre: float32[T, C].
      weight: bf16[D].
      eps: added to the mean square.
      implementation: see `dispatch.resolve`.

    Returns:
      bf16[T, D] as `collapse` has it, and bf16[T, D] normalized.
    """
    chex.assert_rank([x, pre, weight], [3, 2, 1])
    resolve(implementation)
    collapsed = collapse(x, pre)
    wide = collapsed.astype(jnp.float32)
    normed = wide * numerics.rsqrt(numerics.mean(jnp.square(wide)) + eps)
    scale = weight.astype(jnp.float32)[None]
    return collapsed, (scale * normed).astype(jnp.bfloat16)


def expand(
    x: jax.Array,
    y: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    *,
    implementation: Implementation,
) -> jax.Array:
    """bf16[T, C, D]: adds a sublayer's result and mixes the copies, rounded once.

    Args:
      x: bf16[T, C, D], the stream.
      y: bf16[T, D], the sublayer's result.
      post: float32[T, C].
      comb: float32[T, C, C], summed over its first copy axis.
      implementation: see `dispatch.resolve`.
    """
    chex.assert_rank([x, y, post, comb], [3, 2, 2, 3])
    resolve(implementation)
    mixed = jnp.sum(comb[..., None] * x.astype(jnp.float32)[:, :, None], axis=1)
    return (post[..., None] * y.astype(jnp.float32)[:, None] + mixed).astype(jnp.bfloat16)
