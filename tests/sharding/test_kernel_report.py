"""Reports of kernels compiled for a GPU that is not there."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from sharding import kernel_report
from sharding.kernel_report import SHARED_LIMIT, KernelReport, compile_kernels

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)


def report(**changes):
    fields = dict(launches=1, threads=128, registers=64, spill_bytes=0, shared_bytes=0)
    instructions = dict(tf32=0, wgmma=0, mma=0)
    return KernelReport(**{"name": "k", "pallas": True} | fields | instructions | changes)


def test_kernel_within_the_limits_has_no_faults():
    assert report(shared_bytes=SHARED_LIMIT).faults == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spill_bytes": 8}, "k spills 8 bytes"),
        ({"shared_bytes": SHARED_LIMIT + 1}, "asks for 232449 bytes"),
        ({"tf32": 2}, "TF32"),
    ],
)
def test_faults_name_kernel_and_figure(changes, words):
    (fault,) = report(**changes).faults
    assert words in fault


def multiply(x, y, *, name):
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    return dispatch.launch(
        kernel,
        x,
        y,
        name=name,
        grid=(1,),
        in_specs=[dispatch.whole(x), dispatch.whole(y)],
        out_specs=dispatch.whole(jax.ShapeDtypeStruct(x.shape, jnp.float32)),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        num_warps=4,
        num_stages=1,
        implementation="pallas",
    )


@pytest.mark.cuda12
def test_report_names_kernels_and_counts_launches_and_instructions():
    def run(x):
        first = multiply(x, x, name="square")
        return multiply(first.astype(jnp.bfloat16), x, name="square"), jnp.sin(first)

    kernels = compile_kernels(run, SQUARE)
    (square,) = [kernel for kernel in kernels if kernel.pallas]
    assert (square.name, square.launches, square.threads) == ("square", 2, 128)
    assert square.wgmma + square.mma > 0
    assert square.registers > 0
    assert square.shared_bytes >= 2 * 64 * 64 * 2
    assert square.faults == ()
    assert any(not kernel.pallas for kernel in kernels)


@pytest.mark.cuda12
def test_reports_do_not_depend_on_cached_programs():
    assert jax.config.jax_enable_compilation_cache
    fn = functools.partial(multiply, name="twice")
    assert compile_kernels(fn, SQUARE, SQUARE) == compile_kernels(fn, SQUARE, SQUARE)
    assert jax.config.jax_enable_compilation_cache


@pytest.mark.cuda12
def test_kernel_without_ptx_is_an_error(monkeypatch):
    monkeypatch.setattr(kernel_report, "_ENTRY", re.compile("no such entry"))
    with pytest.raises(RuntimeError, match="shows no PTX of the kernels hidden, so"):
        compile_kernels(functools.partial(multiply, name="hidden"), SQUARE, SQUARE)


@pytest.mark.cuda12
def test_products_in_tf32_are_counted():
    def dot(x):
        return jnp.dot(x, x, preferred_element_type=jnp.float32)

    wide = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert sum(kernel.tf32 for kernel in compile_kernels(dot, wide))
