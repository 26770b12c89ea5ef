"""Kernels of attention over packed cache rows: splits of the keys, and what joins them.

Each program attends a block of heads of one row to one split of that row's keys, which it
gathers and dequantizes; with a split for every 128 slots even a single row fills the device.
The second kernel joins the splits in their order. Which keys make a split depends on the slot
lists only, never on how many rows there are.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.dispatch import Implementation, KernelError, launch, whole
from pallas_kernels.kernel_math import decode_e2m1_pair, decode_e4m3, decode_e8m0, next_power_of_two
from pallas_kernels.packed_rows import PackedRows

_MASKED = -1e30  # finite: a split without any key stays free of NaN
_JOINED_HEADS = 4  # heads that a program of the second kernel joins
SPLIT = 128  # slots of a program of the first kernel
PARTIAL_BYTES = 48 * 2**20  # of partial sums at a time: what the second kernel finds in cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sizes of the split kernel.

    Attributes:
      heads: of a program, padded.
      keys: of a step.
      split: slots of a program.
      warps: of a program.
      stages: loads in flight.
    """

    heads: int
    keys: int
    split: int
    warps: int
    stages: int


def choose_blocks(heads: int, dim: int) -> Blocks:
    """Blocks for `heads` heads of `dim` channels.

    Raises:
      KernelError: `dim` is not a power of two of at least 32.
    """
    if dim < 32 or dim & (dim - 1):
        raise KernelError(
            f"head dimension is {dim}; the attention kernel takes powers of two from 32 up"
        )
    block = min(next_power_of_two(heads, 16), 32)
    return Blocks(heads=block, keys=64, split=SPLIT, warps=8 if dim > 256 else 4, stages=2)


