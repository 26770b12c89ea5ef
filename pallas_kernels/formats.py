"""Number formats of weights, activations and caches, bit for bit.

E4M3 is FP8 without infinities, E8M0 a power-of-two scale (byte b means 2^(b - 127)), E2M1 FP4
(bit 3 sign; magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6). Source: numbers and storage of the spec.
Every dequantized value is exact in bf16, so products match those of the packed formats.
"""

import jax
import jax.numpy as jnp
import numpy as np

FP8_BLOCK = 32  # rows and columns of a weight that share a scale; activations: channels
FP4_BLOCK = 32  # channels of an expert weight or an index key that share an E8M0 scale
KV_BLOCK = 16  # channels of a compressed KV row that share an E4M3 scale
FP8_MAX = 448.0
FP4_MAX = 6.0
_ACTIVATION_FLOOR = 1e-4  # smallest amax of an activation group
_FP4_FLOOR = 6 * 2.0**-126
_KV_FLOOR = 6 * 2.0**-9
# Midpoints between E2M1 magnitudes, and whether a tie goes to the upper (even) code.
_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def decode_e8m0(byte: jax.Array) -> jax.Array:
    """float32 powers of two of E8M0 bytes; byte 0 (2^-127) flushes to zero."""
    return jax.lax.bitcast_convert_type(byte.astype(jnp.uint32) << 23, jnp.float32)


def decode_e4m3(byte: jax.Array) -> jax.Array:
    """float32 values of E4M3 bytes."""
    return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32)


