"""Programs compiled for H100 without one."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dsv41_jax.forward import COMPILER_OPTIONS
from dsv41_jax.hf_config import load_config
from dsv41_jax.layer_plan import layer_spec
from dsv41_jax.layers.block import Block, Stream
from sharding.deviceless import h100_devices

pytestmark = pytest.mark.cuda12
ROWS = 16


@pytest.fixture(scope="module")
def write():
    """Compiles the writing half of a released compressing layer for one H100."""
    config = load_config("released")
    block = Block(config, layer_spec(config, 2))
    sharding = SingleDeviceSharding(h100_devices(1)[0])

    def place(shape):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    params = jax.eval_shape(block.init, jax.random.key(0))["params"]
    rows = (
        Stream(
            jax.ShapeDtypeStruct((ROWS, config.hc_mult, config.hidden_size), jnp.bfloat16),
            jax.ShapeDtypeStruct((ROWS, config.hc_mult), jnp.float32),
        ),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        jax.ShapeDtypeStruct((ROWS,), jnp.bool_),
    )
    arguments = jax.tree.map(place, (params, rows))

    def run(params, rows):
        return block.apply({"params": params}, *rows, None, method=Block.write)

    def compile(options):
        return jax.jit(run, compiler_options=options).trace(*arguments).lower().compile()

    return compile


def roundings(compiled):
    """How often float32 is converted to bf16 in a program."""
    return len(re.findall(r"= bf16\[[^=]* convert\(", compiled.as_text()))


def test_roundings_to_bf16_survive_only_with_the_compiler_option(write):
    kept, dropped = roundings(write(COMPILER_OPTIONS)), roundings(write({}))
    assert kept > dropped, (kept, dropped)
