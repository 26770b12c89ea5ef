"""Kernels over FP8 weights against their definitions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import row_matmul, scaled_matmul
from pallas_kernels.row_matmul import Schedule, choose_blocks, choose_schedule
from pallas_kernels.scaled_matmul import SHAPES, Shape, make_arguments, run
from sharding.kernel_report import compile_kernels

REGISTERS = 65536  # of a processor
KERNEL = jax.jit(functools.partial(run, implementation="pallas_interpret"), static_argnums=0)
# Sums of exact products in another order than the definition's: a few units of the 24 bits of a
# float32, of the largest sums.
TOLERANCE = 2e-6
COMPILED = (
    "decode 4 wq_a",
    "decode 64 wkv",
    "prefill 512 indexer.wq_b",
    "decode 16 wq_b tp2",
    "prefill 2048 wo_b tp2",
    "decode 1 wo_a tp2",
    "prefill 512 wo_a tp2",
    "decode 64 shared.w1 tp8",
    "prefill 512 shared.w2 tp8",
)


def shape(rows, outputs, inputs, groups=0):
    return Shape(name="test", rows=rows, outputs=outputs, inputs=inputs, groups=groups)


def arguments(case, seed=0):
    return make_arguments(case, np.random.default_rng(seed))


def assert_close(found, expected):
    limit = TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


@pytest.mark.parametrize(
    "case",
    [
        shape(20, 288, 288),
        shape(3, 40, 96),
        shape(1, 64, 5120),
        shape(70, 96, 1280),
        shape(5, 64, 96, groups=2),
        shape(17, 128, 4096, groups=2),
    ],
    ids=lambda s: f"{s.rows}x{s.outputs}x{s.inputs}g{s.groups}",
)
def test_kernel_agrees_with_the_definition(case):
    args = arguments(case)
    assert_close(KERNEL(case, args), run(case, args, implementation="xla"))


@pytest.mark.parametrize("groups", [0, 2])
def test_bits_of_a_row_depend_on_no_other_row(groups):
    case = shape(80, 64, 1024, groups)
    x, *rest = arguments(case)
    assert choose_blocks(64, 1024, max(groups, 1)).splits == 2
    expected = KERNEL(case, (x, *rest))
    for rows in (slice(0, 1), slice(79, 80), slice(3, 19), slice(1, 65)):
        np.testing.assert_array_equal(KERNEL(case, (x[rows], *rest)), expected[rows])


def test_bits_do_not_depend_on_what_runs_at_the_same_time(monkeypatch):
    case = shape(40, 64, 1024)
    args = arguments(case)
    expected = KERNEL(case, args)
    for schedule in (Schedule(1, 1), Schedule(2, 2)):
        monkeypatch.setattr(row_matmul, "choose_schedule", lambda *_, chosen=schedule: chosen)
        found = run(case, args, implementation="pallas_interpret")
        np.testing.assert_array_equal(found, expected)


def test_rows_of_nan_do_not_reach_other_rows():
    case = shape(20, 64, 128)
    x, *rest = arguments(case)
    expected = KERNEL(case, (x, *rest))
    found = KERNEL(case, (x.at[5:].set(jnp.nan), *rest))
    np.testing.assert_array_equal(found[:5], expected[:5])


def test_shapes_are_named_once_and_divide():
    assert len({s.name for s in SHAPES}) == len(SHAPES)
    for case in SHAPES:
        blocks = choose_blocks(case.outputs, case.inputs, max(case.groups, 1))
        assert case.inputs % (blocks.inputs * blocks.splits) == 0
        assert scaled_matmul.bytes(case) > case.outputs * case.inputs
        assert scaled_matmul.flops(case) == 2 * case.rows * case.outputs * case.inputs


@pytest.mark.cuda12
@pytest.mark.parametrize("name", COMPILED)
def test_kernel_compiles_without_spills(name):
    (case,) = (s for s in SHAPES if s.name == name)
    for rows in {case.rows, 1}:
        one = dataclasses.replace(case, rows=rows)
        fn = functools.partial(run, one, implementation="pallas")
        kernels = compile_kernels(
            lambda *args, fn=fn: fn(args), *scaled_matmul.abstract_arguments(one)
        )
        (kernel,) = [k for k in kernels if k.pallas]
        assert kernel.faults == ()
        assert kernel.wgmma > 0
        assert 2 * kernel.registers * kernel.threads <= REGISTERS  # two programs side by side


@pytest.mark.cuda12
def test_a_tile_of_rows_takes_the_same_instructions_in_every_schedule():
    def instructions(rows):
        case = shape(rows, 1280, 5120)
        fn = functools.partial(run, case, implementation="pallas")
        kernels = compile_kernels(lambda *args: fn(args), *scaled_matmul.abstract_arguments(case))
        (kernel,) = [k for k in kernels if k.pallas]
        tiles = choose_schedule(rows, 1280, choose_blocks(1280, 5120)).tiles
        return kernel.wgmma / tiles

    assert instructions(1) == instructions(32) == instructions(512)


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED)
def test_kernel_agrees_with_the_definition_on_a_gpu(name):
    (case,) = (s for s in SHAPES if s.name == name)
    args = arguments(case)
    found = jax.jit(functools.partial(run, case, implementation="pallas"))(args)
    assert_close(np.asarray(found), np.asarray(run(case, args, implementation="xla")))
