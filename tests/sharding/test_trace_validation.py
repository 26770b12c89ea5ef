"""A stage that lacks a source cannot be traced, whatever the plan says."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from tiny_pipeline import tiny_config

from dsv41_jax.host_batch import build_batch
from dsv41_jax.layer_plan import SharingError
from dsv41_jax.layers.block import Stream
from dsv41_jax.state import init_state
from pallas_kernels.packed_rows import pack_window
from pallas_kernels.rowwise import ROW_TILE
from sharding.pipeline import stage_steps
from sharding.relay import Bundle
from sharding.stage_plan import lay_out, ranges_of
from sharding.tensor_plan import plan_tensor_parallel


def trace(config, stages, index):
    """Traces one stage of a plan that skipped the checks, as if nothing were relayed to it."""
    plan = lay_out(config, ranges_of(stages), relay=False)
    step = stage_steps(config, plan, plan_tensor_parallel(config, 1), "xla")[index]
    layers = step.stage.layers
    batch = build_batch(
        config, [], tokens=ROW_TILE, requests=1, columns=2, logit_rows=ROW_TILE, engram=None
    )
    table = jnp.zeros((ROW_TILE, config.engram.num_columns, config.engram.head_dim), jnp.bfloat16)
    engram = {layer: pack_window(table) for layer in step.contents.engram_layers}
    batch = dataclasses.replace(jax.tree.map(jnp.asarray, batch), engram=engram)

    def run():
        params = nn.unbox(step.stage.init())
        state = init_state(config, layers, window_pages=2, global_pages=2, slots=1)
        rows = (ROW_TILE, config.hc_mult)
        stream = Stream(jnp.zeros((*rows, config.hidden_size), jnp.bfloat16), jnp.zeros(rows))
        return step(params, state, batch, Bundle(stream, {}, {}, {}, {}), None)

    return jax.eval_shape(run)


@pytest.mark.parametrize(
    ("stages", "index", "message"),
    [
        ((2, 4), 1, r"pipeline stage 1: stage of layers 2 to 5: layer 2 reads the kv of .*layer 1"),
        ((4, 2), 1, r"pipeline stage 1: stage of layers 4 to 5: layer 4 reads the kv of .*layer 3"),
        ((5, 1), 1, r"pipeline stage 1: stage of layers 5 to 5: layer 5 reads the kv of .*layer 3"),
    ],
)
def test_a_stage_without_a_source_fails_while_tracing(stages, index, message):
    with pytest.raises(SharingError, match=message):
        trace(tiny_config(), stages, index)
