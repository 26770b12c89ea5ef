"""Writes of quantized rows into the caches."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import dispatch, formats, kernel_math
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.packed_rows import PackedRows, pack_index, pack_kv, pack_window, scatter
from pallas_kernels.rms_norm import rms_norm_reference
from pallas_kernels.rope import turn
from pallas_kernels.rowwise import map_rows

RowFormat = Literal["window", "kv", "index_k"]
_PACK: dict[RowFormat, Callable[[jax.Array], PackedRows]] = {
    "window": pack_window,
    "kv": pack_kv,
    "index_k": pack_index,
}


def write_rows(
    cache: PackedRows,
    slots: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    row_format: RowFormat,
    eps: float,
    count: jax.Array,
    implementation: Implementation,
) -> PackedRows:
    """Normalizes rows, turns them, quantizes them and writes them into a cache.

    Shapes: N cache rows, T rows, D channels (a multiple of 32), of which the last r turn.

    Args:
      cache: [N, ...] rows of `row_format`; overwritten in place where it may be.
      slots: int32[T], distinct cache rows; -1 is not written, as in every row past `count`.
      x: bf16[T, D].
      weight: bf16[D], of the RMSNorm.
      cos, sin: float32[T, r / 2].
      row_format: "window" FP8 with E8M0 scales, "kv" FP4 with E4M3 scales, "index_k" FP4 with
        E8M0 scales.
      eps: added to the mean square.
      count: int32[], rows that are real; they come first.
      implementation: which one runs.

    Returns:
      The cache with the rows written.
    """
    chex.assert_rank([slots, x, weight, cos, sin], [1, 2, 1, 2, 2])
    chex.assert_equal_shape([cos, sin])
    if resolve(implementation) == "xla":
        return write_rows_reference(
            cache, slots, x, weight, cos, sin, row_format=row_format, eps=eps, count=count
        )
    return _launch(cache, slots, x, weight, cos, sin, row_format, eps, implementation)


def write_rows_reference(
    cache: PackedRows,
    slots: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    row_format: RowFormat,
    eps: float,
    count: jax.Array,
) -> PackedRows:
    """Defines the result."""

    def pack(rows: tuple[jax.Array, jax.Array, jax.Array]) -> PackedRows:
        x, cos, sin = rows
        return _PACK[row_format](turn(rms_norm_reference(x, weight, eps=eps), cos, sin))

    return scatter(cache, slots, map_rows(pack, (x, cos, sin), count, implementation="xla"))


def _launch(
    cache: PackedRows,
    slots: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    row_format: RowFormat,
    eps: float,
    implementation: Implementation,
) -> PackedRows:
    rows, dim = x.shape
    caches = (cache.codes, cache.scales)
    angles = pl.BlockSpec((None, cos.shape[1]), lambda t: (t, 0))
    written = dispatch.launch(
        functools.partial(_kernel, row_format=row_format, eps=eps),
        *caches,
        slots,
        x,
        weight,
        cos,
        sin,
        name=f"write_{row_format}",
        grid=(rows,),
        in_specs=[
            *map(dispatch.whole, caches),
            pl.BlockSpec((1,), lambda t: (t,)),
            pl.BlockSpec((None, dim), lambda t: (t, 0)),
            dispatch.whole(weight),
            angles,
            angles,
        ],
        out_specs=tuple(map(dispatch.whole, caches)),
        out_shape=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in caches),
        num_warps=4,
        num_stages=1,
        implementation=implementation,
        input_output_aliases={0: 0, 1: 1},
    )
    return PackedRows(*written)


def _kernel(
    _codes: jax.Ref,
    _scales: jax.Ref,
    slots_ref: jax.Ref,
    x_ref: jax.Ref,
    weight_ref: jax.Ref,
    cos_ref: jax.Ref,
    sin_ref: jax.Ref,
    codes_ref: jax.Ref,
    scales_ref: jax.Ref,
    *,
    row_format: RowFormat,
    eps: float,
) -> None:
    # One program per row. Channels come in pairs, even and odd apart: a pair turns together,
    # and shares a byte of FP4 codes.
    slot = slots_ref[0]

    @pl.when(slot >= 0)
    def _() -> None:
        dim, turning = x_ref.shape[0], cos_ref.shape[0]
        pair = jnp.arange(kernel_math.next_power_of_two(dim // 2, formats.FP4_BLOCK // 2))
        held = pair < dim // 2

        def channels(ref: jax.Ref) -> tuple[jax.Array, jax.Array]:
            even, odd = (
                triton.load(ref.at[jnp.where(held, 2 * pair + i, 0)], mask=held, other=0)
                for i in (0, 1)
            )
            return even.astype(jnp.float32), odd.astype(jnp.float32)

        real, imag = _normalized(channels(x_ref), channels(weight_ref), dim, eps)
        angle = pair - (dim // 2 - turning)
        turns = held & (angle >= 0)
        angle = jnp.where(turns, angle, 0)
        cos = triton.load(cos_ref.at[angle], mask=turns, other=0.0)
        sin = triton.load(sin_ref.at[angle], mask=turns, other=0.0)
        even = jnp.where(turns, kernel_math.round_bf16(real * cos - imag * sin), real)
        odd = jnp.where(turns, kernel_math.round_bf16(real * sin + imag * cos), imag)

        codes, scales = _QUANTIZE[row_format](even, odd)
        row = jnp.full(pair.shape, slot)
        if len(codes) == 2:
            for i, half in enumerate(codes):
                triton.store(codes_ref.at[row, 2 * pair + i], half, mask=held)
        else:
            triton.store(codes_ref.at[row, pair], codes[0], mask=held)
        group = jnp.arange(scales.shape[0])
        row = jnp.full(group.shape, slot)
        triton.store(scales_ref.at[row, group], scales, mask=group < scales_ref.shape[1])


Pair = tuple[jax.Array, jax.Array]


def _normalized(x: Pair, weight: Pair, dim: int, eps: float) -> Pair:
    """Even and odd channels after RMSNorm, bf16 values."""
    square = jnp.sum(x[0] * x[0] + x[1] * x[1]) / np.float32(dim)
    factor = 1 / jnp.sqrt(square + np.float32(eps))
    even, odd = (kernel_math.round_bf16(w * (v * factor)) for w, v in zip(weight, x, strict=True))
    return even, odd


def _grouped(even: jax.Array, odd: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Channels as [groups, size / 2], and the largest magnitude of each group."""
    even, odd = even.reshape(-1, size // 2), odd.reshape(-1, size // 2)
    return even, odd, jnp.max(jnp.maximum(jnp.abs(even), jnp.abs(odd)), axis=1)


def _quantize_window(even: jax.Array, odd: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    even, odd, amax = _grouped(even, odd, formats.FP8_BLOCK)
    scales = formats.fp8_scales(amax)
    inverse = formats.inverse_power(scales)
    return tuple(formats.encode_e4m3(x * inverse).reshape(-1) for x in (even, odd)), scales


def _quantize_index(even: jax.Array, odd: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    even, odd, amax = _grouped(even, odd, formats.FP4_BLOCK)
    scales = formats.fp4_scales(amax)
    inverse = formats.inverse_power(scales)
    low, high = formats.e2m1_codes(even * inverse), formats.e2m1_codes(odd * inverse)
    return ((low | (high << 4)).reshape(-1),), scales


def _quantize_kv(even: jax.Array, odd: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    even, odd, amax = _grouped(even, odd, formats.KV_BLOCK)
    scales = formats.encode_e4m3(kernel_math.round_bits(formats.kv_sixths(amax), 8))
    scale = formats.decode_e4m3(scales)[:, None]
    low, high = formats.e2m1_codes(even, scale), formats.e2m1_codes(odd, scale)
    return ((low | (high << 4)).reshape(-1),), scales


_QUANTIZE = {"window": _quantize_window, "kv": _quantize_kv, "index_k": _quantize_index}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A real size of the operation.

    Attributes:
      name: for reports.
      row_format: of the cache.
      rows: T.
      cached: N.
      turning: r.
    """

    name: str
    row_format: RowFormat
    rows: int
    cached: int = 131072
    turning: int = 64

    @property
    def dim(self) -> int:
        """D."""
        return 128 if self.row_format == "index_k" else 512


SHAPES = tuple(
    Shape(name=f"{row_format} {phase} {rows}", row_format=row_format, rows=rows)
    for row_format in _PACK
    for phase, sizes in (("decode", (1, 4, 16, 64)), ("prefill", (512, 2048)))
    for rows in sizes
)


def abstract_arguments(shape: Shape) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments cache, slots, x, weight, cos, sin."""
    row = jax.ShapeDtypeStruct((shape.cached, shape.dim), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((shape.rows, shape.turning // 2), jnp.float32)
    return (
        jax.eval_shape(_PACK[shape.row_format], row),
        jax.ShapeDtypeStruct((shape.rows,), jnp.int32),
        jax.ShapeDtypeStruct((shape.rows, shape.dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.dim,), jnp.bfloat16),
        angles,
        angles,
    )


def make_arguments(shape: Shape, rng: np.random.Generator) -> tuple[Any, ...]:
    """Random rows for scattered slots of a cache full of random bytes."""
    cache, slots, x, weight, cos, _ = abstract_arguments(shape)
    angles = rng.uniform(-np.pi, np.pi, cos.shape)
    return (
        jax.tree.map(lambda a: jnp.asarray(rng.integers(0, 256, a.shape, np.uint8)), cache),
        jnp.asarray(rng.permutation(shape.cached)[: slots.shape[0]], jnp.int32),
        jnp.asarray(rng.standard_normal(x.shape), jnp.bfloat16),
        jnp.asarray(rng.standard_normal(weight.shape), jnp.bfloat16),
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )


def run(shape: Shape, arguments: tuple[Any, ...], *, implementation: Implementation) -> PackedRows:
    """The operation of a shape; donate the cache."""
    return write_rows(
        *arguments,
        row_format=shape.row_format,
        eps=1e-20,
        count=jnp.int32(shape.rows),
        implementation=implementation,
    )


def flops(shape: Shape) -> int:
    """Multiplications and additions of norm and rope."""
    return shape.rows * (5 * shape.dim + 3 * shape.turning)


def bytes(shape: Shape) -> int:
    """Bytes that must move: the arguments but the cache once, the rows written once."""
    cache, *others = abstract_arguments(shape)
    written = shape.rows * sum(array.shape[1] for array in jax.tree.leaves(cache))
    return written + sum(math.prod(array.shape) * array.dtype.itemsize for array in others)
