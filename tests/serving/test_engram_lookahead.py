"""The engine says what comes next before it waits, and lookups run beside the step."""

import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from toy_runner import LETTERS, ToyRunner, run_all, tokens_of, toy_limits, toy_request

from dsv41_jax.engram_ahead import UNKNOWN, EngramAhead
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.hf_config import load_config
from dsv41_jax.host_batch import lookup_of
from serving.engine import Engine

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_a"


class NotedTables(EngramTables):
    """Tables that note the thread of every n-gram's lookup; anyone may wait for one."""

    def __init__(self):
        tables = EngramTables.open(TINY, load_config(TINY))
        super().__init__(tables.hasher, tables.tables)
        self._threads = {}
        self._changed = threading.Condition()

    def gather(self, ngrams, out):
        with self._changed:
            for ngram in map(tuple, ngrams.tolist()):
                self._threads.setdefault(ngram, threading.current_thread())
            self._changed.notify_all()
        super().gather(ngrams, out)

    def thread_of(self, ngram):
        """The thread that looks an n-gram up, which begins within ten seconds."""
        with self._changed:
            assert self._changed.wait_for(lambda: ngram in self._threads, timeout=10)
            return self._threads[ngram]


class LookingRunner(ToyRunner):
    """Looks the Engram rows of its steps up ahead; `on_wait` is called as a step is waited for."""

    def __init__(self, limits, tables, pool):
        super().__init__(limits)
        self.tables, self.ahead = tables, EngramAhead(tables, pool)
        self.direct = EngramTables(tables.hasher, tables.tables)
        self.on_wait = lambda number: None

    def expect(self, rows):
        super().expect(rows)
        self.ahead.expect([lookup_of(rows, 16)] if rows else [])

    def submit(self, rows, sampling):
        found = self.ahead.step_rows(*lookup_of(rows, 16))
        for layer, wanted in self.direct.step_rows(*lookup_of(rows, 16)).items():
            np.testing.assert_array_equal(found[layer].codes, wanted.codes)
        number, step = len(self.steps), super().submit(rows, sampling)
        return Waiting(self, number, step)


class Waiting:
    def __init__(self, runner, number, step):
        self._runner, self._number, self._step = runner, number, step

    def result(self):
        self._runner.on_wait(self._number)
        return self._step.result()


def ngrams_of(prompt, start, end):
    """What the rows of positions start..end-1 follow from."""
    padded = [-1, -1, -1, *prompt]
    return [tuple(padded[p : p + 4][::-1]) for p in range(start, end)]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_the_next_chunk_is_looked_up_before_a_chunk_is_waited_for(pool):
    prompt = np.random.default_rng(0).integers(3, 97, 61).tolist()  # four chunks of 16
    runner = LookingRunner(toy_limits(), NotedTables(), pool)
    waited = []

    def on_wait(number):
        waited.append(number)
        here = threading.current_thread()
        # One more step is in flight by now; the one after it is what the device does not know.
        for ngram in ngrams_of(prompt, 16 * (number + 2), min(61, 16 * (number + 3))):
            assert runner.tables.thread_of(ngram) is not here

    runner.on_wait = on_wait
    (outputs,) = run_all(Engine(runner, LETTERS), [toy_request("a", prompt, max_tokens=2)]).values()
    assert waited == list(range(len(runner.steps))) and len(waited) == 5
    assert len(tokens_of(outputs)) == 2


def test_two_chunks_ahead_of_the_one_that_is_waited_for_are_expected():
    prompt = list(range(3, 64))
    runner = ToyRunner(toy_limits())
    engine = Engine(runner, LETTERS)
    engine.add_request(toy_request("a", prompt))
    engine.step()
    engine.step()  # two steps in flight, none waited for
    assert runner.expected[-1][0].token_ids.tolist() == prompt[32:48]
    assert runner.expected[-1][0].history.tolist() == prompt[29:32]


def test_tokens_on_their_way_keep_a_place_in_front_of_a_chunk():
    runner = ToyRunner(toy_limits())
    engine = Engine(runner, LETTERS)
    engine.add_request(toy_request("a", [5, 6, 7]))
    engine.step()
    assert runner.expected[-1] == []  # no token is known
    engine.add_request(toy_request("b", list(range(10, 50))))
    engine.step()
    expected = [rows.token_ids.tolist() for rows in runner.expected[-1]]
    assert expected == [[UNKNOWN], list(range(25, 40))]
    assert runner.expected[-1][0].history[:2].tolist() == [6, 7]
    engine.step()
    assert [rows.token_ids.tolist()[-15:] for rows in runner.steps[-1]][1] == expected[1]


def test_the_last_token_of_a_request_is_followed_by_none():
    runner = ToyRunner(toy_limits())
    engine = Engine(runner, LETTERS)
    engine.add_request(toy_request("a", [5, 6, 7], max_tokens=1))
    engine.step()
    assert runner.expected[-1] == []


@pytest.mark.parametrize("microbatches", [1, 3])
def test_guesses_change_no_answer_where_requests_come_end_and_are_preempted(pool, microbatches):
    rng = np.random.default_rng(1)
    requests = [
        toy_request(str(i), rng.integers(3, 97, rng.integers(1, 50)), max_tokens=rng.integers(1, 9))
        for i in range(12)
    ]
    answers = []
    runners = [ToyRunner(toy_limits()), LookingRunner(toy_limits(), NotedTables(), pool)]
    for runner in runners:
        found = run_all(Engine(runner, LETTERS, microbatches=microbatches), requests)
        answers.append({name: tokens_of(outputs) for name, outputs in found.items()})
    assert answers[0] == answers[1]


def test_an_engine_that_is_closed_closes_its_runner():
    runner = ToyRunner(toy_limits())
    Engine(runner, LETTERS).close()
    assert runner.closed
