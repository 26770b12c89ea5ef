"""Which implementation runs, and arrays that kernels could not address."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import dispatch, sparse_attention
from pallas_kernels.packed_rows import PackedRows

GIB = 2**30


def test_default_is_the_backends():
    assert dispatch.resolve(None) == ("pallas" if jax.default_backend() == "gpu" else "xla")


@pytest.mark.parametrize("name", dispatch.IMPLEMENTATIONS)
def test_every_implementation_resolves_to_itself(name):
    assert dispatch.resolve(name) == name


def test_unknown_implementation_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="'triton'; it must be one of xla, pallas, pallas_interp"):
        dispatch.resolve("triton")


@pytest.mark.parametrize(
    "elements, itemsize",
    [(2 * GIB, 1), (GIB, 2), (2 * GIB, 2), (4 * GIB + 1, 1), (3 * GIB, 2), (8 * GIB, 4)],
)
def test_arrays_within_32_bit_offsets_or_beyond_4_gib_pass(elements, itemsize):
    dispatch.check_offsets("kernel", (elements,), itemsize)


@pytest.mark.parametrize("elements", [2 * GIB + 1, 3 * GIB, 4 * GIB])
def test_byte_arrays_between_2_and_4_gib_are_refused_by_name(elements):
    with pytest.raises(ValueError, match=rf"kernel scores cannot address .*\({elements},\)"):
        dispatch.check_offsets("scores", (elements,), 1)


def test_a_launch_checks_its_results_too():
    x = jax.ShapeDtypeStruct((4,), jnp.uint8)
    launch = functools.partial(
        dispatch.launch,
        lambda x_ref, out_ref: None,
        name="grow",
        grid=(1,),
        in_specs=[dispatch.whole(x)],
        out_specs=pl.BlockSpec((4,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((3 * GIB,), jnp.uint8),
        num_warps=4,
        num_stages=1,
        implementation="pallas",
    )
    with pytest.raises(ValueError, match="kernel grow cannot address"):
        jax.eval_shape(launch, x)


def test_interpreted_kernel_updates_an_aliased_argument():
    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    x = jnp.arange(4.0)
    out = dispatch.launch(
        double,
        x,
        name="double",
        grid=(1,),
        in_specs=[dispatch.whole(x)],
        out_specs=dispatch.whole(x),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_warps=4,
        num_stages=1,
        implementation="pallas_interpret",
        input_output_aliases={0: 0},
    )
    np.testing.assert_array_equal(out, [0, 2, 4, 6])


def attention_arguments(cache_rows):
    """Decode of four rows over a window cache of so many rows, without values."""

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    return (
        array((4, 32, 512), jnp.bfloat16),
        PackedRows(array((cache_rows, 512), jnp.uint8), array((cache_rows, 16), jnp.uint8)),
        array((4, 128), jnp.int32),
        array((32,), jnp.float32),
        array((4, 32), jnp.float32),
        array((4, 32), jnp.float32),
    )


def attend(q, window, slots, sink, cos, sin):
    return sparse_attention.sparse_attention(
        q, window, slots, None, None, sink, cos, sin, scale=1.0, implementation="pallas"
    )


def test_cache_between_2_and_4_gib_is_refused_while_tracing():
    with pytest.raises(ValueError, match="kernel sparse_attention cannot address"):
        jax.eval_shape(attend, *attention_arguments(3 * GIB // 512))


@pytest.mark.cuda12
def test_cache_over_4_gib_compiles_with_64_bit_offsets():
    from sharding.kernel_report import compile_kernels

    reports = compile_kernels(attend, *attention_arguments(5 * GIB // 512))
    assert not [fault for report in reports for fault in report.faults]
