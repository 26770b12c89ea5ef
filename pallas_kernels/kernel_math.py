"""Number formats inside kernels: what the Triton backend lowers and the interpreter runs.

Functions of blocks in registers; every size is a power of two. The bits are those of
`pallas_kernels.formats`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats

_ACTIVATION_FLOOR = 1e-4  # smallest amax of an activation group
_E2M1_SCALE = 2.0**14  # the exponent bias of float16 less that of E2M1


def largest_power_of_two_divisor(n: int, most: int) -> int:
    """The largest power of two that divides `n` and is at most `most`.

    Args:
      n: at least 1.
      most: at least 1.
    """
    power = 1
    while 2 * power <= most and n % (2 * power) == 0:
        power *= 2
    return power


def next_power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and at least `least`."""
    return max(1 << (n - 1).bit_length(), least)


def decode_e8m0(byte: jax.Array) -> jax.Array:
    """float32 powers of two of E8M0 bytes uint8[...]; byte 0 (2^-127) gives zero."""
    return formats.decode_e8m0(byte)


def decode_e4m3(byte: jax.Array) -> jax.Array:
    """float32 values of E4M3 bytes uint8[...]."""
    return formats.decode_e4m3(byte)


def decode_e2m1_pair(byte: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exact float32 values of the E2M1 codes in uint8[...]: low nibbles, high nibbles.

    A code's bits are those of a float16 that is 2^14 too small, denormal for the smallest
    magnitude; the conversion to float32 keeps it and the multiplication is exact.
    """
    wide = byte.astype(jnp.uint16)

    def value(bits: jax.Array) -> jax.Array:
        half = jax.lax.bitcast_convert_type(bits, jnp.float16)
        return half.astype(jnp.float32) * np.float32(_E2M1_SCALE)

    low = ((wide & 8) << 12) | ((wide & 7) << 9)
    high = ((wide & 0x80) << 8) | ((wide & 0x70) << 5)
    return value(low), value(high)


def round_bf16(x: jax.Array) -> jax.Array:
    """float32 values rounded to bf16, nearest even; not for NaN.

    In integers: a pair of casts around a product of bf16 values may be taken for nothing.
    """
    return round_bits(x, 16)


def round_bits(x: jax.Array, dropped: int) -> jax.Array:
    """float32 values rounded to `dropped` fewer mantissa bits, nearest even; not for NaN."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    half = (1 << (dropped - 1)) - 1
    bits = (bits + half + ((bits >> dropped) & 1)) & ~((1 << dropped) - 1)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def quantize_fp8_block(x: jax.Array) -> jax.Array:
    """Values a block takes when its rows are quantized to FP8 and back, exact in bf16.

    The bits of `formats.dequantize_fp8(*formats.quantize_fp8(x))`.

    Args:
      x: float32[BM, BK], bf16 values, BK a multiple of 32.

    Returns:
      float32[BM, BK].
    """
    rows, columns = x.shape
    groups = x.reshape(rows, columns // formats.FP8_BLOCK, formats.FP8_BLOCK)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), np.float32(_ACTIVATION_FLOOR))
    bits = jax.lax.bitcast_convert_type(amax * np.float32(1 / formats.FP8_MAX), jnp.uint32)
    exponent = (bits + np.uint32(0x7FFFFF)) >> 23
    inverse = jax.lax.bitcast_convert_type((np.uint32(254) - exponent) << 23, jnp.float32)
    scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    scaled = groups * inverse[:, :, None]
    clamped = jnp.minimum(jnp.maximum(scaled, -formats.FP8_MAX), formats.FP8_MAX)
    codes = clamped.astype(jnp.float8_e4m3fn)
    return (codes.astype(jnp.float32) * scale[:, :, None]).reshape(rows, columns)
