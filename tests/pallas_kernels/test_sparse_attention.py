"""Attention over packed cache rows: kernels against the reference."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_kernels, packed_rows, sparse_attention
from pallas_kernels.packed_rows import PackedRows
from pallas_kernels.sparse_attention import SHAPES, Shape

SMALL = dict(window_rows=40, chosen_rows=90)
TINY = Shape(name="tiny", rows=3, heads=2, window=16, chosen=24, dim=64, rope=16, **SMALL)
RELEASED = Shape(name="released", rows=2, heads=32, **SMALL)
CASES = (
    TINY,
    dataclasses.replace(TINY, name="one head, ragged", heads=1, window=48, chosen=150, rope=32),
    dataclasses.replace(TINY, name="window only", heads=4, chosen=0),
    RELEASED,
    dataclasses.replace(RELEASED, name="padded heads", rows=1, heads=8),
)


def arguments(shape, unused=0.2, seed=0):
    """Arguments with a share of slots unused; the last of several rows has no key."""
    rng = np.random.default_rng(seed)
    made = list(sparse_attention.make_arguments(shape, rng))
    for index in (2, 4) if shape.chosen else (2,):
        slots = np.where(rng.random(made[index].shape) < unused, -1, made[index])
        if shape.rows > 1:
            slots[-1] = -1
        made[index] = jnp.asarray(slots, jnp.int32)
    return tuple(made)


def attend(shape, arguments, implementation="pallas_interpret"):
    fn = functools.partial(sparse_attention.run, shape, implementation=implementation)
    return np.asarray(jax.jit(fn)(arguments), np.float32)


def exact(shape, arguments):
    """float64 attention, turned back, without any rounding."""
    q, window, window_slots, chosen, chosen_slots, sink, cos, sin = arguments
    keys, slots = packed_rows.unpack_window(packed_rows.gather(window, window_slots)), window_slots
    if chosen is not None:
        rows = packed_rows.unpack_kv(packed_rows.gather(chosen, chosen_slots))
        keys, slots = np.concatenate([keys, rows], 1), np.concatenate([slots, chosen_slots], 1)
    q, keys, sink = (np.asarray(a, np.float64) for a in (q, keys, sink))
    p = np.exp(np.einsum("thd,tkd->thk", q, keys) * shape.dim**-0.5)
    p = np.where(np.asarray(slots)[:, None] >= 0, p, 0)
    out = np.einsum("thk,tkd->thd", p, keys) / (p.sum(-1) + np.exp(sink))[..., None]
    turned = (out[..., -shape.rope :: 2] + 1j * out[..., 1 - shape.rope :: 2]) * (
        np.asarray(cos, np.float64) - 1j * np.asarray(sin, np.float64)
    )[:, None]
    out[..., -shape.rope :: 2], out[..., 1 - shape.rope :: 2] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("shape", CASES, ids=lambda shape: shape.name)
def test_kernels_are_as_exact_as_the_reference(shape):
    given = arguments(shape)
    found, reference, truth = attend(shape, given), attend(shape, given, "xla"), exact(shape, given)
    chex.assert_tree_all_finite(found)
    # Probabilities are rounded to bf16 against other maxima, so last bits differ.
    np.testing.assert_allclose(found, reference, rtol=2**-6, atol=2**-8)
    off, reference_off = (np.sqrt(np.mean((a - truth) ** 2)) for a in (found, reference))
    assert off <= 1.1 * reference_off
    if shape.rows > 1:
        assert not found[-1].any()


def test_unused_cache_rows_may_hold_nan():
    shape = dataclasses.replace(TINY, heads=4)
    q, window, window_slots, chosen, chosen_slots, *rest = arguments(shape)

    def filled(rows: PackedRows, slots, byte):
        used = np.isin(np.arange(rows.codes.shape[0]), slots)[:, None]
        return jax.tree.map(lambda a: jnp.where(used, a, jnp.uint8(byte)), rows)

    window_slots, chosen_slots = window_slots // 2, chosen_slots // 2  # row 0 in use, -1 stays
    found = [
        attend(
            shape,
            (
                q,
                filled(window, window_slots, byte),
                window_slots,
                filled(chosen, chosen_slots, byte),
                chosen_slots,
                *rest,
            ),
        )
        for byte in (0, 0x7F, 0xFF)
    ]
    chex.assert_trees_all_equal(*found)
    without = [-1 * jnp.ones_like(slots) for slots in (window_slots, chosen_slots)]
    nan = [filled(rows, -1, 0xFF) for rows in (window, chosen)]
    assert not attend(shape, (q, nan[0], without[0], nan[1], without[1], *rest)).any()


@pytest.fixture(scope="module")
def many():
    """64 rows attended at once, and their arguments."""
    shape = dataclasses.replace(TINY, rows=64, heads=1)
    given = arguments(shape, seed=1)
    return shape, given, attend(shape, given)


def rows_of(given, rows):
    per_row = (0, 2, 4, 6, 7)
    return tuple(a[rows] if i in per_row else a for i, a in enumerate(given))


@pytest.mark.parametrize("rows", [slice(5, 6), slice(5, 21), slice(2, 18)], ids=str)
def test_a_row_does_not_depend_on_the_others(many, rows):
    shape, given, whole = many
    chex.assert_trees_all_equal(attend(shape, rows_of(given, rows)), whole[rows])


def test_chunks_of_rows_are_the_whole(many, monkeypatch):
    shape, given, whole = many
    some = rows_of(given, slice(0, 11))
    monkeypatch.setattr(attention_kernels, "PARTIAL_BYTES", 5 * 2 * shape.dim * 4)
    fn = functools.partial(sparse_attention.run, shape, implementation="pallas_interpret")
    assert "f32[4,2,1,64]" in str(jax.make_jaxpr(fn)(some))
    chex.assert_trees_all_equal(attend(shape, some), whole[:11])


def test_a_large_sink_takes_the_weight():
    given = list(arguments(TINY))
    given[5] = jnp.full_like(given[5], 200.0)
    assert not attend(TINY, tuple(given)).any()


def test_blocks_depend_on_heads_and_channels():
    sizes = {shape.heads: attention_kernels.choose_blocks(shape.heads, 512) for shape in SHAPES}
    assert {heads: blocks.heads for heads, blocks in sizes.items()} == {
        64: 32,
        32: 32,
        16: 16,
        8: 16,
    }
    with pytest.raises(ValueError, match="head dimension is 96"):
        attention_kernels.choose_blocks(8, 96)


def test_caches_beyond_the_offsets_are_refused():
    shape = dataclasses.replace(RELEASED, window_rows=2**22 + 1, chosen=0)
    with pytest.raises(ValueError, match="sparse_attention cannot address"):
        jax.eval_shape(
            lambda *given: sparse_attention.run(shape, given, implementation="pallas"),
            *sparse_attention.abstract_arguments(shape),
        )


def test_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        sparse_attention.run(TINY, arguments(TINY), implementation="cuda")


def test_released_shapes_count_products_and_bytes():
    shape = next(shape for shape in SHAPES if shape.name == "decode 4 tp2")
    assert sparse_attention.flops(shape) == 4 * 4 * 32 * 640 * 512
    keys = 4 * (128 * 528 + 512 * 288)
    assert sparse_attention.bytes(shape) == keys + 4 * 4 * (640 + 32 * 512 + 64)
    assert math.isclose(
        sparse_attention.flops(SHAPES[0]) / sparse_attention.flops(SHAPES[1]), 1 / 4
    )


COMPILED = (
    ("decode 4 tp1", "decode 4 tp2", "decode 4 tp2 window", "decode 4 tp4", "decode 4 tp8"),
    ("prefill 2048 tp2",),
)


def named(name):
    (shape,) = (shape for shape in SHAPES if shape.name == name)
    return shape


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*COMPILED[0], "prefill 512 tp8"])
def test_kernels_agree_with_the_reference_on_a_gpu(name):
    shape = named(name)
    given = arguments(shape)
    found, reference = attend(shape, given, "pallas"), attend(shape, given, "xla")
    np.testing.assert_allclose(found, reference, rtol=2**-6, atol=2**-8)


@pytest.mark.cuda12
@pytest.mark.parametrize("names", COMPILED, ids=("decode", "prefill"))
def test_kernels_compile_without_spills_at_released_sizes(names):
    from sharding.kernel_report import compile_with_report, lower_for_h100

    given = [sparse_attention.abstract_arguments(named(name)) for name in names]

    def every(given):
        return [
            sparse_attention.run(named(name), each, implementation="pallas")
            for name, each in zip(names, given, strict=True)
        ]

    program, reports = compile_with_report(lower_for_h100(every, given))
    kernels = [report for report in reports if report.pallas]
    assert sum(report.launches for report in kernels) == 2 * len(names)
    assert not [fault for report in kernels for fault in report.faults]
    assert all(report.mma for report in kernels if "join" not in report.name)
    # Partial sums of one chunk, and what slices it off; no copy of a cache.
    assert program.memory_analysis().temp_size_in_bytes < 64 * 2**20
