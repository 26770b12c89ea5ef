"""Cache writes: kernels against the reference, and what they compile to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.forward import COMPILER_OPTIONS
from pallas_kernels import kv_write
from pallas_kernels.kv_write import SHAPES
from pallas_kernels.packed_rows import pack_index, pack_kv, pack_window
from pallas_kernels.rope import turn

PACK = {"window": pack_window, "kv": pack_kv, "index_k": pack_index}
DIMS = [("window", 512, 64), ("kv", 512, 64), ("index_k", 128, 64), ("window", 64, 16),
        ("kv", 64, 32), ("index_k", 32, 16), ("kv", 96, 32)]  # fmt: skip


@functools.cache
def compiled(row_format, implementation):
    def write(cache, slots, x, weight, cos, sin):
        return kv_write.write_rows(
            cache, slots, x, weight, cos, sin, row_format=row_format, eps=1e-20,
            count=jnp.int32(x.shape[0]), implementation=implementation,
        )  # fmt: skip

    return jax.jit(write, compiler_options=COMPILER_OPTIONS)


def write(arguments, row_format, implementation="pallas_interpret"):
    written = compiled(row_format, implementation)(*arguments)
    return jax.tree.map(np.asarray, written)


def make(row_format, dim, turning, *, rows=16, cached=40, seed=0):
    """Rows that RMSNorm and rope change exactly: sums in any order have the same bits.

    A row is +-2^n throughout, so that its norm is +-1 and the weight decides the values; cosines
    and sines have few bits.
    """
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1.0, 1.0], (rows, dim))
    power = np.exp2(rng.integers(-9, 10, (rows, 1)))
    weight = rng.integers(1, 128, dim) * np.exp2(rng.integers(-8, 3, dim)) / 16
    weight[::17] = 0
    cos, sin = (rng.choice([-1, -0.5, 0, 0.25, 1], (rows, turning // 2)) for _ in range(2))
    blank = jax.eval_shape(PACK[row_format], jax.ShapeDtypeStruct((cached, dim), jnp.bfloat16))
    cache = jax.tree.map(
        lambda a: jnp.asarray(rng.choice([0x7F, 0xFF, 3], a.shape).astype(np.uint8)), blank
    )
    slots = rng.permutation(cached)[:rows].astype(np.int32)
    slots[[3, 9]] = -1
    return (
        cache,
        jnp.asarray(slots),
        jnp.asarray(sign * power, jnp.bfloat16),
        jnp.asarray(weight, jnp.bfloat16),
        jnp.asarray(cos, jnp.float32),
        jnp.asarray(sin, jnp.float32),
    )


def assert_rows_equal(found, expected):
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize(("row_format", "dim", "turning"), DIMS)
def test_rows_have_the_bits_of_the_reference(row_format, dim, turning):
    arguments = make(row_format, dim, turning)
    assert_rows_equal(write(arguments, row_format), write(arguments, row_format, "xla"))


@pytest.mark.parametrize("row_format", PACK)
def test_rows_are_those_of_the_format(row_format):
    cache, slots, x, weight, cos, sin = arguments = make(row_format, 128, 64)
    normed = jnp.sign(x) * weight[None]
    rows = jax.jit(PACK[row_format], compiler_options=COMPILER_OPTIONS)(turn(normed, cos, sin))
    found, kept = write(arguments, row_format), np.asarray(slots) >= 0
    where = np.asarray(slots)[kept]
    np.testing.assert_array_equal(found.codes[where], np.asarray(rows.codes)[kept])
    np.testing.assert_array_equal(found.scales[where], np.asarray(rows.scales)[kept])


@pytest.mark.parametrize("row_format", PACK)
def test_random_rows_differ_in_few_codes(row_format):
    # RMSNorm adds in another order: a bf16 may fall to the other side, and a code with it.
    cache, slots, x, weight, cos, sin = make(row_format, 128, 64)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal(x.shape), jnp.bfloat16)
    angles = rng.uniform(-np.pi, np.pi, cos.shape)
    cos, sin = (jnp.asarray(fn(angles), jnp.float32) for fn in (np.cos, np.sin))
    arguments = (cache, slots, x, weight, cos, sin)
    found, expected = write(arguments, row_format), write(arguments, row_format, "xla")
    assert np.mean(found.codes != expected.codes) < 0.01
    assert np.mean(found.scales != expected.scales) < 0.01


def test_rows_without_a_slot_and_other_rows_stay():
    cache, slots, *_ = arguments = make("kv", 64, 16)
    found = write(arguments, "kv")
    others = np.setdiff1d(np.arange(cache.codes.shape[0]), np.asarray(slots))
    np.testing.assert_array_equal(found.codes[others], np.asarray(cache.codes)[others])
    np.testing.assert_array_equal(found.scales[others], np.asarray(cache.scales)[others])


def test_rows_without_a_slot_may_hold_anything():
    cache, slots, x, *others = make("window", 64, 16)
    poison = jnp.where((slots < 0)[:, None], jnp.bfloat16(jnp.nan), x)
    found = write((cache, slots, poison, *others), "window")
    assert_rows_equal(found, write((cache, slots, x, *others), "window"))


def test_empty_batch_leaves_the_cache():
    cache, slots, *others = make("index_k", 32, 16)
    found = write((cache, jnp.full_like(slots, -1), *others), "index_k")
    assert_rows_equal(found, jax.tree.map(np.asarray, cache))


@pytest.mark.parametrize(("rows", "place"), [(1, 0), (16, 7), (64, 63)])
def test_a_row_does_not_depend_on_the_batch(rows, place):
    cache, _, x, weight, cos, sin = make("kv", 64, 16, rows=64, cached=70)
    x = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), jnp.bfloat16)
    order = np.arange(rows) + 1
    order[place] = 0
    order %= 64
    slots = jnp.asarray(order + 3, jnp.int32)
    found = write((cache, slots, x[order], weight, cos[order], sin[order]), "kv")
    first = slice(0, 16)
    slots = jnp.arange(16, dtype=jnp.int32) + 3
    expected = write((cache, slots, x[first], weight, cos[first], sin[first]), "kv")
    np.testing.assert_array_equal(found.codes[3], expected.codes[3])
    np.testing.assert_array_equal(found.scales[3], expected.scales[3])


@pytest.mark.cuda12
@pytest.mark.parametrize("name", [f"{row_format} prefill 512" for row_format in PACK])
def test_kernels_fit_the_gpu_and_write_in_place(name):
    from sharding.kernel_report import compile_with_report, lower_for_h100

    (shape,) = (shape for shape in SHAPES if shape.name == name)
    arguments = kv_write.abstract_arguments(shape)
    run = functools.partial(kv_write.run, shape, implementation="pallas")
    lowered = lower_for_h100(lambda *a: run(a), *arguments, donated=(0,))
    program, reports = compile_with_report(lowered)
    (kernel,) = reports
    assert kernel.pallas and not kernel.faults
    memory = program.memory_analysis()
    cache_bytes = sum(a.size for a in jax.tree.leaves(arguments[0]))
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes == 0
