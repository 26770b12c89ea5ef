"""Steps as bytes, and the connections that carry them; real sockets, no other process."""

import dataclasses
import queue
import socket
import threading

import numpy as np
import pytest

from dsv41_jax.host_batch import RequestRows
from serving import hosts
from serving.batch_builder import empty_sampling
from serving.hosts import LeaderRunner, Watch, follow
from serving.logit_rules import empty_changes
from serving.step_channel import (
    CLOSING,
    FAILED,
    SECRET_BYTES,
    ChannelError,
    News,
    accept,
    connect,
    listen,
)
from serving.step_messages import MessageError, decode, decode_step, encode, encode_step
from sharding.limits import EngineLimits

LIMITS = EngineLimits(
    max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, page_size=8, sliding_window=8
)
VOCABULARY = 70


def ids(*values):
    return np.array(values, np.int32)


ROWS = [
    RequestRows(
        token_ids=ids(3, 4, 5),
        start=7,
        history=ids(-1, 1, 2),
        window_pages=ids(0, -1),
        global_pages=ids(5, 6),
        slot=1,
        logits=1,
        late_from=8,
    ),
    RequestRows(
        token_ids=ids(9),
        start=0,
        history=ids(-1, -1, -1),
        window_pages=ids(3),
        global_pages=ids(),
        slot=0,
        logits=0,
    ),
]


def plain_sampling():
    return dataclasses.replace(
        empty_sampling(LIMITS, VOCABULARY),
        seed=np.arange(LIMITS.logit_rows, dtype=np.uint32) + 2**31,
        temperature=np.linspace(0, 2, LIMITS.logit_rows, dtype=np.float32),
    )


def same(one, other):
    for field in dataclasses.fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(first):
            same(first, second)
        else:
            first, second = np.asarray(first), np.asarray(second)
            assert first.dtype.kind == second.dtype.kind
            np.testing.assert_array_equal(first, second, err_msg=field.name)


def test_a_step_arrives_as_it_was_sent():
    none = empty_changes(LIMITS, VOCABULARY)
    sampling = plain_sampling()
    message = encode_step(ROWS, sampling)
    rows, got = decode_step(message, none)
    for one, other in zip(ROWS, rows, strict=True):
        same(one, other)
    same(sampling, got)
    assert got.changes is none and len(message) < 12_000
    assert decode_step(encode_step([], sampling), none)[0] == []


def test_tables_of_changes_travel_where_a_row_has_some():
    none, changes = empty_changes(LIMITS, VOCABULARY), empty_changes(LIMITS, VOCABULARY)
    changes.bias[0, 2], changes.allowed[1, 0] = 1.5, 7
    sampling = dataclasses.replace(plain_sampling(), changes=changes)
    sampling.change_row[1] = 0
    same(sampling, decode_step(encode_step(ROWS, sampling), none)[1])


def test_what_is_no_step_is_refused():
    none = empty_changes(LIMITS, VOCABULARY)
    message = encode_step(ROWS, plain_sampling())
    for bad, reason in (
        (b"", "no step"),
        (message[:-1], "no step"),
        (message + b"x", "more than its arrays"),
        (encode({"numbers": np.zeros((0, 4), np.int64)}), "has no .*seed"),
        (encode({**decode(message), "lengths": np.zeros(3, np.int64)}), "3 lists for 2 requests"),
        (encode({**decode(message), "values": ids(1)}), "do not have 1 values"),
        (encode({**decode(message), "ids": ids(1)}), "but not all"),
        (encode({"numbers": np.zeros(2, np.int8)}), "dtype 'int8'"),
        ((8).to_bytes(4) + b'["x"]   ', "no step"),
    ):
        with pytest.raises(MessageError, match=reason):
            decode_step(bad, none)


@pytest.fixture
def pair():
    """Both ends of a connection of two processes."""
    listener, port, secret = listen()
    ends = queue.SimpleQueue()
    with listener:
        join = threading.Thread(
            target=lambda: ends.put(connect("127.0.0.1", port, secret, 1, timeout=10))
        )
        join.start()
        leader = accept(listener, secret, 2, timeout=10)
        join.join()
    follower = ends.get()
    yield leader, follower
    leader.close()
    follower.close()


