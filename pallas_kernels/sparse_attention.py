"""Attention of every row over its own list of KV rows, with a learned sink."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import numerics

KEY_BLOCK = 64  # keys per step of the running maximum; decides roundings
_MASKED = -1e30  # finite: a row without any key stays free of NaN


def sparse_attention(
    q: jax.Array, kv: jax.Array, valid: jax.Array, sink: jax.Array, *, scale: float
) -> jax.Array:
    """Attends each row to its selected keys, which are also its values.

    Shapes: T rows, H heads, K key slots, D head_dim.

    Args:
      q: bf16[T, H, D].
      kv: float32[T, K, D], values exact in bf16; zeros in unused slots.
      valid: bool[T, K], which slots are used.
      sink: float32[H], joins the denominator, unscaled, and adds no value.
      scale: factor of the logits.

    Returns:
      bf16[T, H, D]; zeros in rows without any key.
    """
    chex.assert_rank([q, kv, valid, sink], [3, 3, 2, 1])
    chex.assert_equal_shape_prefix([kv, valid], 2)
    return sparse_attention_reference(q, kv, valid, sink, scale=scale)


def sparse_attention_reference(
    q: jax.Array, kv: jax.Array, valid: jax.Array, sink: jax.Array, *, scale: float
) -> jax.Array:
    """Defines the result.

    Keys are walked in blocks of 64 slots, used or not, with a running maximum; each block's
    probabilities are rounded to bf16 against the maximum so far, the denominator is not.
    """
    rows, heads, dim = q.shape
    padding = -kv.shape[1] % KEY_BLOCK
    blocks = (kv.shape[1] + padding) // KEY_BLOCK
    kv = jnp.pad(kv, ((0, 0), (0, padding), (0, 0)))
    valid = jnp.pad(valid, ((0, 0), (0, padding)))
    kv = jnp.moveaxis(kv.reshape(rows, blocks, KEY_BLOCK, dim), 1, 0)
    valid = jnp.moveaxis(valid.reshape(rows, blocks, 1, KEY_BLOCK), 1, 0)
    query = q.astype(jnp.float32)

    def step(carry: tuple, block: tuple) -> tuple[tuple, None]:
        peak, total, acc = carry
        keys, used = block
        logits = jnp.einsum("thd,tkd->thk", query, keys) * scale
        logits = jnp.where(used, logits, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1))
        decay = jnp.exp(peak - new_peak)
        p = jnp.exp(logits - new_peak[..., None])
        total = total * decay + jnp.sum(p, axis=-1)
        rounded = numerics.round_bf16(p)
        acc = acc * decay[..., None] + jnp.einsum("thk,tkd->thd", rounded, keys)
        return (new_peak, total, acc), None

    peak = jnp.full((rows, heads), _MASKED)
    init = (peak, jnp.zeros((rows, heads)), jnp.zeros((rows, heads, dim)))
    (peak, total, acc), _ = jax.lax.scan(step, init, (kv, valid))
    total = total + jnp.exp(sink[None] - peak)
    return numerics.divide(acc, total[..., None]).astype(jnp.bfloat16)
