"""Number formats inside kernels have the bits of the formats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import formats, kernel_math

BYTES = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)


def in_kernel(fn, x, shape):
    def kernel(x_ref, out_ref):
        out_ref[...] = fn(x_ref[...])

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(shape, jnp.float32), interpret=True
    )(x)


@pytest.mark.parametrize(
    ("n", "most", "expected"), [(288, 128, 32), (5120, 128, 128), (7, 64, 1), (96, 16, 16)]
)
def test_largest_power_of_two_divisor(n, most, expected):
    assert kernel_math.largest_power_of_two_divisor(n, most) == expected


@pytest.mark.parametrize(
    ("n", "least", "expected"), [(1, 1, 1), (5, 1, 8), (64, 1, 64), (3, 16, 16)]
)
def test_next_power_of_two(n, least, expected):
    assert kernel_math.next_power_of_two(n, least) == expected


def test_pairs_of_e2m1_codes_decode_to_the_values_of_the_format():
    pairs = np.asarray(formats.decode_e2m1(BYTES[..., None]))
    for half in (0, 1):
        found = in_kernel(
            lambda b, half=half: kernel_math.decode_e2m1_pair(b)[half], BYTES, (2, 128)
        )
        np.testing.assert_array_equal(found, pairs[..., half])


def test_e8m0_and_e4m3_bytes_decode_to_the_values_of_the_format():
    for fn, expected in (
        (kernel_math.decode_e8m0, formats.decode_e8m0),
        (kernel_math.decode_e4m3, formats.decode_e4m3),
    ):
        np.testing.assert_array_equal(in_kernel(fn, BYTES, (2, 128)), expected(BYTES))


def test_quantized_block_has_the_bits_of_quantized_rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 256)) * np.exp(8 * rng.normal(size=(64, 1)))
    x[3], x[4, :32], x[5, 0] = 0, 1e-6, 3e38
    x = jnp.asarray(x, jnp.bfloat16)
    expected = formats.dequantize_fp8(*formats.quantize_fp8(x))
    found = in_kernel(kernel_math.quantize_fp8_block, x.astype(jnp.float32), x.shape)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found.astype(jnp.bfloat16).astype(jnp.float32), found)
