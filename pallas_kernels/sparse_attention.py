"""Attention of every row over its own list of KV rows, with a learned sink."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_rows import PackedRows, gather, unpack_kv, unpack_window
from pallas_kernels.rope import turn

KEY_BLOCK = 64  # keys per step of the running maximum; decides roundings
_MASKED = -1e30  # finite: a row without any key stays free of NaN


def sparse_attention(
    q: jax.Array,
    window: PackedRows,
    window_slots: jax.Array,
    chosen: PackedRows | None,
    chosen_slots: jax.Array | None,
    sink: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    scale: float,
    implementation: Implementation,
) -> jax.Array:
    """Attends each row to its keys in the caches, which are also its values, and turns back.

    Shapes: T rows, H heads, W window and K chosen slots of a row, N and M cache rows, D head_dim,
    of which the last r channels turn.

    Args:
      q: bf16[T, H, D], turned.
      window: FP8 rows, codes [N, D] and scales [N, D / 32].
      window_slots: int32[T, W], rows of `window`; -1 is unused.
      chosen: FP4 rows, codes [M, D / 2] and E4M3 scales [M, D / 16]; None in window-only layers.
      chosen_slots: int32[T, K], rows of `chosen`; -1 is unused. None where `chosen` is.
      sink: float32[H], joins the denominator, unscaled, and adds no value.
      cos, sin: float32[T, r / 2], what `q` was turned by.
      scale: factor of the logits.
      implementation: which one runs.

    Returns:
      bf16[T, H, D], rounded and then turned back; zeros in rows without any key.
    """
    chex.assert_rank([q, window_slots, sink, cos, sin], [3, 2, 1, 2, 2])
    chex.assert_equal_shape_prefix([q, window_slots, cos, sin], 1)
    keys, valid = unpack_window(gather(window, window_slots)), window_slots >= 0
    if chosen is not None:
        chex.assert_equal_shape_prefix([q, chosen_slots], 1)
        keys = jnp.concatenate([keys, unpack_kv(gather(chosen, chosen_slots))], axis=1)
        valid = jnp.concatenate([valid, chosen_slots >= 0], axis=1)
    return turn(sparse_attention_reference(q, keys, valid, sink, scale=scale), cos, -sin)


def sparse_attention_reference(
    q: jax.Array, kv: jax.Array, valid: jax.Array, sink: jax.Array, *, scale: float
) -> jax.Array:
    """Attends each row to gathered keys, which are also its values.

    Keys are walked in blocks of 64 slots, used or not, with a running maximum; each block's
    probabilities are rounded to bf16 against the maximum so far, the denominator is not.

    Args:
      q: bf16[T, H, D].
      kv: float32[T, K, D], values exact in bf16; zeros in unused slots.
      valid: bool[T, K], which slots are used.
      sink: float32[H].
      scale: factor of the logits.

    Returns:
      bf16[T, H, D]; zeros in rows without any key.
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
