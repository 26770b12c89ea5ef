"""The real model under the engine: bits do not depend on company, chunks or preemption."""

import asyncio
import contextlib
import dataclasses
import pathlib
import random

import jax
import numpy as np
import pytest
from toy_runner import run_all, tokens_of, toy_request

from dsv41_jax.hf_config import load_config
from serving.async_engine import AsyncEngine
from serving.engine import Engine
from serving.request import Grammar
from serving.runner import token_buckets
from sharding.limits import engine_limits

OPTIONS = (
    {},
    {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"grammar": Grammar(kind="regex", text="[a-m]{2,9}"), "ignore_eos": False},
    {},
    {"logit_bias": ((40, 3.0), (41, -5.0)), "logprob_token_ids": (40, 41), "min_tokens": 3},
    {"allowed_token_ids": tuple(range(200, 260)), "bad_words": ((210,), (220, 221))},
    {},
)
TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_b"
SIZES = {"max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def requests():
    generator = random.Random(11)
    return [
        toy_request(
            str(index),
            [generator.randrange(3, 500) for _ in range(generator.randint(1, 70))],
            max_tokens=generator.randint(4, 14),
            temperature=generator.choice([0.0, 0.8]),
            top_p=generator.choice([1.0, 0.9]),
            seed=index,
            logprobs=3,
            prompt_logprobs=1 if index % 8 == 0 else None,
            **OPTIONS[index % len(OPTIONS)],
        )
        for index in range(32)
    ]


@pytest.fixture(scope="module")
def alone(engine, requests):
    """Every request served by itself, with nothing cached."""
    outputs = {}
    for request in requests:
        engine.reset_prefix_cache()
        outputs |= run_all(engine, [request])
    return outputs


def results(outputs):
    """Outputs but for how much of them was cached."""
    return {
        request_id: [dataclasses.replace(part, num_cached_tokens=0) for part in parts]
        for request_id, parts in outputs.items()
    }


def test_requests_together_equal_their_solo_runs_bit_for_bit(
    engine, requests, alone, no_compilation
):
    before = engine.stats().num_preemptions
    with pytest.raises(AssertionError), no_compilation():
        jax.jit(lambda x: x + 1)(np.float32(1))
    with no_compilation():
        outputs = run_all(engine, requests)
    assert results(outputs) == alone
    assert engine.stats().num_preemptions > before
    assert engine.stats().kv_cache_usage == 0


def test_concurrent_streams_half_of_them_cancelled_leave_nothing_in_use(
    engine, requests, alone, no_compilation
):
    runner = AsyncEngine(engine)

    async def stream(request, limit):
        outputs = []
        async with contextlib.aclosing(runner.generate(request)) as source:
            async for output in source:
                outputs.append(output)
                if len(outputs) == limit:
                    break
        return outputs

    async def drive():
        streams = await asyncio.gather(
            *(stream(r, None if i % 2 else 2) for i, r in enumerate(requests))
        )
        while runner.stats().num_running or runner.stats().num_waiting:
            await asyncio.sleep(0.01)
        return streams

    with no_compilation():
        streams = asyncio.run(drive())
        runner.shutdown()
    for request, outputs in zip(requests, streams, strict=True):
        expected = alone[request.request_id]
        (outputs,) = results({"": outputs}).values()
        assert outputs == expected[: len(outputs)]
        assert len(outputs) in (2, len(expected))
    assert engine.stats().kv_cache_usage == 0
    while engine.has_work:
        engine.step()
    assert results(run_all(engine, requests[:8])) == {
        r.request_id: alone[r.request_id] for r in requests[:8]
    }


def test_a_chat_reuses_all_of_the_turns_before_and_answers_as_if_cold(engine):
    generator = random.Random(3)
    history = [generator.randrange(3, 500) for _ in range(37)]
    reused, turns = 0, []
    for turn in range(3):
        request = toy_request(
            "chat", history, max_tokens=19, logprobs=20, temperature=0.7, seed=turn
        )
        warm = run_all(engine, [request])
        assert {part.num_cached_tokens for part in warm["chat"]} == {reused}
        history += tokens_of(warm["chat"])
        reused = (len(history) - 1) // 16 * 16
        history += [generator.randrange(3, 500) for _ in range(9)]
        turns.append((request, warm))
    for request, warm in turns:
        engine.reset_prefix_cache()
        assert run_all(engine, [request]) == results(warm)


def test_bounded_replay_does_not_depend_on_company_or_cache_either(
    engine, requests, alone, no_compilation
):
    replaying = Engine(engine._runner, engine._vocabulary, decoder_replay=True)
    with no_compilation():
        together = run_all(replaying, requests)
        for request in requests[:12]:
            replaying.reset_prefix_cache()
            cold = results(run_all(replaying, [request]))
            assert cold[request.request_id] == results(together)[request.request_id]
            assert results(run_all(replaying, [request])) == cold
    assert replaying.stats().kv_cache_usage == 0
    for request in requests:
        is_short = len(request.prompt_token_ids) <= replaying.limits.sliding_window
        is_exact = is_short or request.sampling.prompt_logprobs is not None
        same = results(together)[request.request_id] == alone[request.request_id]
        assert same == is_exact


def test_prefix_replay_computes_a_lost_window_again(engine, no_compilation):
    replaying = Engine(engine._runner, engine._vocabulary, prefix_replay=True)
    generator = random.Random(4)
    prompt = [generator.randrange(3, 500) for _ in range(130)]
    request = toy_request("a", prompt, max_tokens=4, logprobs=3)
    with no_compilation():
        cold = run_all(replaying, [request])
        assert results(run_all(replaying, [request])) == cold  # the window is still there
        replaying._cache.window.forget_all()
        warm = run_all(replaying, [request])
    assert warm["a"][0].num_cached_tokens == (128 - 47) // 16 * 16
    assert len(tokens_of(warm["a"])) == 4
    exact = {token for entry in cold["a"][0].logprobs for token, _ in entry.top}
    replayed = {token for entry in warm["a"][0].logprobs for token, _ in entry.top}
    assert exact & replayed
    assert replaying.stats().kv_cache_usage == 0


def test_the_likeliest_tokens_are_the_published_ones_where_the_margin_is_clear(engine):
    golden = np.load(TINY / "golden_greedy.npz")
    ids = [*golden["prompt_ids"].tolist(), *golden["gen_ids"].tolist()]
    request = toy_request("greedy", ids, max_tokens=0, prompt_logprobs=1)
    (output,) = run_all(engine, [request])["greedy"]
    first = len(golden["prompt_ids"])
    likeliest = np.array([entry.top[0][0] for entry in output.prompt_logprobs[first:]])
    clear = golden["margin"] > 0.45
    assert clear.sum() >= 3
    np.testing.assert_array_equal(likeliest[clear], golden["logits"].argmax(1)[clear])


def test_no_end_token_is_sampled_before_min_tokens(engine):
    plain = tokens_of(run_all(engine, [toy_request("a", [5, 6, 7])])["a"])
    early = tuple(dict.fromkeys(plain[:4]))
    request = toy_request("a", [5, 6, 7], stop_token_ids=early, min_tokens=5, max_tokens=8)
    tokens = tokens_of(run_all(engine, [request])["a"])
    assert len(tokens) >= 5 and not set(tokens[:5]) & set(early)


def test_every_program_is_compiled_before_the_engine_is_handed_out(engine):
    assert engine._runner.num_compiled == 1


def test_one_program_serves_every_step_on_cpu_and_decode_has_its_own_elsewhere():
    limits = engine_limits(load_config(TINY), **SIZES)
    assert token_buckets(limits, "cpu") == (48,)
    assert token_buckets(limits, "gpu") == (16, 48)
