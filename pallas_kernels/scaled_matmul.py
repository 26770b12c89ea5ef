"""Linear layers over FP8 weights, with their dynamic activation quantization."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton

from pallas_kernels import formats, kernel_math
from pallas_kernels.dense_matmul import dense_matmul_reference
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.row_matmul import Format, row_matmul


def scaled_matmul(
    x: jax.Array, weight: jax.Array, scale: jax.Array, *, implementation: Implementation
) -> jax.Array:
    """Quantizes `x` and multiplies it with a block-scaled FP8 weight.

    Shapes: M rows, K inputs (a multiple of 32), N outputs.

    Args:
      x: bf16[M, K].
      weight: e4m3[N, K].
      scale: uint8[ceil(N / 32), K / 32], E8M0.
      implementation: see `dispatch.resolve`.

    Returns:
      float32[M, N], not rounded yet.
    """
    chex.assert_rank([x, weight, scale], 2)
    chex.assert_equal(x.shape[1], weight.shape[1])
    if resolve(implementation) == "xla":
        return scaled_matmul_reference(quantized(x), formats.dequantize_weight(weight, scale))
    return row_matmul(
        x,
        weight,
        scale,
        name="scaled_matmul",
        format=_QUANTIZED_ROWS,
        implementation=implementation,
    )


def grouped_output(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    groups: int,
    implementation: Implementation,
) -> jax.Array:
    """Multiplies groups of inputs with an FP8 matrix each; the inputs are not quantized.

    Shapes: M rows, G groups, K inputs of a group (a multiple of 32), N outputs of all groups.

    Args:
      x: bf16[M, G * K].
      weight: e4m3[N, K]; outputs g * N / G to (g + 1) * N / G read inputs of group g.
      scale: uint8[ceil(N / 32), K / 32], E8M0.
      groups: G.
      implementation: see `dispatch.resolve`.

    Returns:
      float32[M, N], not rounded yet.
    """
    chex.assert_rank([x, weight, scale], 2)
    chex.assert_equal(x.shape[1], groups * weight.shape[1])
    if resolve(implementation) == "xla":
        return grouped_output_reference(x, weight, scale, groups=groups)
    return row_matmul(
        x,
        weight,
        scale,
        name="grouped_output",
        format=_PLAIN_ROWS,
        implementation=implementation,
        groups=groups,
    )


def quantized(x: jax.Array) -> jax.Array:
    """float32 values that `x` takes when its rows are quantized to FP8."""
    return formats.dequantize_fp8(*formats.quantize_fp8(x))


def scaled_matmul_reference(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Defines the result: exact products, summed in blocks of 32 inputs, blocks in order.

    Within a block the sum of products of quantized values is (nearly) exact in float32, so
    the order that decides the last bit is the one over blocks.

    Args:
      x: float32[M, K], dequantized.
      weight: float32[N, K], dequantized.
    """
    blocks = x.shape[1] // formats.FP8_BLOCK
    partial = jnp.einsum(
        "mkb,nkb->kmn",
        x.reshape(x.shape[0], blocks, formats.FP8_BLOCK),
        weight.reshape(weight.shape[0], blocks, formats.FP8_BLOCK),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return functools.reduce(jnp.add, [partial[k] for k in range(blocks)])


def grouped_output_reference(
    x: jax.Array, weight: jax.Array, scale: jax.Array, *, groups: int
) -> jax.Array:
    """Defines the result."""
    inputs = jnp.split(x, groups, axis=1)
    matrices = jnp.split(formats.dequantize_weight(weight, scale), groups)
    products = [dense_matmul_reference(*pair) for pair in zip(inputs, matrices, strict=True)]
    return jnp.concatenate(products, axis=1)


def _load_scales(
    outputs: jax.Array, first_input: jax.Array, inputs: int, scale_ref: jax.Array
) -> jax.Array:
    """E8M0 bytes uint8[outputs, inputs / 32]."""
    groups = inputs // formats.FP8_BLOCK
    blocks = first_input // formats.FP8_BLOCK + jnp.arange(groups)
    return triton.load(scale_ref.at[(outputs // formats.FP8_BLOCK)[:, None], blocks[None, :]])


def _decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """bf16 values, exact, of E4M3 codes."""
    groups = codes.astype(jnp.float32).reshape(*scales.shape, formats.FP8_BLOCK)
    values = groups * kernel_math.decode_e8m0(scales)[:, :, None]
    return values.reshape(codes.shape).astype(jnp.bfloat16)


def _quantize_rows(rows: jax.Array) -> jax.Array:
    return kernel_math.quantize_fp8_block(rows.astype(jnp.float32)).astype(jnp.bfloat16)


_QUANTIZED_ROWS = Format(load=_load_scales, decode=_decode, rows=_quantize_rows)
_PLAIN_ROWS = Format(load=_load_scales, decode=_decode, rows=lambda rows: rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A real call of `scaled_matmul`, or of `grouped_output` where there are groups.

    Attributes:
      name: phase, rows, weight and partition.
      rows: M.
      outputs: N on one device.
      inputs: K on one device.
      groups: G of `grouped_output`; 0 is `scaled_matmul`.
    """

    name: str
    rows: int
    outputs: int
    inputs: int
    groups: int = 0


def _weights() -> Iterator[tuple[str, int, int, int]]:
    """Name, outputs, inputs and groups of the released weights, split as they are."""
    yield "wq_a", 1280, 5120, 0
    yield "wkv", 512, 5120, 0
    yield "indexer.wq_b", 4096, 1280, 0
    yield "engram.wkv", 25600, 6144, 0
    for tensor in (1, 2, 4, 8):
        yield f"wq_b tp{tensor}", 32768 // tensor, 1280, 0
        yield f"wo_a tp{tensor}", 8192 // tensor, 4096, 8 // tensor
        yield f"wo_b tp{tensor}", 5120, 8192 // tensor, 0
        yield f"shared.w1 tp{tensor}", 2304 // tensor, 5120, 0
        yield f"shared.w2 tp{tensor}", 5120, 2304 // tensor, 0


SHAPES = tuple(
    Shape(name=f"{phase} {rows} {weight}", rows=rows, outputs=outputs, inputs=inputs, groups=groups)
    for weight, outputs, inputs, groups in _weights()
    for phase, sizes in (("decode", (1, 4, 16, 64)), ("prefill", (512, 2048)))
    for rows in sizes
)


def abstract_arguments(shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the arguments x, weight, scale."""
    blocks = tuple(-(-size // formats.FP8_BLOCK) for size in (shape.outputs, shape.inputs))
    return (
        jax.ShapeDtypeStruct((shape.rows, max(shape.groups, 1) * shape.inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.outputs, shape.inputs), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct(blocks, jnp.uint8),
    )


def make_arguments(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Random arguments; products are of the size of their rows."""
    x, weight, scale = abstract_arguments(shape)
    middle = 127 - round(math.log2(shape.inputs) / 2)
    return (
        jnp.asarray(rng.normal(size=x.shape), x.dtype),
        jnp.asarray(rng.normal(size=weight.shape), weight.dtype),
        jnp.asarray(rng.integers(middle - 1, middle + 2, scale.shape), scale.dtype),
    )


def run(
    shape: Shape, arguments: tuple[jax.Array, ...], *, implementation: Implementation
) -> jax.Array:
    """The operation of a shape."""
    if shape.groups:
        return grouped_output(*arguments, groups=shape.groups, implementation=implementation)
    return scaled_matmul(*arguments, implementation=implementation)


def flops(shape: Shape) -> int:
    """Multiplications and additions."""
    return 2 * shape.rows * shape.outputs * shape.inputs


def bytes(shape: Shape) -> int:
    """Bytes that must move: every argument once, the result once."""
    moved = sum(math.prod(a.shape) * a.dtype.itemsize for a in abstract_arguments(shape))
    return moved + 4 * shape.rows * shape.outputs
