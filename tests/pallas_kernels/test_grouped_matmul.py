"""Routed experts: kernels against the reference, and what they compile to."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.forward import COMPILER_OPTIONS
from pallas_kernels import formats, grouped_kernels, grouped_matmul
from pallas_kernels.grouped_matmul import SHAPES, Shape

TINY = Shape(name="tiny", rows=20, intermediate=64, experts=5, hidden=96, chosen=3, partial=False)
NARROW = Shape(name="narrow", rows=5, intermediate=32, experts=7, hidden=96, chosen=3, partial=True)
SLICE = Shape(name="slice", rows=3, intermediate=288, experts=3, hidden=512, chosen=2, partial=True)


@functools.cache
def compiled(limit, partial, implementation):
    return jax.jit(
        functools.partial(
            grouped_matmul.expert_mlp, limit=limit, partial=partial, implementation=implementation
        ),
        compiler_options=COMPILER_OPTIONS,
    )


def run(arguments, implementation="pallas_interpret", *, limit=10.0, partial=False):
    return np.asarray(compiled(limit, partial, implementation)(*arguments))


def make(shape, seed=0):
    return grouped_matmul.make_arguments(shape, np.random.default_rng(seed))


def with_experts(arguments, experts):
    x, _, weights, *packed = arguments
    return x, jnp.asarray(experts, jnp.int32), weights, *packed


def poisoned(arguments):
    """Every byte of an expert that no row chose becomes 0xff, an infinite scale."""
    x, experts, weights, *packed = arguments
    idle = ~np.isin(np.arange(packed[0][0].shape[0]), np.asarray(experts))
    poison = jax.tree.map(lambda a: jnp.where(idle[:, None, None], jnp.uint8(255), a), packed)
    return x, experts, weights, *poison


def assert_close(result, expected):
    # Sums of products in another order: one bf16 rounding of a hidden value or of a result may
    # fall to the other side, and moves a hidden value's FP8 code.
    scale = np.sqrt(np.mean(np.square(expected)))
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, expected, rtol=2**-7, atol=2**-6 * scale)
    assert np.mean(np.abs(result - expected)) <= 2**-12 * scale


@pytest.mark.parametrize("shape", [TINY, NARROW, SLICE], ids=lambda shape: shape.name)
def test_kernels_agree_with_the_reference(shape):
    arguments = make(shape)
    found = run(arguments, partial=shape.partial)
    assert_close(found, run(arguments, "xla", partial=shape.partial))


def test_kernels_agree_at_the_released_hidden_size():
    shape = Shape(
        name="released", rows=2, intermediate=288, experts=2, hidden=5120, chosen=1, partial=True
    )
    arguments = make(shape)
    assert_close(run(arguments, partial=True), run(arguments, "xla", partial=True))


def exact_arguments(shape, seed=0):
    """Arguments with which every sum is exact, in any order and whatever is rounded.

    x and w1 are positive, so that every gate is clamped to the limit and the SwiGLU is one
    constant times an up projection of few small integers.
    """
    rng = np.random.default_rng(seed)
    x, experts, weights, *packed = make(shape, seed)
    x = jnp.asarray(rng.integers(1, 9, x.shape), jnp.bfloat16)

    def draw(array, codes, p=None):
        low, high = rng.choice(np.uint8(codes), (2, *array[0].shape), p=p)
        return jnp.asarray(low | high << 4), jnp.full_like(array[1], 127)

    w1, w2, w3 = packed
    w1, w2 = draw(w1, [2, 3, 4, 7]), draw(w2, [0, 1, 3, 7, 9, 15])
    return x, experts, jnp.ones_like(weights), w1, w2, draw(w3, [0, 2, 10], [0.96, 0.02, 0.02])


@pytest.mark.parametrize("shape", [TINY, NARROW, SLICE], ids=lambda shape: shape.name)
def test_exact_sums_give_the_bits_of_the_reference(shape):
    x, experts, weights, *packed = exact_arguments(shape)
    experts = experts.at[1, 0].set(-1).at[2].set(-1)
    arguments = poisoned((x, experts, weights, *packed))
    expected = run(arguments, "xla", partial=shape.partial)
    found = run(arguments, partial=shape.partial)
    assert np.count_nonzero(expected) > expected.size / 2
    np.testing.assert_array_equal(found, expected)
    assert not found[2].any()


def test_experts_nobody_chose_are_not_read():
    arguments = make(TINY)
    arguments = with_experts(arguments, np.where(arguments[1] >= 3, -1, arguments[1]))
    clean, dirty = run(arguments), run(poisoned(arguments))
    assert np.isfinite(dirty).all()
    np.testing.assert_array_equal(clean, dirty)


def test_ids_outside_the_held_experts_add_nothing():
    arguments = make(TINY)
    experts = np.asarray(arguments[1])
    out = np.array([-1, -7, TINY.experts, 10_000])
    outside = np.where(experts >= 3, out[experts % 4], experts)
    inside = run(with_experts(arguments, np.where(experts >= 3, -1, experts)))
    np.testing.assert_array_equal(run(with_experts(arguments, outside)), inside)
    assert not run(with_experts(arguments, np.full_like(experts, -1))).any()


def test_padding_rows_may_hold_nan():
    x, experts, weights, *packed = make(TINY)
    experts = experts.at[5:9].set(-1)
    clean = run((x, experts, weights, *packed))
    x, weights = x.at[5:9].set(jnp.nan), weights.at[5:9].set(jnp.nan)
    dirty = run((x, experts, weights, *packed))
    np.testing.assert_array_equal(clean, dirty)
    assert not dirty[5:9].any()


def test_all_rows_may_choose_one_expert():
    arguments = make(TINY)
    experts = np.full_like(arguments[1], -1)
    experts[:, 0] = 2
    arguments = poisoned(with_experts(arguments, experts))
    assert_close(run(arguments), run(arguments, "xla"))


def test_an_empty_batch_gives_no_rows():
    x, experts, weights, *packed = make(TINY)
    assert run((x[:0], experts[:0], weights[:0], *packed)).shape == (0, TINY.hidden)


def test_a_row_does_not_depend_on_its_batch():
    x, experts, weights, *packed = make(dataclasses.replace(TINY, rows=48))
    together = run((x, experts, weights, *packed))
    for rows in (slice(3, 4), slice(0, 16), slice(1, 17)):
        alone = run((x[rows], experts[rows], weights[rows], *packed))
        np.testing.assert_array_equal(alone, together[rows])


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_plan_holds_every_assignment_once(rows):
    count = 5
    experts = jnp.asarray(np.random.default_rng(rows).integers(-2, count + 2, (rows, 3)))
    plan, places = grouped_matmul.sort_by_expert(experts.astype(jnp.int32), count)
    flat = np.asarray(experts).reshape(-1)
    assert plan.expert.shape == (grouped_matmul.num_blocks(flat.size, count),)
    held = []
    for expert, first, used in zip(plan.expert, plan.first, plan.count, strict=True):
        block = np.asarray(plan.order)[int(first) : int(first) + int(used)]
        assert used <= grouped_kernels.ROW_BLOCK
        assert (flat[block] == int(expert)).all()
        held += block.tolist()
    assert held == sorted(np.flatnonzero((flat >= 0) & (flat < count)), key=lambda i: flat[i])
    for row, ids in zip(np.asarray(places), np.asarray(experts), strict=True):
        kept = np.sort(ids[(ids >= 0) & (ids < count)])
        assert (row[len(kept) :] == -1).all()
        assert (flat[np.asarray(plan.order)[row[: len(kept)]]] == kept).all()


@pytest.mark.parametrize("experts", [1, 4, 48, 384])
@pytest.mark.parametrize("assignments", [1, 6, 47, 384, 12288])
def test_blocks_suffice_for_the_worst_split(assignments, experts):
    # One row more than fits wherever that opens a block, the rest to one expert.
    active = min(assignments, experts)
    rows = np.ones(active, int)
    rest = assignments - active
    full = rest // grouped_kernels.ROW_BLOCK
    rows[0] += full * grouped_kernels.ROW_BLOCK
    needed = sum(math.ceil(r / grouped_kernels.ROW_BLOCK) for r in rows)
    assert needed == grouped_matmul.num_blocks(assignments, experts)


def test_blocks_divide_every_released_weight():
    for shape in SHAPES:
        up = grouped_kernels.gate_up_blocks(shape.intermediate)
        assert shape.intermediate % up.outputs == 0
        assert shape.hidden % grouped_kernels.down_blocks(shape.hidden).outputs == 0
        # A hidden row is quantized where it is made, in groups of its own program.
        assert up.outputs % formats.FP8_BLOCK == 0


def test_bytes_of_one_row_are_those_of_its_experts():
    (shape,) = (s for s in SHAPES if s.name == "decode 1 tp2")
    expert = 3 * 5120 * 1152 * 17 // 32
    assert grouped_matmul.active_experts(shape) == pytest.approx(6)
    assert 6 * expert < grouped_matmul.bytes(shape, 6) < 6.01 * expert
    assert grouped_matmul.flops(shape) == 6 * 3 * 2 * 5120 * 1152


COMPILED = ("decode 4 tp1", "decode 4 tp2", "decode 4 tp4", "decode 4 tp8", "prefill 512 tp2")


@pytest.mark.cuda12
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.name in COMPILED], ids=lambda s: s.name)
def test_kernels_compile_without_spills_or_copies_of_weights(shape):
    from sharding import kernel_report

    def mlp(*arguments):
        return grouped_matmul.run(shape, arguments, implementation="pallas")

    lowered = kernel_report.lower_for_h100(mlp, *grouped_matmul.abstract_arguments(shape))
    program, reports = kernel_report.compile_with_report(lowered)
    assert [r.name for r in reports if r.pallas] == ["expert_down", "expert_gate_up"]
    assert not [fault for report in reports for fault in report.faults]
    # Only the hidden rows, the results in sorted order and the plan lie in memory.
    assignments = shape.rows * shape.chosen
    rows = assignments * (2 * shape.intermediate + (4 if shape.partial else 2) * shape.hidden)
    assert program.memory_analysis().temp_size_in_bytes <= 1.1 * rows + 2**17
    made = re.findall(r"= (\w+)\[([\d,]+)\]\S* (?!parameter|bitcast)", program.as_text())
    sizes = {math.prod(int(n) for n in size.split(",")) for _, size in made}
    weight = shape.experts * shape.intermediate * shape.hidden
    assert not sizes & {weight, weight // 2, weight // 4}
    assert shape.rows * shape.experts * shape.hidden not in sizes
    assert shape.rows * shape.experts * shape.intermediate not in sizes
