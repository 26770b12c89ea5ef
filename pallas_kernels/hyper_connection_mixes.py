"""Kernels of the mixing numbers: a thin float32 matmul, then Sinkhorn's iterations."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.dispatch import Implementation, KernelError, launch, whole
from pallas_kernels.kernel_math import next_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Block sizes of the product.

    Attributes:
      rows: rows of a program.
      split: channels of a program, of all copies.
      outputs: columns of its result: the product, then the sum of squares, then unused ones.
    """

    rows: int
    split: int
    outputs: int


def _blocks(channels: int, outputs: int) -> _Blocks:
    # At the released size 80 splits of 256 occupy most of a GPU for a single row.
    return _Blocks(
        rows=64,
        split=math.gcd(channels, 256),
        outputs=next_power_of_two(outputs + 1, 16),
    )


def mixes_kernels(
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
    """`hyper_connections.mixes`; the products of fn are those of float32.

    Partial sums over a fixed number of splits of the channels, then one program a row.

    Raises:
      KernelError: the number of copies is no power of two.
    """
    rows, copies, _ = x.shape
    if copies & (copies - 1):
        raise KernelError(f"the stream has {copies} copies; the kernels take a power of two")
    outputs, channels = fn.shape
    blocks = _blocks(channels, outputs)
    splits = channels // blocks.split
    partial = launch(
        functools.partial(_partial_product, blocks=blocks, rows=rows, outputs=outputs),
        x.reshape(rows, channels),
        fn,
        name="hyper_connection_products",
        grid=(pl.cdiv(rows, blocks.rows), splits),
        in_specs=[
            pl.BlockSpec((blocks.rows, blocks.split), lambda r, s: (r, s)),
            pl.BlockSpec((outputs, blocks.split), lambda r, s: (0, s)),
        ],
        out_specs=pl.BlockSpec((None, blocks.rows, blocks.outputs), lambda r, s: (s, r, 0)),
        out_shape=jax.ShapeDtypeStruct((splits, rows, blocks.outputs), jnp.float32),
        num_warps=4,
        num_stages=1,
        implementation=implementation,
    )
    kernel = functools.partial(
        _split_sums,
        copies=copies,
        channels=channels,
        sinkhorn_iters=sinkhorn_iters,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
    )
    return launch(
        kernel,
        partial,
        scale,
        base,
        name="hyper_connection_mixes",
        grid=(rows,),
        in_specs=[
            pl.BlockSpec((splits, None, blocks.outputs), lambda t: (0, t, 0)),
            whole(scale),
            whole(base),
        ],
        out_specs=(
            pl.BlockSpec((None, copies), lambda t: (t, 0)),
            pl.BlockSpec((None, copies), lambda t: (t, 0)),
            pl.BlockSpec((None, copies, copies), lambda t: (t, 0, 0)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((rows, copies), jnp.float32),
            jax.ShapeDtypeStruct((rows, copies), jnp.float32),
            jax.ShapeDtypeStruct((rows, copies, copies), jnp.float32),
        ),
        num_warps=4,
        num_stages=1,
        implementation=implementation,
    )


def _partial_product(
    x_ref: Any, fn_ref: Any, out_ref: Any, *, blocks: _Blocks, rows: int, outputs: int
) -> None:
    # Products of x and fn over one split of the channels, and the sum of x squared beside them.
    channel = jnp.arange(blocks.split)[None, :]
    row = jnp.arange(blocks.rows)[:, None]
    column = jnp.arange(blocks.outputs)
    real = pl.program_id(0) * blocks.rows + row < rows
    x = triton.load(x_ref.at[row, channel], mask=real, other=0)
    fn = triton.load(fn_ref.at[column[:, None], channel], mask=column[:, None] < outputs, other=0)
    high, middle, low = bf16_parts(fn)
    product = triton.dot(x, high, trans_b=True)
    product += triton.dot(x, middle, trans_b=True) + triton.dot(x, low, trans_b=True)
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1, keepdims=True)
    result = jnp.where(column[None, :] == outputs, squares, product)
    triton.store(out_ref.at[row, column[None, :]], result, mask=real)


def bf16_parts(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three bf16 arrays that add up to float32 `x`: 24 significant bits cut into 8, 8 and 8.

    Exact unless the lowest bits are below the smallest float32.
    """
    parts = []
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts[0], parts[1], parts[2]


def _split_sums(
    partial_ref: Any,
    scale_ref: Any,
    base_ref: Any,
    pre_ref: Any,
    post_ref: Any,
    comb_ref: Any,
    *,
    copies: int,
    channels: int,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> None:
    # One row: adds the splits in an order that their number fixes, then `split_sinkhorn`.
    splits = partial_ref.shape[0]
    split = jnp.arange(next_power_of_two(splits))

    def total(column: jax.Array) -> jax.Array:
        index = split.reshape(-1, *(1,) * column.ndim)
        at = partial_ref.at[index, column[None]]
        return jnp.sum(triton.load(at, mask=index < splits, other=0), axis=0)

    one = jnp.arange(copies)
    pair = 2 * copies + one[:, None] * copies + one[None, :]
    # Every column adds up to the same value.
    square = total(jnp.full((copies,), (2 + copies) * copies))
    rms = jnp.max(jax.lax.rsqrt(square * (1 / channels) + norm_eps))

    def affine(column: jax.Array, part: int) -> jax.Array:
        base = triton.load(base_ref.at[column])
        return total(column) * rms * scale_ref[part] + base

    pre_ref[...] = jax.nn.sigmoid(affine(one, 0)) + hc_eps
    post_ref[...] = 2 * jax.nn.sigmoid(affine(copies + one, 1))
    comb = affine(pair, 2)
    comb = jnp.exp(comb - jnp.max(comb, axis=1, keepdims=True))
    comb = comb / jnp.sum(comb, axis=1, keepdims=True) + hc_eps
    comb = comb / (jnp.sum(comb, axis=0, keepdims=True) + hc_eps)

    def normalize(_: jax.Array, comb: jax.Array) -> jax.Array:
        comb = comb / (jnp.sum(comb, axis=1, keepdims=True) + hc_eps)
        return comb / (jnp.sum(comb, axis=0, keepdims=True) + hc_eps)

    comb_ref[...] = jax.lax.fori_loop(0, sinkhorn_iters - 1, normalize, comb)