def attend(
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
    """`sparse_attention.sparse_attention` by kernels; the arguments are its own.

    Rows go through in chunks, so that partial sums take at most 48 MiB.

    Raises:
      KernelError: a head dimension that is no power of two, or a cache that 32-bit offsets
        cannot address.
    """
    rows, heads, dim = q.shape
    blocks = choose_blocks(heads, dim)
    slots = (window_slots,) if chosen is None else (window_slots, chosen_slots)
    caches = (window,) if chosen is None else (window, chosen)
    splits = sum(pl.cdiv(s.shape[1], blocks.split) for s in slots)

    def run(q: jax.Array, slots: tuple[jax.Array, ...], *angles: jax.Array) -> jax.Array:
        partial = _attend_splits(q, slots, caches, splits, blocks, scale, implementation)
        return _join(*partial, sink, *angles, implementation)

    most = max(PARTIAL_BYTES // (splits * heads * dim * 4), 1)
    size = 1 << (most.bit_length() - 1)
    if rows <= size:
        return run(q, slots, cos, sin)
    padding = -rows % size
    q, *others = jax.tree.map(
        lambda a: jnp.pad(a, ((0, padding), *[(0, 0)] * (a.ndim - 1))), (q, slots, cos, sin)
    )

    def replace(index: jax.Array, out: jax.Array) -> jax.Array:
        """Puts a chunk's results in the place of its queries: the loop needs no other array."""
        first = index * size
        chunk = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, size), (out, *others))
        return jax.lax.dynamic_update_slice_in_dim(out, run(*chunk), first, 0)

    return jax.lax.fori_loop(0, q.shape[0] // size, replace, q)[:rows]


def _attend_splits(
    q: jax.Array,
    slots: tuple[jax.Array, ...],
    caches: tuple[PackedRows, ...],
    splits: int,
    blocks: Blocks,
    scale: float,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Partial sums float32[T, S, H, D], maxima and denominators float32[T, S, H]."""
    rows, heads, dim = q.shape
    flat = [array for cache in caches for array in (cache.codes, cache.scales)]
    return launch(
        functools.partial(_split_kernel, blocks=blocks, scale=scale),
        q,
        *slots,
        *flat,
        name="sparse_attention",
        grid=(splits, pl.cdiv(heads, blocks.heads), rows),
        in_specs=[
            pl.BlockSpec((None, heads, dim), lambda s, h, t: (t, 0, 0)),
            *[pl.BlockSpec((None, a.shape[1]), lambda s, h, t: (t, 0)) for a in slots],
            *[whole(array) for array in flat],
        ],
        out_specs=[
            pl.BlockSpec((None, None, heads, dim), lambda s, h, t: (t, s, 0, 0)),
            pl.BlockSpec((None, None, heads), lambda s, h, t: (t, s, 0)),
            pl.BlockSpec((None, None, heads), lambda s, h, t: (t, s, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, splits, heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, splits, heads), jnp.float32),
            jax.ShapeDtypeStruct((rows, splits, heads), jnp.float32),
        ],
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        implementation=implementation,
    )


def _split_kernel(q_ref: Any, *refs: Any, blocks: Blocks, scale: float) -> None:
    """One split of one row's keys: window splits first, then those of chosen rows."""
    *refs, acc_ref, peak_ref, total_ref = refs
    kinds = len(refs) // 3
    split, head = pl.program_id(0), pl.program_id(1)

    def walk(kind: int, first: jax.Array) -> None:
        codes, scales = refs[kinds + 2 * kind : kinds + 2 * kind + 2]
        load = functools.partial((_window_keys, _chosen_keys)[kind], codes, scales)
        heads = head * blocks.heads + jnp.arange(blocks.heads)
        inside, columns = heads < q_ref.shape[0], jnp.arange(q_ref.shape[1])
        q = triton.load(q_ref.at[heads[:, None], columns[None, :]], mask=inside[:, None], other=0)
        peak, total, acc = _walk(q, refs[kind], load, first, blocks, scale)
        triton.store(acc_ref.at[heads[:, None], columns[None, :]], acc, mask=inside[:, None])
        triton.store(peak_ref.at[heads], peak, mask=inside)
        triton.store(total_ref.at[heads], total, mask=inside)

    before = 0
    for kind in range(kinds):
        count = pl.cdiv(refs[kind].shape[0], blocks.split)
        here = (split >= before) & (split < before + count)
        pl.when(here)(functools.partial(walk, kind, (split - before) * blocks.split))
        before += count


def _walk(
    q: jax.Array,
    slots_ref: Any,
    load: Callable[[jax.Array, jax.Array], jax.Array],
    first: jax.Array,
    blocks: Blocks,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum, denominator and sum over the slots from `first` on."""
    heads, dim = q.shape

    def step(index: jax.Array, carry: tuple) -> tuple:
        peak, total, acc = carry
        where = first + index * blocks.keys + jnp.arange(blocks.keys)
        slots = triton.load(slots_ref.at[where], mask=where < slots_ref.shape[0], other=-1)
        used = slots >= 0
        keys = load(jnp.where(used, slots, 0), used)
        logits = _product(q, keys, 1) * np.float32(scale)
        logits = jnp.where(used[None, :], logits, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        decay = jnp.exp(peak - new_peak)
        p = jnp.where(used[None, :], jnp.exp(logits - new_peak[:, None]), 0.0)
        total = total * decay + jnp.sum(p, axis=1)
        acc = acc * decay[:, None] + _product(p.astype(jnp.bfloat16), keys, 0)
        return new_peak, total, acc

    init = (
        jnp.full((heads,), _MASKED, jnp.float32),
        jnp.zeros((heads,), jnp.float32),
        jnp.zeros((heads, dim), jnp.float32),
    )
    slots = min(blocks.split, slots_ref.shape[0])
    return jax.lax.fori_loop(0, pl.cdiv(slots, blocks.keys), step, init)


def _product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """float32 product of bf16 blocks over the last axis of `a` and `axis` of `b`."""
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def _load_rows(ref: Any, rows: jax.Array, used: jax.Array) -> jax.Array:
    """uint8[keys, columns] of cache rows; zeros, unread, where unused."""
    columns = jnp.arange(ref.shape[1])
    return triton.load(ref.at[rows[:, None], columns[None, :]], mask=used[:, None], other=0)


def _window_keys(codes_ref: Any, scales_ref: Any, rows: jax.Array, used: jax.Array) -> jax.Array:
    """bf16[keys, D] of FP8 rows."""
    values = decode_e4m3(_load_rows(codes_ref, rows, used))
    return _scaled(values, decode_e8m0(_load_rows(scales_ref, rows, used)))


def _chosen_keys(codes_ref: Any, scales_ref: Any, rows: jax.Array, used: jax.Array) -> jax.Array:
    """bf16[keys, D] of FP4 rows."""
    low, high = decode_e2m1_pair(_load_rows(codes_ref, rows, used))
    scales = decode_e4m3(_load_rows(scales_ref, rows, used))
    values = jnp.stack([_scaled(low, scales), _scaled(high, scales)], axis=-1)
    return values.reshape(low.shape[0], -1)


def _scaled(values: jax.Array, scales: jax.Array) -> jax.Array:
    """bf16 products, exact, of float32[keys, n] and float32[keys, groups]."""
    groups = values.reshape(*scales.shape, -1)
    return (groups * scales[:, :, None]).astype(jnp.bfloat16).reshape(values.shape)


def _join(
    acc: jax.Array,
    peak: jax.Array,
    total: jax.Array,
    sink: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    implementation: Implementation,
) -> jax.Array:
    """bf16[T, H, D]: splits in order, sink, division, rounding, conjugate rope, rounding."""
    rows, splits, heads, dim = acc.shape
    half = cos.shape[1]
    return launch(
        _join_kernel,
        acc,
        peak,
        total,
        sink,
        cos,
        sin,
        name="sparse_attention_join",
        grid=(pl.cdiv(heads, _JOINED_HEADS), rows),
        in_specs=[
            pl.BlockSpec((None, splits, heads, dim), lambda h, t: (t, 0, 0, 0)),
            pl.BlockSpec((None, splits, heads), lambda h, t: (t, 0, 0)),
            pl.BlockSpec((None, splits, heads), lambda h, t: (t, 0, 0)),
            whole(sink),
            pl.BlockSpec((None, half), lambda h, t: (t, 0)),
            pl.BlockSpec((None, half), lambda h, t: (t, 0)),
        ],
        out_specs=pl.BlockSpec((None, heads, dim), lambda h, t: (t, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, heads, dim), jnp.bfloat16),
        num_warps=4,
        num_stages=1,
        implementation=implementation,
    )


def _join_kernel(
    acc_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    sink_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    out_ref: Any,
) -> None:
    splits, count, dim = acc_ref.shape
    heads = pl.program_id(0) * _JOINED_HEADS + jnp.arange(_JOINED_HEADS)
    inside = heads < count
    pairs = jnp.arange(dim // 2)

    def load(ref: Any, split: int) -> jax.Array:
        return triton.load(ref.at[jnp.full_like(heads, split), heads], mask=inside, other=0)

    peaks = [load(peak_ref, split) for split in range(splits)]
    peak = functools.reduce(jnp.maximum, peaks)
    total = jnp.zeros((_JOINED_HEADS,), jnp.float32)
    even = odd = jnp.zeros((_JOINED_HEADS, dim // 2), jnp.float32)
    for split in range(splits):
        decay = jnp.exp(peaks[split] - peak)
        total += load(total_ref, split) * decay
        parts = [
            triton.load(
                acc_ref.at[jnp.full((1, 1), split), heads[:, None], (2 * pairs + parity)[None, :]],
                mask=inside[:, None],
                other=0,
            )
            for parity in range(2)
        ]
        even += parts[0] * decay[:, None]
        odd += parts[1] * decay[:, None]
    total += jnp.exp(triton.load(sink_ref.at[heads], mask=inside, other=0) - peak)
    even, odd = (
        (part / total[:, None]).astype(jnp.bfloat16).astype(jnp.float32) for part in (even, odd)
    )

    kept = dim // 2 - cos_ref.shape[0]
    turns = pairs >= kept
    angle = jnp.where(turns, pairs - kept, 0)
    cos = triton.load(cos_ref.at[angle], mask=turns, other=1)[None, :]
    sin = triton.load(sin_ref.at[angle], mask=turns, other=0)[None, :]
    turned = (
        jnp.where(turns[None, :], even * cos + odd * sin, even),
        jnp.where(turns[None, :], odd * cos - even * sin, odd),
    )
    values = jnp.stack([part.astype(jnp.bfloat16) for part in turned], axis=-1)
    columns = jnp.arange(dim)
    triton.store(
        out_ref.at[heads[:, None], columns[None, :]],
        values.reshape(_JOINED_HEADS, dim),
        mask=inside[:, None],
    )