def test_strangers_are_turned_away_and_the_missing_named():
    listener, port, secret = listen()
    strangers = []
    with listener:
        for hello in (bytes(SECRET_BYTES) + (1).to_bytes(4), secret + (7).to_bytes(4)):
            stranger = socket.create_connection(("127.0.0.1", port), 10)
            stranger.sendall(hello)
            strangers.append(stranger)
        with pytest.raises(ChannelError, match=f"processes 1, 2 did not connect to port {port}"):
            accept(listener, secret, 3, timeout=0.3)
    for stranger in strangers:
        assert stranger.recv(1) == b""
        stranger.close()
    with pytest.raises(ChannelError, match=f"cannot be reached at 127.0.0.1:{port}"):
        connect("127.0.0.1", port, secret, 1, timeout=1)


class Recorder:
    """A runner that keeps what it is given."""

    limits, cache_sizes, vocab_size, eos_token_id, look_back = LIMITS, None, VOCABULARY, 1, 3
    looks_ahead = False

    def __init__(self):
        self.steps, self.waited, self.closed = [], 0, False

    def expect(self, rows):
        pass

    def submit(self, rows, sampling):
        self.steps.append((rows, sampling))
        return self

    def result(self):
        self.waited += 1

    def close(self):
        self.closed = True


def test_followers_compute_the_same_steps_in_the_same_order(pair):
    leader, follower = pair
    own, other = Recorder(), Recorder()
    runner = LeaderRunner(own, leader)
    follower.watch(lambda news: pytest.fail(news.reason))
    for count in (1, 2, 0, 2):
        runner.submit(ROWS[:count], plain_sampling())
    leader.end(News(0))
    follow(other, follower, empty_changes(LIMITS, VOCABULARY))
    assert other.closed and other.waited == 2  # the others may still run
    for (rows, sampling), (got, how) in zip(own.steps, other.steps, strict=True):
        assert len(rows) == len(got)
        for one, two in zip(rows, got, strict=True):
            same(one, two)
        same(sampling, how)
    runner.close()
    assert own.closed


def test_a_follower_hears_why_process_0_ends(pair):
    leader, follower = pair
    heard = queue.SimpleQueue()
    follower.watch(heard.put)
    leader.end(News(3, "no checkpoint"))
    assert heard.get(timeout=10) == News(3, "process 0 has ended: no checkpoint")


def test_a_lost_process_0_is_named(pair):
    leader, follower = pair
    heard = queue.SimpleQueue()
    follower.watch(heard.put)
    leader.close()
    assert heard.get(timeout=10) == News(1, "process 0 is lost: it was closed")


@pytest.fixture
def ended(monkeypatch):
    """What the process would end with."""
    calls = queue.SimpleQueue()
    monkeypatch.setattr(hosts, "end_process", lambda *given: calls.put(given))
    return calls


def test_process_0_ends_when_another_fails(pair, ended):
    leader, follower = pair
    failed = queue.SimpleQueue()
    Watch(leader).serves(fail=failed.put, open_requests=lambda: 0, close=lambda: None)
    follower.tell(FAILED, News(3, "the checkpoint is torn"))
    status, message = ended.get(timeout=10)
    assert status == 3 and message.startswith("process 1 has failed: the checkpoint is torn")
    assert failed.get(timeout=10) == "process 1 has failed: the checkpoint is torn"


def test_process_0_ends_when_another_is_lost(pair, ended):
    leader, follower = pair
    Watch(leader)
    follower.close()
    assert ended.get(timeout=10)[0] == 1


def test_a_follower_that_is_to_end_asks_process_0(pair):
    leader, follower = pair
    closed = threading.Event()
    watch = Watch(leader)
    watch.serves(fail=pytest.fail, open_requests=lambda: 0, close=closed.set)
    follower.tell(CLOSING, News(0))
    assert closed.wait(10)
    watch.end(0)
