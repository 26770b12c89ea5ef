"""Root-mean-square norm of rows."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation, launch, resolve, whole
from pallas_kernels.kernel_math import next_power_of_two


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, implementation: Implementation
) -> jax.Array:
    """weight * x / rms(x) in float32, rounded once.

    Shapes: M rows, D channels.

    Args:
      x: bf16[M, D].
      weight: bf16[D].
      eps: added to the mean square.
      implementation: see `dispatch.resolve`.

    Returns:
      bf16[M, D].
    """
    chex.assert_rank([x, weight], [2, 1])
    chex.assert_equal(x.shape[1], weight.shape[0])
    if resolve(implementation) == "xla":
        return rms_norm_reference(x, weight, eps=eps)
    rows, channels = x.shape
    row = pl.BlockSpec((None, channels), lambda i: (i, 0))
    return launch(
        functools.partial(_kernel, eps=eps),
        x,
        weight,
        name="rms_norm",
        grid=(rows,),
        in_specs=[row, whole(weight)],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_warps=8 if channels > 2048 else 4,
        num_stages=1,
        implementation=implementation,
    )


def rms_norm_reference(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Defines the result."""
    wide = x.astype(jnp.float32)
    normed = wide * numerics.rsqrt(numerics.mean(jnp.square(wide)) + eps)
    return (weight.astype(jnp.float32)[None] * normed).astype(x.dtype)


def _kernel(x_ref: jax.Array, weight_ref: jax.Array, out_ref: jax.Array, *, eps: float) -> None:
    """One row, read once; channels past the last count as zeros."""
    (size,) = x_ref.shape
    channels = jnp.arange(next_power_of_two(size))
    inside = channels < size
    x = triton.load(x_ref.at[channels], mask=inside, other=0.0).astype(jnp.float32)
    weight = triton.load(weight_ref.at[channels], mask=inside, other=0.0).astype(jnp.float32)
    inverse = 1 / jnp.sqrt(jnp.sum(x * x) / size + eps)
    triton.store(out_ref.at[channels], (weight * (x * inverse)).astype(out_ref.dtype), mask=inside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A real call of `rms_norm`.

    Attributes:
      name: phase, rows and norm.
      rows: M.
      channels: D.
    """

    name: str
    rows: int
    channels: int


SHAPES = tuple(
    Shape(name=f"{phase} {rows} {norm}", rows=rows, channels=channels)
    for norm, channels in (("hidden", 5120), ("q_norm", 1280), ("compressor.norm", 512))
    for phase, sizes in (("decode", (1, 4, 16, 64)), ("prefill", (512, 2048)))
    for rows in sizes
)


def abstract_arguments(shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the arguments x, weight."""
    return (
        jax.ShapeDtypeStruct((shape.rows, shape.channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.channels,), jnp.bfloat16),
    )


def make_arguments(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Random rows of different sizes, weights about one."""
    x, weight = abstract_arguments(shape)
    sizes = np.exp(rng.normal(size=(shape.rows, 1)))
    return (
        jnp.asarray(rng.normal(size=x.shape) * sizes, x.dtype),
        jnp.asarray(rng.normal(1, 0.2, weight.shape), weight.dtype),
    )


def run(
    shape: Shape, arguments: tuple[jax.Array, ...], *, implementation: Implementation
) -> jax.Array:
    """The operation of a shape, with the constant of the released model."""
    return rms_norm(*arguments, eps=1e-20, implementation=implementation)


def flops(shape: Shape) -> int:
    """Multiplications and additions."""
    return 4 * shape.rows * shape.channels


def bytes(shape: Shape) -> int:
    """Bytes that must move: every argument once, the result once."""
    moved = sum(math.prod(a.shape) * a.dtype.itemsize for a in abstract_arguments(shape))
    return moved + 2 * shape.rows * shape.channels
