"""The stream at a stage boundary: split by rows at the exit, whole again at the entry."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_pipeline import LEGAL, LENGTH

import sharding
from dsv41_jax.axes import TENSOR
from dsv41_jax.host_batch import round_rows
from dsv41_jax.inference import columns_for, request_rows, window_ring
from dsv41_jax.layers.block import Stream
from sharding.boundary import gather_rows, shard_rows
from sharding.pipeline import build_pipeline
from sharding.stage_runner import Bucket

ROWS = 16


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_rows_are_split_padded_gathered_and_trimmed(devices):
    mesh = jax.make_mesh((devices,), (TENSOR,), devices=jax.devices()[:devices])
    x = jnp.arange(ROWS * 4 * 8, dtype=jnp.float32).reshape(ROWS, 4, 8).astype(jnp.bfloat16)
    stream = Stream(x, jnp.arange(ROWS * 4, dtype=jnp.float32).reshape(ROWS, 4))
    rows, everywhere = PartitionSpec(TENSOR), PartitionSpec()

    def on_mesh(fn, given, returned):
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False)
        return jax.jit(mapped)

    split = on_mesh(lambda s: shard_rows(s, devices), everywhere, rows)(stream)
    share = -(-ROWS // devices)
    for leaf in jax.tree.leaves(split):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {share}
        assert leaf.shape[0] == share * devices
    whole = on_mesh(lambda s: gather_rows(s, ROWS, devices), rows, everywhere)(split)
    chex.assert_trees_all_equal(whole, stream)


def test_a_stage_sends_each_row_from_one_device(pipeline_of, token_ids):
    pipeline = pipeline_of(LEGAL, tensor=2, expert=False)
    first, config = pipeline.stages[0], pipeline.config
    pages = columns_for(config, LENGTH)
    bucket = Bucket(tokens=round_rows(LENGTH), requests=1, columns=pages, logit_rows=16)
    state = first.init_state(window_pages=window_ring(config, LENGTH), global_pages=pages, slots=1)
    rows = request_rows(config, token_ids.tolist(), 0, LENGTH, LENGTH)
    bundle, _ = first.dispatch(state, [rows], bucket, None, None)
    for leaf in jax.tree.leaves(bundle.stream):
        assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [
            bucket.tokens // 2
        ] * 2
        assert np.asarray(leaf).shape[0] == bucket.tokens


def test_the_package_offers_the_pipeline():
    assert sharding.build_pipeline is build_pipeline
    with pytest.raises(AttributeError, match="no attribute 'build_pipelines'"):
        sharding.build_pipelines  # noqa: B018