def encode_e4m3(x: jax.Array) -> jax.Array:
    """E4M3 bytes of float32 values, nearest even; the cast overflows to NaN, hence the clamp."""
    clamped = jnp.clip(x, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(clamped, jnp.uint8)


def decode_e2m1(byte: jax.Array) -> jax.Array:
    """float32[..., 2 * n] of uint8[..., n], the low nibble first.

    Integer arithmetic on twice the magnitude: no denormal that a CPU might flush.
    """
    nibble = jnp.stack([byte & 15, byte >> 4], axis=-1).reshape(*byte.shape[:-1], -1)
    nibble = nibble.astype(jnp.int32)
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    doubled = jnp.where(exponent > 0, (2 + mantissa) << jnp.maximum(exponent - 1, 0), mantissa)
    value = doubled.astype(jnp.float32) * 0.5
    return jnp.where(nibble >= 8, -value, value)


def e2m1_codes(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """E2M1 codes of x / scale, one a byte: nearest, ties to the even code, clamped to +-6.

    Compares |x| with scaled midpoints instead of dividing: the midpoints are exact, so ties
    stay ties whatever a compiler makes of a division.

    Args:
      x: float32[..., n], bf16 values.
      scale: float32[..., 1], or 1 where x is scaled already.

    Returns:
      uint8[..., n].
    """
    magnitude = jnp.abs(x)
    code = sum(
        (magnitude >= middle * scale if ties_up else magnitude > middle * scale).astype(jnp.uint8)
        for middle, ties_up in _MIDPOINTS
    )
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def encode_e2m1(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """uint8[..., n / 2]: `e2m1_codes` in pairs, the even element in the low nibble."""
    code = e2m1_codes(x, scale)
    pairs = code.reshape(*code.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _groups(x: jax.Array, size: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)


def _power_of_two_scale(amax: jax.Array, largest: float) -> jax.Array:
    """E8M0 byte of the smallest power of two at least `amax / largest`, from exponent bits."""
    bits = jax.lax.bitcast_convert_type(amax * np.float32(1 / largest), jnp.uint32)
    return ((bits + 0x7FFFFF) >> 23).astype(jnp.uint8)


def fp8_scales(amax: jax.Array) -> jax.Array:
    """E8M0 scales of groups of FP8 activations, by their largest magnitude in float32."""
    return _power_of_two_scale(jnp.maximum(amax, np.float32(_ACTIVATION_FLOOR)), FP8_MAX)


def fp4_scales(amax: jax.Array) -> jax.Array:
    """E8M0 scales of groups of FP4 index channels, by their largest magnitude in float32."""
    return _power_of_two_scale(jnp.maximum(amax, np.float32(_FP4_FLOOR)), FP4_MAX)


def kv_sixths(amax: jax.Array) -> jax.Array:
    """float32 scales of groups of FP4 KV channels, by their largest magnitude.

    E4M3 holds them once they are rounded to 15 bits of mantissa: a sixth is then exact where it
    is a tie of E4M3, for 16 bits tell ties from every other bf16 / 6.
    """
    return jnp.maximum(amax, np.float32(_KV_FLOOR)) * np.float32(1 / FP4_MAX)


def inverse_power(scales: jax.Array) -> jax.Array:
    """float32[..., 1]: one over a power-of-two scale, exact."""
    return decode_e8m0(254 - scales)[..., None]


def quantize_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Activation quantization: groups of 32 channels, power-of-two scale.

    Args:
      x: bf16[..., K], K a multiple of 32.

    Returns:
      codes: uint8[..., K], E4M3.
      scales: uint8[..., K / 32], E8M0.
    """
    groups = _groups(x, FP8_BLOCK)
    scales = fp8_scales(jnp.max(jnp.abs(groups), axis=-1))
    codes = encode_e4m3(groups * inverse_power(scales))
    return codes.reshape(x.shape), scales


def dequantize_fp8(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """float32[..., K] of rows made by `quantize_fp8`."""
    groups = decode_e4m3(codes).reshape(*scales.shape, FP8_BLOCK)
    return (groups * decode_e8m0(scales)[..., None]).reshape(codes.shape)


def quantize_fp4(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index queries and keys: groups of 32 channels, power-of-two scale.

    Args:
      x: bf16[..., K], K a multiple of 32.

    Returns:
      codes: uint8[..., K / 2], E2M1 pairs.
      scales: uint8[..., K / 32], E8M0.
    """
    groups = _groups(x, FP4_BLOCK)
    scales = fp4_scales(jnp.max(jnp.abs(groups), axis=-1))
    codes = encode_e2m1(groups * inverse_power(scales))
    return codes.reshape(*x.shape[:-1], -1), scales


def dequantize_fp4(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """float32[..., K] of rows made by `quantize_fp4`, or of expert weights."""
    groups = decode_e2m1(codes).reshape(*scales.shape, FP4_BLOCK)
    return (groups * decode_e8m0(scales)[..., None]).reshape(*codes.shape[:-1], -1)


def quantize_kv(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compressed KV rows: groups of 16 channels, E4M3 scale.

    Args:
      x: bf16[..., K], K a multiple of 16.

    Returns:
      codes: uint8[..., K / 2], E2M1 pairs.
      scales: uint8[..., K / 16], E4M3.
    """
    groups = _groups(x, KV_BLOCK)
    sixths = kv_sixths(jnp.max(jnp.abs(groups), axis=-1))
    scales = encode_e4m3(jax.lax.reduce_precision(sixths, 8, 15))
    codes = encode_e2m1(groups, decode_e4m3(scales)[..., None])
    return codes.reshape(*x.shape[:-1], -1), scales


def dequantize_kv(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """float32[..., K] of rows made by `quantize_kv`."""
    groups = decode_e2m1(codes).reshape(*scales.shape, KV_BLOCK)
    return (groups * decode_e4m3(scales)[..., None]).reshape(*codes.shape[:-1], -1)


def dequantize_weight(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """float32[N, K] of a dense FP8 weight.

    Args:
      weight: e4m3[N, K].
      scale: uint8[ceil(N / 32), ceil(K / 32)], E8M0, one per 32x32 block.
    """
    rows, columns = weight.shape
    expanded = jnp.repeat(jnp.repeat(decode_e8m0(scale), FP8_BLOCK, 0), FP8_BLOCK, 1)
    return weight.astype(jnp.float32) * expanded[:rows, :columns]
