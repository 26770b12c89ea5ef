"""The hop between stages, with both stages in one process: device by device, nothing changed."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_pipeline import tiny_config

from dsv41_jax.layers.block import Stream
from sharding.boundary import bundle_shardings
from sharding.hop import Hop
from sharding.hosts import connect, on_one_process, place, processes_of, stage_devices
from sharding.mesh import stage_meshes
from sharding.relay import Bundle
from sharding.rules import replicated


@pytest.mark.parametrize("devices", [1, 2])
def test_the_next_stage_receives_what_was_sent(devices):
    config = tiny_config()
    sender, receiver = stage_meshes(2, devices)
    tokens = 7  # the last device's share is padded
    rows = -(-tokens // devices) * devices
    rng = np.random.default_rng(0)
    sizes = (rows, config.hc_mult, config.hidden_size)
    stream = Stream(
        jnp.asarray(rng.normal(size=sizes), jnp.bfloat16),
        jnp.asarray(rng.normal(size=sizes[:2]), jnp.float32),
    )
    sent = Bundle(stream, {}, {}, {}, {})
    sent = jax.device_put(sent, bundle_shardings(sender))
    hop = Hop(config, sender, receiver)
    for _ in range(2):
        received = hop.carry(sent, tokens)
        chex.assert_trees_all_equal(received, Bundle(stream, {}, {}, {}, {}))
        to = bundle_shardings(receiver).stream
        assert received.stream.x.sharding.is_equivalent_to(to.x, 3)
        assert received.stream.pre.sharding.is_equivalent_to(to.pre, 2)


def test_one_process_places_and_orders_as_ever():
    (mesh,) = stage_meshes(1, 2)
    assert on_one_process([mesh]) and processes_of(mesh) == [0]
    assert stage_devices() == jax.devices()
    connect([mesh])
    placed = place({"a": np.arange(3)}, mesh)
    assert placed["a"].sharding == replicated(mesh)
