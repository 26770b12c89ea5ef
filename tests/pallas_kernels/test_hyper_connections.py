"""Kernels of the hyper-connections against what defines them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hyper_connections
from pallas_kernels.dispatch import KernelError
from pallas_kernels.hyper_connection_mixes import bf16_parts
from pallas_kernels.hyper_connections import SHAPES, Shape, make_arguments, run

OPTIONS = {"xla_allow_excess_precision": False}
OPS = ("mixes", "collapse_norm", "expand")
TINY, RELEASED = 96, 5120
# The kernel adds 20480 products in another order, and its exponentials and divisions may be off
# by two units in the last place; the numbers are at most 2.
MIXES_TOLERANCE = 4e-6


def shape(op, rows, hidden=TINY):
    return Shape(name=op, op=op, rows=rows, hidden=hidden)


def arguments(op, rows, hidden=TINY, seed=0):
    return make_arguments(shape(op, rows, hidden), np.random.default_rng(seed))


@functools.partial(jax.jit, static_argnums=(0, 2), compiler_options=OPTIONS)
def compute(op, arrays, implementation="pallas_interpret"):
    rows = arrays[0].shape[0]
    return jax.tree.leaves(run(shape(op, rows), arrays, implementation=implementation))


def by_row(op):
    """Which arguments have a row per token."""
    return (0,) if op == "mixes" else (0, 1) if op == "collapse_norm" else (0, 1, 2, 3)


def on_rows(op, arrays, change):
    return tuple(change(a) if i in by_row(op) else a for i, a in enumerate(arrays))


def ordered(array):
    """Integers whose differences count bf16 numbers."""
    bits = np.asarray(array).view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize(("rows", "hidden"), [(1, TINY), (70, TINY), (3, RELEASED)])
def test_mixing_numbers_are_those_of_the_reference_to_float32(rows, hidden):
    arrays = arguments("mixes", rows, hidden)
    found, wanted = compute("mixes", arrays), compute("mixes", arrays, "xla")
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=MIXES_TOLERANCE)


def test_product_is_float32_down_to_the_last_bits_of_fn():
    x, fn, scale, base = arguments("mixes", 4, RELEASED)
    truncated = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(fn, jnp.uint32) & jnp.uint32(0xFFFFE000), jnp.float32
    )
    scale = jnp.full_like(scale, 0.05)  # away from where the sigmoid is flat
    got = compute("mixes", (x, fn, scale, base))[1]
    want = compute("mixes", (x, fn, scale, base), "xla")[1]
    tf32 = compute("mixes", (x, truncated, scale, base), "xla")[1]
    assert np.abs(got - want).max() < np.abs(tf32 - want).max() / 10


def test_parts_of_float32_add_up_to_it_bit_for_bit():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=4096) * np.exp2(rng.integers(-60, 60, 4096)), jnp.float32)
    high, middle, low = (part.astype(jnp.float32) for part in jax.jit(bf16_parts)(x))
    np.testing.assert_array_equal(np.asarray(high + (middle + low)), np.asarray(x))


@pytest.mark.parametrize("op", ["collapse_norm", "expand"])
@pytest.mark.parametrize(("rows", "hidden"), [(1, TINY), (70, TINY), (3, RELEASED)])
def test_stream_is_within_one_unit_of_bf16(op, rows, hidden):
    # The compilers may fuse a product into a sum or not, and add squares in their own order: a
    # value at the middle between two bf16 numbers goes either way.
    arrays = arguments(op, rows, hidden)
    for got, want in zip(compute(op, arrays), compute(op, arrays, "xla"), strict=True):
        far = np.abs(ordered(got) - ordered(want))
        assert far.max() <= 1
        assert (far == 0).mean() >= 0.999


@pytest.mark.parametrize("op", ["collapse_norm", "expand"])
def test_stream_is_equal_bit_for_bit_where_float32_sums_are_exact(op):
    rng = np.random.default_rng(2)
    arrays = tuple(
        jnp.asarray(rng.integers(-32, 33, a.shape) / 8, a.dtype) for a in arguments(op, 5)
    )
    got, want = compute(op, arrays)[0], compute(op, arrays, "xla")[0]
    np.testing.assert_array_equal(ordered(got), ordered(want))


@pytest.mark.parametrize("op", OPS)
def test_a_row_keeps_its_bits_in_every_batch(op):
    arrays = arguments(op, 70)
    whole = compute(op, arrays)
    for first, rows in ((3, 1), (0, 16), (2, 16), (1, 64)):
        part = compute(op, on_rows(op, arrays, lambda a, i=first, n=rows: a[i : i + n]))
        for got, want in zip(part, whole, strict=True):
            np.testing.assert_array_equal(got[3 - first], want[3])


@pytest.mark.parametrize("op", OPS)
def test_rows_of_nan_stay_by_themselves(op):
    arrays = arguments(op, 6)
    spoiled = on_rows(op, arrays, lambda a: a.at[1].set(jnp.nan).at[5].set(jnp.nan))
    for got, want in zip(compute(op, spoiled), compute(op, arrays), strict=True):
        for row in (0, 2, 3, 4):
            np.testing.assert_array_equal(got[row], want[row])


@pytest.mark.parametrize("op", OPS)
def test_bytes_are_those_of_arguments_and_results(op):
    case = shape(op, 7)
    arrays = arguments(op, 7)
    moved = sum(a.nbytes for a in (*arrays, *compute(op, arrays, "xla")))
    assert hyper_connections.bytes(case) == moved


def test_every_implementation_is_named():
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        run(shape("expand", 1), arguments("expand", 1), implementation="cuda")


@pytest.mark.cuda12
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_for_a_gpu_at_released_sizes(op):
    from sharding.kernel_report import compile_kernels

    cases = [case for case in SHAPES if case.op == op]

    def every(arrays):
        return [
            run(case, a, implementation="pallas") for case, a in zip(cases, arrays, strict=True)
        ]

    arrays = [hyper_connections.abstract_arguments(case) for case in cases]
    reports = [report for report in compile_kernels(every, arrays) if report.pallas]
    kernels = 2 if op == "mixes" else 1
    assert sum(report.launches for report in reports) == kernels * len(cases)
    assert not [fault for report in reports for fault in report.faults]
    products = [report for report in reports if "products" in report.name]
    assert all(report.wgmma for report in products) and bool(products) == (op == "mixes")
    assert not dataclasses.asdict(reports[0])["tf32"]


def test_a_number_of_copies_that_is_no_power_of_two_is_refused():
    odd = dataclasses.replace(shape("mixes", 4), copies=3)
    arrays = make_arguments(odd, np.random.default_rng(0))
    with pytest.raises(KernelError, match="3 copies"):
        run(odd, arrays, implementation="pallas_interpret")
