"""The relay: candidates as block numbers, rows written this step, byte-exact replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_pipeline import CROSSING, run, tiny_config

from sharding.relay import block_mask, kept_blocks
from sharding.stage_plan import PartitionError, build_stage_plan
from sharding.traffic import carried_bytes


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_candidates_travel_as_block_numbers_without_loss(blocks):
    mask = np.zeros((4, blocks), bool)
    mask[1, 0] = mask[2, -1] = True
    mask[3, : min(blocks, 3)] = True
    kept = kept_blocks(jnp.asarray(mask), 3)
    assert kept.shape == (4, 3)
    np.testing.assert_array_equal(block_mask(kept, blocks), mask)


def test_crossing_stages_give_the_logits_of_one_program(logits_of, whole):
    np.testing.assert_array_equal(logits_of(CROSSING, relay=True), whole)


@pytest.mark.parametrize(("chunk", "microbatches"), [(1, 1), (5, 3), (48, 4)])
def test_relayed_logits_do_not_depend_on_the_cutting(logits_of, whole, chunk, microbatches):
    cut = logits_of(CROSSING, relay=True, chunk=chunk, microbatches=microbatches)
    np.testing.assert_array_equal(cut, whole)


def test_replicas_are_byte_equal_to_their_source(pipeline_of, token_ids):
    pipeline = pipeline_of(CROSSING, relay=True)
    states = run(pipeline, token_ids, 7)[1]
    found = []
    for contents, state in zip(pipeline.plan.stages, states, strict=True):
        for kind, source in contents.replicas:
            owner = next(s.stage for s in pipeline.plan.stages if source in s.layers)
            jax.tree.map(
                np.testing.assert_array_equal,
                getattr(state, kind)[source],
                getattr(states[owner], kind)[source],
            )
            assert any(leaf.any() for leaf in jax.tree.leaves(getattr(state, kind)[source]))
            found.append((contents.stage, kind, source))
    assert found == [(1, "kv", 1), (2, "kv", 3), (3, "kv", 3), (3, "index_k", 3)]


def test_an_open_group_stays_with_its_producer(pipeline_of, token_ids):
    states = run(pipeline_of(CROSSING, relay=True), token_ids, 7)[1]
    assert [sorted(state.open_group) for state in states] == [[1], [], [], []]


def test_a_bundle_has_the_bytes_that_the_plan_says(pipeline_of):
    pipeline = pipeline_of(CROSSING, relay=True)
    for boundary, found in zip(pipeline.plan.boundaries, carried_bytes(pipeline, 16), strict=True):
        per_token = boundary.stream_bytes_per_token + boundary.relay_bytes_per_token
        assert found == 16 * per_token


def test_a_source_read_two_stages_later_goes_through_the_stage_between_once():
    plan = build_stage_plan(tiny_config(), stages=CROSSING, relay=True)
    last = [(item.kind, item.source) for item in plan.boundaries[2].relay]
    assert sorted(last) == [("candidate", 3), ("index_k", 3), ("kv", 3)]


def test_a_byte_budget_refuses_a_larger_relay():
    with pytest.raises(PartitionError, match="more than the allowed 40"):
        build_stage_plan(tiny_config(), stages=CROSSING, relay=True, relay_max_bytes=40)
