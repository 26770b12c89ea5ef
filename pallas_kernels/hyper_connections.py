"""Hyper-connections: the mixing numbers of a residual stream, collapse and expand.

The kernels give a row the same bits whatever stands beside it: their blocks follow from the
number of copies and the hidden size alone. They want a power of two of copies.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation, launch, resolve, whole
from pallas_kernels.hyper_connection_mixes import mixes_kernels
from pallas_kernels.rms_norm import rms_norm_reference

Mixes = tuple[jax.Array, jax.Array, jax.Array]


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
) -> Mixes:
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
    options = {"sinkhorn_iters": sinkhorn_iters, "hc_eps": hc_eps, "norm_eps": norm_eps}
    if resolve(implementation) == "xla":
        return mixes_reference(x, fn, scale, base, **options)
    return mixes_kernels(x, fn, scale, base, **options, implementation=implementation)


def mixes_reference(
    x: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> Mixes:
    """Defines `mixes`."""
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
) -> Mixes:
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
    if resolve(implementation) == "xla":
        return collapse_norm_reference(x, pre, weight, eps=eps)
    return _collapse_norm_kernel(x, pre, weight, eps=eps, implementation=implementation)


def collapse_norm_reference(
    x: jax.Array, pre: jax.Array, weight: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Defines `collapse_norm`."""
    collapsed = collapse(x, pre)
    return collapsed, rms_norm_reference(collapsed, weight, eps=eps)


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
    if resolve(implementation) == "xla":
        return expand_reference(x, y, post, comb)
    return _expand_kernel(x, y, post, comb, implementation=implementation)


