"""Index scores and selection: kernels against the references, and what they compile to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.forward import COMPILER_OPTIONS
from pallas_kernels import index_topk
from pallas_kernels.index_topk import SHAPES, Shape
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.paging import slot

RELEASED = Shape(name="released", op="scores", rows=3, positions=640)
TINY = Shape(name="tiny", op="scores", rows=4, positions=56, rows_per_page=8, heads=4, dim=32)
ODD = Shape(name="odd", op="scores", rows=2, positions=72, rows_per_page=8, heads=1, dim=96)


@functools.cache
def compiled(name, implementation, **static):
    fn = getattr(index_topk, name)
    return jax.jit(
        functools.partial(fn, implementation=implementation, **static),
        compiler_options=COMPILER_OPTIONS,
    )


def scores(arguments, shape, implementation="pallas_interpret"):
    static = {"rows_per_page": shape.rows_per_page}
    return np.asarray(compiled("paged_index_scores", implementation, **static)(*arguments))


def topk(values, k, implementation="pallas_interpret"):
    return np.asarray(compiled("topk_positions", implementation, k=k)(jnp.asarray(values)))


def ragged(shape, seed=0):
    """Rows that see nothing, a part and all; pages not kept; a padding row."""
    rng = np.random.default_rng(seed)
    q, weights, keys, table, visible = index_topk.make_arguments(shape, rng)
    visible, table = np.array(visible), np.array(table)
    visible[0] = shape.positions - 5
    table[0, 1] = -1
    visible[1:] = rng.integers(1, shape.positions, shape.rows - 1)
    table[1, 3:] = -1
    table[-1], visible[-1] = -1, 0
    return q, weights, keys, jnp.asarray(table), jnp.asarray(visible)


def alone(arguments, index):
    q, weights, keys, table, visible = arguments
    row = slice(index, index + 1)
    return q[row], weights[row], keys, table[row], visible[row]


def among(arguments, index, rows, place):
    """One row of the arguments at some place among copies of the others."""
    order = np.resize(np.arange(len(arguments[4])), rows)
    order[place] = index
    q, weights, keys, table, visible = arguments
    return q[order], weights[order], keys, table[order], visible[order]


@pytest.mark.parametrize("shape", [RELEASED, TINY, ODD], ids=lambda shape: shape.name)
def test_scores_have_the_bits_of_the_reference(shape):
    # Products of FP4 values are multiples of small powers of two: every sum is exact here.
    arguments = ragged(shape)
    found = scores(arguments, shape)
    np.testing.assert_array_equal(found, scores(arguments, shape, "xla"))
    assert np.isfinite(found).any()


def test_positions_that_are_not_seen_or_kept_score_minus_infinity():
    arguments = ragged(TINY)
    table, visible = arguments[3:]
    position = jnp.arange(TINY.positions)[None]
    where = slot(table, jnp.where(position < visible[:, None], position, -1), TINY.rows_per_page)
    np.testing.assert_array_equal(np.isfinite(scores(arguments, TINY)), np.asarray(where) >= 0)


def test_scores_do_not_depend_on_keys_that_are_not_seen():
    q, weights, keys, table, visible = arguments = ragged(TINY)
    position = jnp.arange(TINY.positions)[None]
    where = slot(table, jnp.where(position < visible[:, None], position, -1), TINY.rows_per_page)
    seen = np.isin(np.arange(keys.codes.shape[0]), np.asarray(where))[:, None]
    poison = jax.tree.map(lambda a: jnp.where(seen, a, jnp.uint8(255)), keys)
    found = scores((q, weights, poison, table, visible), TINY)
    np.testing.assert_array_equal(found, scores(arguments, TINY))


def test_score_of_heads_below_zero_is_not_minus_zero():
    q, weights, keys, table, visible = index_topk.make_arguments(TINY, np.random.default_rng(0))
    keys = PackedRows(keys.codes & 0x77, keys.scales)  # no key is negative, every query is
    found = scores((-jnp.abs(q), -jnp.abs(weights), keys, table, visible), TINY)
    assert (found == 0).all() and not np.signbit(found).any()


@pytest.mark.parametrize(("rows", "place"), [(16, 0), (16, 7), (64, 63)])
def test_scores_of_a_row_do_not_depend_on_the_batch(rows, place):
    arguments = ragged(TINY)
    row = scores(alone(arguments, 1), TINY)[0]
    found = scores(among(arguments, 1, rows, place), TINY)
    np.testing.assert_array_equal(found[place], row)


def bf16(values):
    return np.array(jnp.asarray(values, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32))


def rows_of(length, rng):
    """Distinct, tied, few, none, signed zeros, all equal, and the whole range of exponents."""
    normal = bf16(rng.standard_normal(length))
    few = np.full(length, -np.inf)
    few[rng.permutation(length)[:3]] = normal[:3]
    zeros = np.where(rng.random(length) < 0.5, np.float32(-0.0), np.float32(0.0))
    wide = bf16(normal * np.exp2(rng.integers(-120, 120, length).astype(np.float32)))
    masked = np.where(rng.random(length) < 0.7, -np.inf, np.round(normal * 4) / 4)
    none = np.full(length, -np.inf)
    rows = [normal, np.round(normal * 4) / 4, few, none, zeros, np.full(length, 1.5), wide, masked]
    return np.stack(rows).astype(np.float32)


@pytest.mark.parametrize(
    ("length", "k"), [(5000, 512), (2048, 512), (56, 24), (7, 8), (36000, 512)]
)
def test_selection_is_that_of_the_reference(length, k):
    values = rows_of(length, np.random.default_rng(length))
    found = topk(values, k)
    np.testing.assert_array_equal(found, topk(values, k, "xla"))


def test_selection_orders_signed_zeros_like_the_reference():
    values = np.array([[-0.0, 0.0, -0.0, 1.0, 0.0]], np.float32)
    np.testing.assert_array_equal(topk(values, 3), [[1, 3, 4]])
    np.testing.assert_array_equal(topk(values, 3, "xla"), [[1, 3, 4]])


@pytest.mark.parametrize(
    ("length", "block_size", "topk_blocks"), [(5003, 8, 100), (56, 8, 2), (40000, 1, 2048)]
)
def test_candidate_blocks_are_those_of_the_reference(length, block_size, topk_blocks):
    rng = np.random.default_rng(length)
    values = jnp.asarray(rows_of(length, rng))
    newest = rng.integers(0, length, values.shape[0])
    newest[3] = -1
    static = {"block_size": block_size, "topk_blocks": topk_blocks}
    found, expected = (
        compiled("select_candidate_blocks", implementation, **static)(
            values, jnp.asarray(newest, jnp.int32)
        )
        for implementation in ("pallas_interpret", "xla")
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.cuda12
@pytest.mark.parametrize(
    "name",
    ["scores decode 16", "scores decode 16 ratio 2", "scores prefill 16 of a million",
     "topk decode 64", "topk prefill 16 of a million", "candidates decode 16"],
)  # fmt: skip
def test_kernels_fit_the_gpu(name):
    from sharding.kernel_report import compile_kernels

    (shape,) = (shape for shape in SHAPES if shape.name == name)
    reports = compile_kernels(
        functools.partial(index_topk.run, shape, implementation="pallas"),
        index_topk.abstract_arguments(shape),
    )
    own = [report for report in reports if report.pallas]
    assert own and not [fault for report in own for fault in report.faults]
    if shape.op == "scores":
        assert own[0].wgmma


@pytest.mark.cuda12
@pytest.mark.parametrize("name", ["topk decode 64", "candidates decode 64"])
def test_selection_sorts_nothing_and_copies_no_scores(name):
    from sharding.kernel_report import lower_for_h100

    (shape,) = (shape for shape in SHAPES if shape.name == name)
    run = functools.partial(index_topk.run, shape, implementation="pallas")
    program = lower_for_h100(run, index_topk.abstract_arguments(shape)).compile()
    assert "sort(" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < shape.rows * shape.positions
