"""The engine's thread: concurrent callers, cancels, failures, shutdown."""

import asyncio
import contextlib
import threading

import pytest
from test_engine import make_engine, random_requests, serve
from toy_runner import tokens_of, toy_request

from serving.async_engine import AsyncEngine
from serving.request import EngineDeadError, RequestError


@pytest.fixture
def engine():
    engine = AsyncEngine(make_engine(40))
    yield engine
    engine.shutdown()
    assert not engine.is_alive


async def collect(engine, request, limit=None):
    outputs = []
    async with contextlib.aclosing(engine.generate(request)) as stream:
        async for output in stream:
            outputs.append(output)
            if len(outputs) == limit:
                break
    return outputs


async def idle(engine):
    """Waits until nothing is left in the engine."""
    while (stats := engine.stats()).num_running or stats.num_waiting:
        await asyncio.sleep(0.005)
    return stats


def test_concurrent_requests_equal_their_solo_runs_and_cancelled_ones_leave_nothing(engine):
    requests = random_requests(9, 32)

    async def drive():
        tasks = [
            collect(engine, request, limit=None if index % 2 else 2)
            for index, request in enumerate(requests)
        ]
        return await asyncio.gather(*tasks), await idle(engine)

    results, stats = asyncio.run(drive())
    assert stats.kv_cache_usage == 0
    for request, outputs in zip(requests, results, strict=True):
        alone = tokens_of(serve(request))
        assert tokens_of(outputs) == alone[: len(tokens_of(outputs))]
        if outputs[-1].finish_reason:
            assert tokens_of(outputs) == alone


def test_a_cancelled_task_frees_its_request(engine):
    async def drive():
        task = asyncio.create_task(collect(engine, toy_request("a", [5], max_tokens=63)))
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)
        again = await collect(engine, toy_request("a", [5, 6]))
        assert tokens_of(again) == tokens_of(serve(toy_request("a", [5, 6])))

    asyncio.run(drive())


def test_a_request_aborted_from_outside_gets_a_last_output(engine):
    async def drive():
        request = toy_request("a", [5], max_tokens=63)
        stream = engine.generate(request)
        await anext(stream)
        engine.abort("a")
        engine.abort("unknown")
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "abort"
        await idle(engine)

    asyncio.run(drive())


def test_bad_and_repeated_requests_raise_where_they_are_made(engine):
    async def drive():
        with pytest.raises(RequestError, match="the prompt is empty"):
            await collect(engine, toy_request("a", []))
        stream = engine.generate(toy_request("a", [5], max_tokens=63))
        await anext(stream)
        with pytest.raises(RequestError, match="request id 'a' is in use"):
            await collect(engine, toy_request("a", [5]))
        await stream.aclose()

    asyncio.run(drive())
    assert engine.is_alive


def test_a_failed_step_fails_every_open_request_and_marks_the_engine_dead():
    inner = make_engine()
    submit, steps = inner._runner.submit, []

    def failing(rows, sampling):
        steps.append(rows)
        if len(steps) == 3:
            raise RuntimeError("the device is gone")
        return submit(rows, sampling)

    inner._runner.submit = failing
    engine = AsyncEngine(inner)

    async def drive():
        requests = [toy_request(str(i), [5, i + 3], max_tokens=40) for i in range(6)]
        results = await asyncio.gather(*(collect(engine, request) for request in requests))
        for outputs in results:
            assert outputs[-1].finish_reason == "error"
            assert outputs[-1].stop_reason == "RuntimeError: the device is gone"
        with pytest.raises(EngineDeadError, match="has stopped: RuntimeError: the device is gone"):
            await collect(engine, requests[0])

    asyncio.run(drive())
    assert not engine.is_alive
    assert engine.failure == "RuntimeError: the device is gone"
    engine.shutdown()


def test_shutdown_ends_open_requests_and_refuses_new_ones():
    engine = AsyncEngine(make_engine(max_model_len=4096, max_num_batched_tokens=4))

    async def drive():
        stream = engine.generate(toy_request("a", [5], max_tokens=4000))
        await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="the engine has stopped: shut down"):
            await collect(engine, toy_request("b", [5]))

    asyncio.run(drive())


def test_shutdown_twice_and_while_idle_is_clean():
    engine = AsyncEngine(make_engine())
    engine.shutdown()
    engine.shutdown()
    assert not engine.is_alive


def test_shutdown_with_time_finishes_open_requests_and_refuses_new_ones():
    engine = AsyncEngine(make_engine())
    requests = random_requests(4, 12)

    async def drive():
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(asyncio.to_thread(engine.shutdown, 60))
        while engine.is_alive:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineDeadError, match="has stopped: shut down"):
            await collect(engine, toy_request("late", [5]))
        results = await asyncio.gather(*tasks)
        await stopping
        return results

    for request, outputs in zip(requests, asyncio.run(drive()), strict=True):
        assert tokens_of(outputs) == tokens_of(serve(request))


def test_requests_that_do_not_finish_in_time_are_aborted():
    engine = AsyncEngine(make_engine(max_model_len=4096, max_num_batched_tokens=4))

    async def drive():
        stream = engine.generate(toy_request("a", [5], max_tokens=4000))
        await anext(stream)
        first = asyncio.create_task(asyncio.to_thread(engine.shutdown, 60))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.shutdown, 0.05)
        outputs = [output async for output in stream]
        await first
        return outputs

    outputs = asyncio.run(drive())
    assert outputs[-1].finish_reason == "abort" and len(outputs) > 2


def test_a_step_that_takes_too_long_fails_every_open_request():
    inner = make_engine()
    step, stuck = inner.step, threading.Event()
    inner.step = lambda: stuck.wait() and step()
    engine = AsyncEngine(inner, step_timeout=0.2)

    async def drive():
        requests = [toy_request(str(i), [5]) for i in range(3)]
        results = await asyncio.gather(*(collect(engine, request) for request in requests))
        for outputs in results:
            assert outputs[-1].finish_reason == "error"
            assert outputs[-1].stop_reason == "a step has taken longer than 0.2 seconds"

    asyncio.run(drive())
    assert not engine.is_alive and "longer than" in engine.failure
    engine.shutdown()
    stuck.set()
    engine._thread.join()
    assert "longer than" in engine.failure


def test_a_reset_comes_before_the_requests_made_after_it(engine):
    async def drive():
        request = toy_request("a", range(3, 30))
        cached = []
        for reset in (False, False, True):
            if reset:
                engine.reset_prefix_cache()
            cached.append((await collect(engine, request))[0].num_cached_tokens)
        return cached

    assert asyncio.run(drive()) == [0, 24, 0]


def test_a_request_the_engine_refuses_late_ends_with_an_error(engine):
    engine.check = lambda request: None

    async def drive():
        (output,) = await collect(engine, toy_request("a", [500]))
        assert output.finish_reason == "error" and "token id 500" in output.stop_reason
        await collect(engine, toy_request("a", [5]))

    asyncio.run(drive())
    assert engine.is_alive
