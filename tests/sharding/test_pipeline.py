"""Stages on their own devices against one program, and how they are dispatched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_pipeline import CROSSING, LEGAL, LENGTH, step_sizes

from dsv41_jax.inference import generate, load, request_rows
from sharding import stage_runner
from sharding.rules import replicated


def test_legal_stages_give_the_logits_of_one_program(logits_of, whole):
    np.testing.assert_array_equal(logits_of(LEGAL), whole)


@pytest.mark.parametrize(("chunk", "microbatches"), [(1, 1), (2, 2), (3, 3), (5, 4), (48, 4)])
def test_logits_do_not_depend_on_chunks_and_microbatches(logits_of, whole, chunk, microbatches):
    cut = logits_of(LEGAL, chunk=chunk, microbatches=microbatches)
    np.testing.assert_array_equal(cut, whole)


def test_stages_that_share_a_device_give_the_bits_of_stages_on_their_own(logits_of):
    apart = logits_of(LEGAL, microbatches=2)
    np.testing.assert_array_equal(logits_of(LEGAL, places=(0, 0, 2), microbatches=3), apart)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(
    "stages", [LEGAL, pytest.param(CROSSING, marks=pytest.mark.full)], ids=["legal", "crossing"]
)
def test_greedy_tokens_are_those_of_one_device(pipeline_of, tiny, token_ids, stages, replay):
    prompt = token_ids[:20].tolist()
    options = dict(max_new_tokens=4, decoder_replay=replay)
    new = pipeline_of(stages, relay=stages == CROSSING).generate(prompt, **options)
    assert new == generate(load(tiny, progress=False), prompt, **options)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [None, 5])
def test_score_gives_the_logits_of_every_position(pipeline_of, whole, token_ids, chunk):
    scores = pipeline_of(LEGAL).score(token_ids.tolist(), chunk)
    np.testing.assert_array_equal(scores, whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "token_ids is empty"),
        (([832],), "token id 832 is outside the vocabulary 0..831"),
        (([1], 0), "chunk_size is 0"),
    ],
)
def test_wrong_requests_are_refused_in_one_sentence(pipeline_of, arguments, message):
    with pytest.raises(ValueError, match=message):
        pipeline_of(LEGAL).score(*arguments)


def kept_busy(state, mesh):
    """The same caches, after work that keeps the stage's device busy for seconds."""

    def work(state):
        matrix = jnp.eye(384)
        matrix = jax.lax.fori_loop(0, 1500, lambda _, a: jnp.sin(a @ a), matrix)
        idle = jnp.max(matrix) > 2  # never
        return jax.tree.map(lambda a: a + idle.astype(a.dtype), state)

    return jax.jit(work, out_shardings=replicated(mesh))(state)


def test_all_microbatches_are_dispatched_before_the_first_is_done(
    pipeline_of, token_ids, monkeypatch
):
    pipeline = dataclasses.replace(pipeline_of(LEGAL), microbatches=4)
    bucket, pools = step_sizes()
    row = request_rows(pipeline.config, token_ids.tolist(), 0, LENGTH, LENGTH)
    pipeline.step(pipeline.init_state(**pools), [row], bucket, None)  # compiles
    order = []
    dispatch = stage_runner.StageRunner.dispatch

    def noted(stage, *arguments):
        order.append(stage.step.contents.stage)
        return dispatch(stage, *arguments)

    monkeypatch.setattr(stage_runner.StageRunner, "dispatch", noted)
    first, *others = pipeline.init_state(**pools)
    states = (kept_busy(first, pipeline.stages[0].mesh), *others)
    results, states = pipeline.step(states, [row], bucket, None)
    ready = [result.value.is_ready() for result in results]
    assert order == [0, 1, 2] * 4
    assert ready == [False] * 4
    jax.block_until_ready((results[-1].value, states))


def test_a_bucket_is_compiled_once_per_stage(pipeline_of, logits_of):
    logits_of(LEGAL, chunk=2, microbatches=2)
    before = [stage.program._cache_size() for stage in pipeline_of(LEGAL).stages]
    logits_of(LEGAL, chunk=9, microbatches=3)
    assert [stage.program._cache_size() for stage in pipeline_of(LEGAL).stages] == before
