"""The kernel over bf16 weights against its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dense_matmul
from pallas_kernels.dense_matmul import SHAPES, Shape, make_arguments, run
from sharding.kernel_report import compile_kernels

REGISTERS = 65536  # of a processor
KERNEL = jax.jit(functools.partial(run, implementation="pallas_interpret"), static_argnums=0)
# Exact products, summed in another order: a few units of the 24 bits of the largest sums.
TOLERANCE = 2e-6
COMPILED = (
    "decode 1 gate",
    "prefill 512 gate",
    "prefill 2048 compressor.wkv",
    "decode 64 indexer.wk",
    "decode 4 indexer.weights_proj",
    "decode 4 head tp2",
    "decode 64 head tp2",
)


def shape(rows, outputs, inputs):
    return Shape(name="test", rows=rows, outputs=outputs, inputs=inputs)


def arguments(case):
    return make_arguments(case, np.random.default_rng(0))


def assert_close(found, expected):
    limit = TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


@pytest.mark.parametrize(
    "case",
    [shape(17, 384, 512), shape(3, 32, 5120), shape(5, 10, 96), shape(66, 130, 64)],
    ids=lambda s: f"{s.rows}x{s.outputs}x{s.inputs}",
)
def test_kernel_agrees_with_the_definition(case):
    args = arguments(case)
    assert_close(KERNEL(case, args), run(case, args, implementation="xla"))


def test_bits_of_a_row_depend_on_no_other_row():
    case = shape(80, 32, 1024)
    x, weight = arguments(case)
    expected = KERNEL(case, (x, weight))
    for rows in (slice(0, 1), slice(79, 80), slice(3, 19), slice(1, 65)):
        np.testing.assert_array_equal(KERNEL(case, (x[rows], weight)), expected[rows])


def test_rows_of_nan_do_not_reach_other_rows():
    case = shape(20, 64, 128)
    x, weight = arguments(case)
    expected = KERNEL(case, (x, weight))
    found = KERNEL(case, (x.at[5:].set(jnp.nan), weight))
    np.testing.assert_array_equal(found[:5], expected[:5])


def test_shapes_are_named_once():
    assert len({s.name for s in SHAPES}) == len(SHAPES)
    for case in SHAPES:
        assert dense_matmul.bytes(case) > 2 * case.outputs * case.inputs
        assert dense_matmul.flops(case) == 2 * case.rows * case.outputs * case.inputs


@pytest.mark.cuda12
@pytest.mark.parametrize("name", COMPILED)
def test_kernel_compiles_without_spills_and_without_tf32(name):
    (case,) = (s for s in SHAPES if s.name == name)
    fn = functools.partial(run, case, implementation="pallas")
    kernels = compile_kernels(lambda *args: fn(args), *dense_matmul.abstract_arguments(case))
    (kernel,) = [k for k in kernels if k.pallas]
    assert kernel.faults == ()
    assert kernel.wgmma + kernel.mma > 0
    assert 2 * kernel.registers * kernel.threads <= REGISTERS  # two programs side by side


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED)
def test_kernel_agrees_with_the_definition_on_a_gpu(name):
    (case,) = (s for s in SHAPES if s.name == name)
    args = arguments(case)
    found = jax.jit(functools.partial(run, case, implementation="pallas"))(args)
    assert_close(np.asarray(found), np.asarray(run(case, args, implementation="xla")))
