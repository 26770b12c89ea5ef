"""Devices that share a stage: what they hold, what they send each other, what they compute."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_pipeline import CROSSING, LEGAL, LENGTH, tiny_config

from dsv41_jax.checkpoint import load_params
from dsv41_jax.host_batch import build_batch, round_rows
from dsv41_jax.inference import columns_for, request_rows, window_ring
from dsv41_jax.model import Stage
from dsv41_jax.state import init_state
from sharding.limits import engine_limits
from sharding.memory import plan_stage_caches, stage_bytes
from sharding.stage_runner import Bucket
from sharding.tensor_plan import plan_tensor_parallel
from sharding.traffic import all_reduces

SPLITS = pytest.mark.parametrize("expert", [False, True], ids=["channels", "experts"])


def bucket_and_pools(config):
    pages = columns_for(config, LENGTH)
    bucket = Bucket(tokens=round_rows(LENGTH), requests=1, columns=pages, logit_rows=16)
    return bucket, dict(window_pages=window_ring(config, LENGTH), global_pages=pages, slots=1)


@pytest.fixture(scope="module")
def one_layer(tiny, token_ids):
    """Stream after layer 0, computed by one device."""
    config, stage = tiny_config(), Stage(tiny_config(), range(1))
    bucket, pools = bucket_and_pools(config)
    rows = request_rows(config, token_ids.tolist(), 0, LENGTH, LENGTH)
    batch = build_batch(config, [rows], **vars(bucket), engram=None)
    params = load_params(tiny, config, layers=stage.layers, progress=False)
    state = init_state(config, stage.layers, **pools)
    options = {"xla_allow_excess_precision": False}
    return jax.jit(lambda *a: stage(*a).stream, compiler_options=options)(params, state, batch)


@SPLITS
def test_a_split_layer_stays_within_its_tier(pipeline_of, one_layer, token_ids, expert):
    first = pipeline_of(LEGAL, tensor=2, expert=expert).stages[0]
    config = tiny_config()
    bucket, pools = bucket_and_pools(config)
    rows = request_rows(config, token_ids.tolist(), 0, LENGTH, LENGTH)
    bundle, _ = first.dispatch(first.init_state(**pools), [rows], bucket, None, None)
    got, want = (
        np.asarray(s.x, np.float32).reshape(LENGTH, -1) for s in (bundle.stream, one_layer)
    )
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.mean() <= (2e-4 if expert else 0.015)
    np.testing.assert_allclose(bundle.stream.pre, one_layer.pre, atol=2e-3)


@pytest.mark.parametrize(
    ("stages", "expert"), [(LEGAL, False), (LEGAL, True), ((3, 3), True)], ids=str
)
def test_a_layer_needs_two_all_reduces_and_the_embedding_one(pipeline_of, stages, expert):
    first = pipeline_of(stages, tensor=2, expert=expert).stages[0]
    assert all_reduces(first, tokens=round_rows(LENGTH)) == 2 * stages[0] + 1


@SPLITS
def test_each_device_holds_its_share(pipeline_of, expert):
    params = pipeline_of(LEGAL, tensor=2, expert=expert).stages[0].params
    layer = params["layers_0"]

    def held(leaf):
        shards = leaf.addressable_shards
        assert len(shards) == 2
        return shards[0].data.shape

    assert held(params["embed"]["weight"]) == (416, 64)
    assert held(layer["attn"]["wq_b"]["weight"]) == (128, 32)
    assert held(layer["attn"]["wq_b"]["scale"]) == (4, 1)
    assert held(layer["attn"]["wo_a"]["weight"]) == (64, 64)
    assert held(layer["attn"]["wo_b"]["weight"]) == (64, 64)
    assert held(layer["attn"]["wo_b"]["scale"]) == (2, 2)
    assert held(layer["attn"]["attn_sink"]) == (2,)
    assert held(layer["ffn"]["shared_experts"]["w2"]["weight"]) == (64, 64)
    experts = (2, 64, 64) if expert else (3, 64, 32)  # the fourth expert is empty
    assert held(layer["ffn"]["experts"]["w2"]["weight"]) == experts


def test_padding_experts_are_empty(pipeline_of):
    experts = (
        pipeline_of(LEGAL, tensor=2, expert=True).stages[0].params["layers_0"]["ffn"]["experts"]
    )
    for projection in experts.values():
        assert projection["weight"].shape[0] == 4
        assert not np.asarray(projection["weight"][3]).any()


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        (LEGAL, {}),
        (CROSSING, {"relay": True}),
        (LEGAL, {"tensor": 2}),
        (LEGAL, {"tensor": 2, "expert": True}),
    ],
    ids=str,
)
def test_a_device_holds_the_bytes_that_the_plan_says(pipeline_of, stages, options):
    pipeline = pipeline_of(stages, **options)
    config = tiny_config()
    division = plan_tensor_parallel(
        config, options.get("tensor", 1), expert_parallel=options.get("expert", False)
    )
    limits = engine_limits(config, max_model_len=48, max_num_seqs=3, max_num_batched_tokens=24)
    sizes = plan_stage_caches(config, pipeline.plan, limits, None)
    states = pipeline.init_state(**dataclasses.asdict(sizes))
    planned = stage_bytes(config, pipeline.plan, division, limits, microbatches=1)

    def held(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    for stage, state, expected in zip(pipeline.stages, states, planned, strict=True):
        assert held(stage.params) == expected.parameters
        assert held(state) == expected.caches
