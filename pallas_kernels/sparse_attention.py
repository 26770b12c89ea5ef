"""Attention of every row over its own list of KV rows, with a learned sink."""

import dataclasses
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention_kernels, formats, numerics
from pallas_kernels.dispatch import Implementation, resolve
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

    Raises:
      ValueError: an unknown implementation; a kernel's head dimension that is no power of two of
        at least 32, or a cache that its offsets cannot reach.
    """
    chex.assert_rank([q, window_slots, sink, cos, sin], [3, 2, 1, 2, 2])
    chex.assert_equal_shape_prefix([q, window_slots, cos, sin], 1)
    if chosen is not None:
        chex.assert_equal_shape_prefix([q, chosen_slots], 1)
    if resolve(implementation) != "xla":
        return attention_kernels.attend(
            q,
            window,
            window_slots,
            chosen,
            chosen_slots,
            sink,
            cos,
            sin,
            scale=scale,
            implementation=implementation,
        )
    keys, valid = unpack_window(gather(window, window_slots)), window_slots >= 0
    if chosen is not None:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A named call of `sparse_attention`.

    Attributes:
      name: phase, rows, partition and, without chosen rows, "window".
      rows: T.
      heads: H on one device.
      chosen: K; 0 in window-only layers.
      window: W.
      dim: D.
      rope: r.
      window_rows, chosen_rows: N and M.
    """

    name: str
    rows: int
    heads: int
    chosen: int = 512
    window: int = 128
    dim: int = 512
    rope: int = 64
    window_rows: int = 2**14
    chosen_rows: int = 2**18


SHAPES = tuple(
    Shape(
        name=f"{phase} {rows} tp{parts}{'' if chosen else ' window'}",
        rows=rows,
        heads=64 // parts,
        chosen=chosen,
    )
    for parts, kinds in ((1, (512,)), (2, (512, 0)), (4, (512,)), (8, (512,)))
    for chosen in kinds
    for phase, sizes in (("decode", (1, 4, 16, 64)), ("prefill", (512, 2048)))
    for rows in sizes
)


def abstract_arguments(shape: Shape) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments from q to sin."""

    def packed(rows: int, per_byte: int, group: int) -> PackedRows:
        return PackedRows(
            jax.ShapeDtypeStruct((rows, shape.dim // per_byte), jnp.uint8),
            jax.ShapeDtypeStruct((rows, shape.dim // group), jnp.uint8),
        )

    def slots(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((shape.rows, count), jnp.int32)

    rotation = jax.ShapeDtypeStruct((shape.rows, shape.rope // 2), jnp.float32)
    return (
        jax.ShapeDtypeStruct((shape.rows, shape.heads, shape.dim), jnp.bfloat16),
        packed(shape.window_rows, 1, formats.FP8_BLOCK),
        slots(shape.window),
        packed(shape.chosen_rows, 2, formats.KV_BLOCK) if shape.chosen else None,
        slots(shape.chosen) if shape.chosen else None,
        jax.ShapeDtypeStruct((shape.heads,), jnp.float32),
        rotation,
        rotation,
    )


def make_arguments(shape: Shape, rng: np.random.Generator) -> tuple[Any, ...]:
    """Random arguments: keys and queries of about one, every slot used."""
    q, window, window_slots, chosen, chosen_slots, sink, cos, _ = abstract_arguments(shape)

    def draw(like: jax.ShapeDtypeStruct, low: int, high: int) -> jax.Array:
        return jnp.asarray(rng.integers(low, high, like.shape, like.dtype))

    def fp8(like: jax.ShapeDtypeStruct) -> jax.Array:
        return draw(like, 0x20, 0x40) | (draw(like, 0, 2) << 7)

    angle = rng.uniform(0, 2 * math.pi, cos.shape)
    return (
        jnp.asarray(rng.normal(size=q.shape), q.dtype),
        PackedRows(fp8(window.codes), draw(window.scales, 126, 129)),
        draw(window_slots, 0, shape.window_rows),
        chosen and PackedRows(draw(chosen.codes, 0, 256), draw(chosen.scales, 0x20, 0x30)),
        chosen_slots and draw(chosen_slots, 0, shape.chosen_rows),
        jnp.asarray(rng.normal(size=sink.shape), sink.dtype),
        jnp.asarray(np.cos(angle), cos.dtype),
        jnp.asarray(np.sin(angle), cos.dtype),
    )


def run(shape: Shape, arguments: tuple[Any, ...], *, implementation: Implementation) -> jax.Array:
    """The operation on a shape's arguments."""
    return sparse_attention(*arguments, scale=shape.dim**-0.5, implementation=implementation)


def flops(shape: Shape) -> int:
    """Multiplications and additions of both products."""
    return 4 * shape.rows * shape.heads * (shape.window + shape.chosen) * shape.dim


def bytes(shape: Shape) -> int:
    """Bytes that must move: queries, results, slots, and every key of a row once.

    Rows share keys at most as far as the caches are smaller than what the rows read.
    """
    window = min(shape.rows * shape.window, shape.window_rows)
    chosen = min(shape.rows * shape.chosen, shape.chosen_rows)
    keys = window * (shape.dim + shape.dim // formats.FP8_BLOCK)
    keys += chosen * (shape.dim // 2 + shape.dim // formats.KV_BLOCK)
    slots = 4 * shape.rows * (shape.window + shape.chosen)
    return keys + slots + 4 * shape.rows * (shape.heads * shape.dim + shape.rope)
