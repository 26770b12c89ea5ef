"""Engram rows that are looked up ahead are the rows that are asked for, whatever was expected."""

import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from dsv41_jax.engram_ahead import TRACE_NAME, UNKNOWN, EngramAhead
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.hf_config import load_config

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_a"


@pytest.fixture(scope="module")
def tables():
    return EngramTables.open(TINY, load_config(TINY))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1, "engram lookup") as pool:
        yield pool


class Watched(EngramTables):
    """Tables that note where and what they are asked for, and wait when told to."""

    def __init__(self, tables):
        super().__init__(tables.hasher, tables.tables)
        self.asked = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def gather(self, ngrams, out):
        self.asked.append((threading.current_thread(), len(ngrams)))
        self.begun.set()
        assert self.go_on.wait(10)
        super().gather(ngrams, out)


def step(rng, lengths, tokens=32):
    """A step of some requests: what `step_rows` takes."""
    ids = [rng.integers(0, 400, length) for length in lengths]
    return ids, [rng.integers(-1, 400, 3) for _ in lengths], tokens


def assert_same(found, wanted):
    assert tuple(found) == tuple(wanted)
    for layer, rows in wanted.items():
        np.testing.assert_array_equal(found[layer].codes, rows.codes)
        np.testing.assert_array_equal(found[layer].scales, rows.scales)


def test_rows_that_were_expected_are_there_when_they_are_asked_for(tables, pool):
    watched = Watched(tables)
    ahead = EngramAhead(watched, pool)
    wanted = step(np.random.default_rng(0), [3, 1, 9])
    ahead.expect([wanted])
    assert watched.begun.wait(10)
    found = ahead.step_rows(*wanted)
    assert [size for _, size in watched.asked] == [13]
    assert watched.asked[0][0] is not threading.current_thread()
    assert_same(found, tables.step_rows(*wanted))


def test_any_guess_gives_the_bytes_of_the_direct_lookup(tables, pool):
    rng = np.random.default_rng(1)
    ahead = EngramAhead(tables, pool)
    for _ in range(200):
        steps = [step(rng, rng.integers(0, 6, rng.integers(0, 5))) for _ in range(rng.integers(4))]
        if rng.integers(2):
            ahead.expect(steps)
        for ids, histories, tokens in steps[: rng.integers(4)]:
            ids, histories = [a.copy() for a in ids], [a.copy() for a in histories]
            change = rng.integers(5)
            if change == 1 and ids and len(ids[-1]):
                ids[-1][-1] = rng.integers(400)
            elif change == 2 and ids:
                del ids[0], histories[0]
            elif change == 3:
                tokens = 48
            elif change == 4 and ids:
                histories[0][-1] = rng.integers(400)
            assert_same(
                ahead.step_rows(ids, histories, tokens), tables.step_rows(ids, histories, tokens)
            )


def test_a_token_that_is_not_known_yet_keeps_the_others_in_their_places(tables, pool):
    watched = Watched(tables)
    ahead = EngramAhead(watched, pool)
    ids, histories, tokens = step(np.random.default_rng(2), [1, 7, 1])
    holes = [np.array([UNKNOWN]), ids[1], np.array([UNKNOWN])]
    ahead.expect([(holes, histories, tokens)])
    assert watched.begun.wait(10)
    assert_same(ahead.step_rows(ids, histories, tokens), tables.step_rows(ids, histories, tokens))
    assert [size for _, size in watched.asked] == [7, 2]


def test_steps_are_expected_in_order_and_an_equal_guess_costs_nothing(tables, pool):
    watched = Watched(tables)
    ahead = EngramAhead(watched, pool)
    rng = np.random.default_rng(3)
    first, second = step(rng, [4]), step(rng, [5])
    for _ in range(3):
        ahead.expect([first, second])
    for wanted in (first, second):
        assert_same(ahead.step_rows(*wanted), tables.step_rows(*wanted))
    assert [size for _, size in watched.asked] == [4, 5]


def test_rows_that_were_taken_are_never_written_to_again(tables, pool):
    watched = Watched(tables)
    watched.go_on.clear()
    ahead = EngramAhead(watched, pool)
    rng = np.random.default_rng(4)
    blocked, taken, later = (step(rng, [6]) for _ in range(3))
    ahead.expect([blocked])
    assert watched.begun.wait(10)
    other = EngramAhead(tables, pool)  # its lookups wait behind the blocked one
    other.expect([taken])
    found = other.step_rows(*taken)
    kept = {layer: rows.codes.copy() for layer, rows in found.items()}
    other.expect([later])
    watched.go_on.set()
    pool.submit(lambda: None).result(10)
    for layer, codes in kept.items():
        np.testing.assert_array_equal(found[layer].codes, codes)


def test_an_expected_step_that_never_comes_is_not_looked_up(tables, pool):
    watched = Watched(tables)
    watched.go_on.clear()
    ahead = EngramAhead(watched, pool)
    rng = np.random.default_rng(5)
    ahead.expect([step(rng, [6]), step(rng, [7])])
    assert watched.begun.wait(10)
    ahead.expect([])
    watched.go_on.set()
    pool.submit(lambda: None).result(10)
    assert [size for _, size in watched.asked] == [6]


def test_an_error_of_the_thread_reaches_whoever_asks_for_the_rows(tables, pool):
    class Broken(Watched):
        def gather(self, ngrams, out):
            super().gather(ngrams, out)
            raise OSError("the disk of the tables is gone")

    broken = Broken(tables)
    ahead = EngramAhead(broken, pool)
    wanted = step(np.random.default_rng(6), [2])
    ahead.expect([wanted])
    pool.submit(lambda: None).result(10)
    with pytest.raises(OSError, match="the disk of the tables is gone"):
        ahead.step_rows(*wanted)
    assert len(broken.asked) == 1


def test_an_id_outside_the_vocabulary_is_named_at_once(tables, pool):
    ahead = EngramAhead(tables, pool)
    wrong = ([np.array([3, 1000])], [np.full(3, -1)], 16)
    for ask in (lambda: ahead.expect([wrong]), lambda: ahead.step_rows(*wrong)):
        with pytest.raises(ValueError, match="token id 1000 is outside the vocabulary 0.."):
            ask()


def test_a_lookup_shows_on_its_own_thread_in_a_profile(tables, pool, tmp_path):
    ahead = EngramAhead(tables, pool)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        with jax.profiler.TraceAnnotation("step"):
            ahead.expect([step(np.random.default_rng(7), [8])])
            pool.submit(lambda: None).result(10)
    (file,) = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    threads = [
        {event.name: event for event in line.events}
        for plane in profile.planes
        for line in plane.lines
    ]
    (main,) = [found["step"] for found in threads if "step" in found]
    (lookup,) = [found[TRACE_NAME] for found in threads if TRACE_NAME in found]
    assert not any("step" in found and TRACE_NAME in found for found in threads)
    assert main.start_ns < lookup.start_ns < main.start_ns + main.duration_ns