def expand_reference(x: jax.Array, y: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """Defines `expand`."""
    mixed = jnp.sum(comb[..., None] * x.astype(jnp.float32)[:, :, None], axis=1)
    return (post[..., None] * y.astype(jnp.float32)[:, None] + mixed).astype(jnp.bfloat16)


def _channels(hidden: int) -> int:
    # Channels of one copy that collapse and expand take at once: a power of two.
    return math.gcd(hidden, 1024)


def _collapse_norm_kernel(
    x: jax.Array, pre: jax.Array, weight: jax.Array, *, eps: float, implementation: Implementation
) -> tuple[jax.Array, jax.Array]:
    rows, copies, hidden = x.shape
    row = pl.BlockSpec((None, hidden), lambda t: (t, 0))
    return launch(
        functools.partial(_collapse_norm_row, block=_channels(hidden), eps=eps),
        x,
        pre,
        weight,
        name="hyper_connection_collapse",
        grid=(rows,),
        in_specs=[
            pl.BlockSpec((None, copies, hidden), lambda t: (t, 0, 0)),
            pl.BlockSpec((None, copies), lambda t: (t, 0)),
            whole(weight),
        ],
        out_specs=(row, row),
        out_shape=(jax.ShapeDtypeStruct((rows, hidden), jnp.bfloat16),) * 2,
        num_warps=4,
        num_stages=1,
        implementation=implementation,
    )


def _collapse_norm_row(
    x_ref: Any,
    pre_ref: Any,
    weight_ref: Any,
    out_ref: Any,
    normed_ref: Any,
    *,
    block: int,
    eps: float,
) -> None:
    copies, hidden = x_ref.shape
    chunks = [pl.ds(start, block) for start in range(0, hidden, block)]
    pre = [pre_ref[c] for c in range(copies)]
    collapsed = []
    squares = jnp.zeros((block,), jnp.float32)
    for chunk in chunks:
        total = pre[0] * x_ref[0, chunk].astype(jnp.float32)
        for c in range(1, copies):
            total += pre[c] * x_ref[c, chunk].astype(jnp.float32)
        rounded = total.astype(jnp.bfloat16)
        out_ref[chunk] = rounded
        collapsed.append(rounded)
        squares += jnp.square(rounded.astype(jnp.float32))
    scale = jax.lax.rsqrt(jnp.sum(squares) * (1 / hidden) + eps)
    for chunk, rounded in zip(chunks, collapsed, strict=True):
        normed = rounded.astype(jnp.float32) * scale
        normed_ref[chunk] = (weight_ref[chunk].astype(jnp.float32) * normed).astype(jnp.bfloat16)


def _expand_kernel(
    x: jax.Array,
    y: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    *,
    implementation: Implementation,
) -> jax.Array:
    rows, copies, hidden = x.shape
    block = _channels(hidden)
    stream = pl.BlockSpec((None, copies, block), lambda t, i: (t, 0, i))
    return launch(
        _expand_chunk,
        x,
        y,
        post,
        comb,
        name="hyper_connection_expand",
        grid=(rows, hidden // block),
        in_specs=[
            stream,
            pl.BlockSpec((None, block), lambda t, i: (t, i)),
            pl.BlockSpec((None, copies), lambda t, i: (t, 0)),
            pl.BlockSpec((None, copies, copies), lambda t, i: (t, 0, 0)),
        ],
        out_specs=stream,
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        num_warps=4,
        num_stages=1,
        implementation=implementation,
    )


def _expand_chunk(x_ref: Any, y_ref: Any, post_ref: Any, comb_ref: Any, out_ref: Any) -> None:
    copies = x_ref.shape[0]
    y = y_ref[...].astype(jnp.float32)
    x = [x_ref[c, :].astype(jnp.float32) for c in range(copies)]
    for c in range(copies):
        mixed = comb_ref[0, c] * x[0]
        for j in range(1, copies):
            mixed += comb_ref[j, c] * x[j]
        out_ref[c, :] = (post_ref[c] * y + mixed).astype(jnp.bfloat16)


Op = Literal["mixes", "collapse_norm", "expand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A real size of one of the three operations.

    Attributes:
      name: for reports.
      op: which operation.
      rows, copies, hidden: T, C and D.
    """

    name: str
    op: Op
    rows: int
    copies: int = 4
    hidden: int = 5120


SHAPES = tuple(
    Shape(name=f"{op} {phase} {rows}", op=op, rows=rows)
    for op in ("mixes", "collapse_norm", "expand")
    for phase, sizes in (("decode", (1, 4, 16, 64)), ("prefill", (512, 2048)))
    for rows in sizes
)


def abstract_arguments(shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the operation's arrays."""
    t, c, d = shape.rows, shape.copies, shape.hidden
    outputs = (2 + c) * c
    sizes: dict[Op, tuple[tuple[Any, tuple[int, ...]], ...]] = {
        "mixes": (
            (jnp.bfloat16, (t, c, d)),
            (jnp.float32, (outputs, c * d)),
            (jnp.float32, (3,)),
            (jnp.float32, (outputs,)),
        ),
        "collapse_norm": ((jnp.bfloat16, (t, c, d)), (jnp.float32, (t, c)), (jnp.bfloat16, (d,))),
        "expand": (
            (jnp.bfloat16, (t, c, d)),
            (jnp.bfloat16, (t, d)),
            (jnp.float32, (t, c)),
            (jnp.float32, (t, c, c)),
        ),
    }
    return tuple(jax.ShapeDtypeStruct(size, dtype) for dtype, size in sizes[shape.op])


def make_arguments(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Random arrays of the sizes that a model has: fn small, the rest about one."""
    arrays = []
    for array in abstract_arguments(shape):
        spread = 0.02 if array.shape == ((2 + shape.copies) * shape.copies, *array.shape[1:]) else 1
        arrays.append(jnp.asarray(rng.normal(0, spread, array.shape), array.dtype))
    return tuple(arrays)


def run(
    shape: Shape, arguments: tuple[jax.Array, ...], *, implementation: Implementation
) -> tuple[jax.Array, ...] | jax.Array:
    """The operation of a shape, with the constants of the released model."""
    if shape.op == "mixes":
        return mixes(
            *arguments,
            sinkhorn_iters=20,
            hc_eps=1e-6,
            norm_eps=1e-20,
            implementation=implementation,
        )
    if shape.op == "collapse_norm":
        return collapse_norm(*arguments, eps=1e-20, implementation=implementation)
    return expand(*arguments, implementation=implementation)


def flops(shape: Shape) -> int:
    """Multiplications and additions; of mixes those with fn, each in three bf16 parts."""
    stream = shape.rows * shape.copies * shape.hidden
    each = {
        "mixes": 3 * 2 * (2 + shape.copies) * shape.copies,
        "collapse_norm": 2,
        "expand": 2 * (shape.copies + 1),
    }
    return stream * each[shape.op]


def bytes(shape: Shape) -> int:
    """Bytes that must move: every argument once, every result once."""
    t, c, d = shape.rows, shape.copies, shape.hidden
    results = {
        "mixes": 4 * t * c * (2 + c),
        "collapse_norm": 2 * 2 * t * d,
        "expand": 2 * t * c * d,
    }
    arguments = abstract_arguments(shape)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arguments) + results[shape.op]
