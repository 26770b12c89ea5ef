"""Linear layers over bf16 weights, accumulated in float32."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.row_matmul import Format, row_matmul

_FORMAT = Format(load=lambda *_: None, decode=lambda block, _: block, rows=lambda rows: rows)


def dense_matmul(x: jax.Array, weight: jax.Array, *, implementation: Implementation) -> jax.Array:
    """x @ weight.T: exact products of bf16 values, summed in float32.

    Shapes: M rows, K inputs, N outputs.

    Args:
      x: bf16[M, K].
      weight: bf16[N, K].
      implementation: see `dispatch.resolve`.

    Returns:
      float32[M, N], not rounded yet.
    """
    chex.assert_rank([x, weight], 2)
    chex.assert_equal(x.shape[1], weight.shape[1])
    if resolve(implementation) == "xla":
        return dense_matmul_reference(x, weight)
    return row_matmul(
        x,
        weight,
        name="dense_matmul",
        format=_FORMAT,
        implementation=implementation,
    )


def dense_matmul_reference(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Defines the result, in full float32 precision."""
    return jnp.einsum(
        "mk,nk->mn",
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A real call of `dense_matmul`.

    Attributes:
      name: phase, rows, weight and partition.
      rows: M.
      outputs: N on one device.
      inputs: K.
    """

    name: str
    rows: int
    outputs: int
    inputs: int


SHAPES = tuple(
    Shape(name=f"{phase} {rows} {weight}", rows=rows, outputs=outputs, inputs=inputs)
    for weight, outputs, inputs in (
        ("gate", 384, 5120),
        ("compressor.wkv", 512, 5120),
        ("indexer.wk", 128, 512),
        ("indexer.weights_proj", 32, 5120),
        *((f"head tp{tensor}", 129280 // tensor, 5120) for tensor in (1, 2, 4, 8)),
    )
    for phase, sizes in (("decode", (1, 4, 16, 64)), ("prefill", (512, 2048)))
    for rows in sizes
    if phase == "decode" or not weight.startswith("head")  # logits of a prefill are few
)


def abstract_arguments(shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the arguments x, weight."""
    return (
        jax.ShapeDtypeStruct((shape.rows, shape.inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.outputs, shape.inputs), jnp.bfloat16),
    )


def make_arguments(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Random arguments; products are of the size of their rows."""
    x, weight = abstract_arguments(shape)
    return (
        jnp.asarray(rng.normal(size=x.shape), x.dtype),
        jnp.asarray(rng.normal(0, shape.inputs**-0.5, weight.shape), weight.dtype),
    )


def run(
    shape: Shape, arguments: tuple[jax.Array, ...], *, implementation: Implementation
) -> jax.Array:
    """The operation of a shape."""
    return dense_matmul(*arguments, implementation=implementation)


def flops(shape: Shape) -> int:
    """Multiplications and additions."""
    return 2 * shape.rows * shape.outputs * shape.inputs


def bytes(shape: Shape) -> int:
    """Bytes that must move: every argument once, the result once."""
    moved = sum(math.prod(a.shape) * a.dtype.itemsize for a in abstract_arguments(shape))
    return moved + 4 * shape.rows * shape.outputs
