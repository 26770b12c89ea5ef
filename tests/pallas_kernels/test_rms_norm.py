"""The norm's kernel against its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm
from pallas_kernels.rms_norm import SHAPES, Shape, make_arguments, run
from sharding.kernel_report import compile_kernels

REGISTERS = 65536  # of a processor
KERNEL = jax.jit(functools.partial(run, implementation="pallas_interpret"), static_argnums=0)


def arguments(rows, channels):
    case = Shape(name="test", rows=rows, channels=channels)
    return case, make_arguments(case, np.random.default_rng(0))


def assert_within_one_unit(found, expected):
    """Squares summed in another order move a value across a rounding edge of bf16, seldom."""
    found, expected = (np.asarray(a).view(np.int16).astype(np.int32) for a in (found, expected))
    assert np.abs(found - expected).max() <= 1
    assert np.mean(found == expected) >= 0.995


@pytest.mark.parametrize(("rows", "channels"), [(3, 5120), (5, 1280), (4, 512), (1, 96), (7, 40)])
def test_kernel_agrees_with_the_definition(rows, channels):
    case, args = arguments(rows, channels)
    assert_within_one_unit(KERNEL(case, args), run(case, args, implementation="xla"))


def test_row_of_zeros_stays_zero():
    case, (x, weight) = arguments(2, 96)
    assert not KERNEL(case, (x.at[1].set(0), weight))[1].any()


def test_bits_of_a_row_depend_on_no_other_row():
    case, (x, weight) = arguments(20, 1280)
    expected = KERNEL(case, (x, weight))
    poisoned = x.at[:4].set(jnp.nan)
    np.testing.assert_array_equal(KERNEL(case, (poisoned, weight))[4:], expected[4:])
    np.testing.assert_array_equal(KERNEL(case, (x[7:8], weight)), expected[7:8])


def test_shapes_are_named_once():
    assert len({s.name for s in SHAPES}) == len(SHAPES)
    for case in SHAPES:
        assert rms_norm.bytes(case) == 2 * case.channels * (2 * case.rows + 1)
        assert rms_norm.flops(case) == 4 * case.rows * case.channels


@pytest.mark.cuda12
@pytest.mark.parametrize("case", [s for s in SHAPES if s.rows == 16], ids=lambda s: s.name)
def test_kernel_compiles_without_spills(case):
    fn = functools.partial(run, case, implementation="pallas")
    kernels = compile_kernels(lambda *args: fn(args), *rms_norm.abstract_arguments(case))
    (kernel,) = [k for k in kernels if k.pallas]
    assert kernel.faults == ()
    assert 2 * kernel.registers * kernel.threads <= REGISTERS  # two programs side by side


@pytest.mark.gpu
@pytest.mark.parametrize("case", [s for s in SHAPES if s.rows in (4, 512)], ids=lambda s: s.name)
def test_kernel_agrees_with_the_definition_on_a_gpu(case):
    args = make_arguments(case, np.random.default_rng(0))
    found = jax.jit(functools.partial(run, case, implementation="pallas"))(args)
    assert_within_one_unit(found, run(case, args, implementation="xla"))
