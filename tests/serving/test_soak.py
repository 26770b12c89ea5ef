"""Random traffic on the real model: every finished request equals its solo run, nothing leaks."""

import asyncio
import contextlib
import dataclasses
import pathlib
import random

import pytest
from toy_runner import run_all, toy_request

from serving.async_engine import AsyncEngine
from serving.request import Grammar

STREAMS = 16
GRAMMARS = (
    Grammar(kind="regex", text="[a-f]{2,6}(,[a-f]{1,3}){0,2}"),
    Grammar(kind="choice", text='["yes", "no", "maybe"]'),
    Grammar(kind="json_schema", text='{"type": "array", "items": {"type": "integer"}}'),
    Grammar(kind="lark", text='start: "(" /[a-z]+/ ")"', starts_after=40),
)


def random_request(generator, index, roots):
    root = generator.choice(roots)
    fresh = [generator.randrange(3, 500) for _ in range(generator.randint(1, 30))]
    prompt = root[: generator.choice((0, 0, generator.randint(1, len(root)), len(root)))] + fresh
    options = {
        "max_tokens": generator.choice((1, 3, 8, generator.randint(1, 40))),
        "temperature": generator.choice((0.0, 0.7, 1.0)),
        "top_p": generator.choice((1.0, 0.9)),
        "top_k": generator.choice((0, 0, 40)),
        "min_p": generator.choice((0.0, 0.0, 0.02)),
        "seed": index,
        "ignore_eos": generator.random() < 0.5,
        "logprobs": generator.choice((None, 0, 5)),
        "priority": generator.choice((0, 0, 0, 1, -1)),
        "cache_salt": generator.choice((None, None, None, "other")),
    }
    extras = (
        {},
        {},
        {"stop": tuple(generator.sample("etaoins rhl", 2))},
        {"grammar": generator.choice(GRAMMARS), "ignore_eos": False},
        {"presence_penalty": 0.8, "repetition_penalty": 1.3, "frequency_penalty": -0.2},
        {"logit_bias": ((generator.randrange(2, 500), 4.0), (1, -20.0)), "min_tokens": 1},
        {"bad_words": ((generator.randrange(500),), (7, 8)), "prompt_logprobs": 1},
    )
    return toy_request(f"r{index}", prompt, **(options | generator.choice(extras)))


async def run_stream(engine, generator, requests, outputs, cancelled):
    for request in requests:
        limit = generator.randint(1, 5) if generator.random() < 0.15 else None
        parts = outputs[request.request_id] = []
        async with contextlib.aclosing(engine.generate(request)) as stream:
            async for part in stream:
                parts.append(part)
                if len(parts) == limit and part.finish_reason is None:
                    cancelled.add(request.request_id)
                    break


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def drive(engine, requests, seed):
    """Serves `requests` in streams, each one after another; returns outputs and cancelled ids."""
    outputs, cancelled = {}, set()
    running = AsyncEngine(engine)

    async def all_streams():
        await asyncio.gather(
            *(
                run_stream(running, random.Random(seed + i), part, outputs, cancelled)
                for i in range(STREAMS)
                if (part := requests[i::STREAMS])
            )
        )
        while running.stats().num_running or running.stats().num_waiting:
            await asyncio.sleep(0.01)

    try:
        asyncio.run(all_streams())
    finally:
        running.shutdown()
    while engine.has_work:
        engine.step()
    return outputs, cancelled


def without_cache(parts):
    return [dataclasses.replace(part, num_cached_tokens=0) for part in parts]


def soak(engine, count, seed):
    generator = random.Random(seed)
    roots = [[generator.randrange(3, 500) for _ in range(80)] for _ in range(4)]
    requests = [random_request(generator, index, roots) for index in range(count)]
    outputs, cancelled = drive(engine, requests, seed)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert not engine._sequences and not engine._texts
    for request in requests:
        engine.reset_prefix_cache()
        alone = run_all(engine, [request])[request.request_id]
        parts = without_cache(outputs[request.request_id])
        assert parts == alone[: len(parts)], request
        assert len(parts) == len(alone) or request.request_id in cancelled
    return cancelled


def test_a_short_soak(engine, no_compilation):
    before = engine.stats()
    engine.reset_prefix_cache()
    with no_compilation():
        cancelled = soak(engine, 64, seed=17)
    after = engine.stats()
    assert cancelled
    assert after.num_preemptions > before.num_preemptions
    assert after.prefix_cache_hits > before.prefix_cache_hits


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_soak_of_two_thousand_requests(engine, no_compilation):
    before = engine.stats()
    with no_compilation():
        soak(engine, 250, seed=100)
        resident = resident_bytes()
        for part in range(1, 8):
            soak(engine, 250, seed=100 + part)
    assert resident_bytes() - resident < 64 * 2**20
    assert engine.stats().num_preemptions > before.num_preemptions
