"""One server of several processes: process 0 schedules, and all compute the same steps.

Process 0 serves HTTP and sends every step to the others before it dispatches it; they build the
same batch and dispatch the same programs in the same order, as multi-controller JAX wants it.
Whoever fails or is lost ends all: nobody waits for a sum that cannot come.
"""

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from jax.experimental import multihost_utils

from dsv41_jax.host_batch import RequestRows
from dsv41_jax.sampling import LogitChanges, SamplingBatch
from serving.engine import StepHandle, StepRunner
from serving.step_channel import (
    CLOSING,
    FAILED,
    SECRET_BYTES,
    ChannelError,
    FollowerChannel,
    LeaderChannel,
    News,
    accept,
    connect,
    listen,
)
from serving.step_messages import decode_step, encode_step
from sharding.launchers import LaunchError, Processes, find_processes, initialize

_LOG = logging.getLogger(__name__)
_JOIN_SECONDS = 60.0  # for the connections, once all processes have joined
_LAST_WORDS = 5.0  # seconds to answer open requests after a process was lost
_IN_FLIGHT = 2  # steps a follower dispatches before it waits for the oldest
_NAME_BYTES = 256


class HostsError(Exception):
    """The processes of a server cannot be joined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leader:
    """Process 0, joined with the others."""

    processes: Processes
    channel: LeaderChannel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Follower:
    """Another process, joined with process 0."""

    processes: Processes
    channel: FollowerChannel


def join(
    environment: Mapping[str, str],
    *,
    coordinator: str | None,
    count: int | None,
    index: int | None,
) -> Leader | Follower:
    """Joins the processes of a server; call it before anything asks for devices.

    Args:
      environment: of the process; read where no option is given.
      coordinator, count, index: options, or None.

    Raises:
      HostsError: they cannot be found, or cannot reach each other.
    """
    try:
        processes = find_processes(environment, coordinator=coordinator, count=count, index=index)
        initialize(processes)
        return _leader(processes) if processes.leads else _follower(processes)
    except LaunchError as error:
        raise HostsError(str(error)) from error
    except (ChannelError, RuntimeError, ValueError) as error:
        raise HostsError(
            f"the processes cannot be joined: {' '.join(str(error).split())}"
        ) from error


def _leader(processes: Processes) -> Leader:
    listener, port, secret = listen()
    with listener:
        host = "" if processes.coordinator else socket.gethostname()
        name = np.zeros(_NAME_BYTES, np.uint8)
        name[: len(host.encode())] = np.frombuffer(host.encode(), np.uint8)
        _share(np.concatenate([_bytes(port.to_bytes(4)), _bytes(secret), name]))
        channel = accept(listener, secret, processes.count, _JOIN_SECONDS)
    return Leader(processes=processes, channel=channel)


def _follower(processes: Processes) -> Follower:
    shared = _share(np.zeros(4 + SECRET_BYTES + _NAME_BYTES, np.uint8)).tobytes()
    port, secret = int.from_bytes(shared[:4]), shared[4 : 4 + SECRET_BYTES]
    host = shared[4 + SECRET_BYTES :].rstrip(b"\0").decode()
    if processes.coordinator:
        host = processes.coordinator.rpartition(":")[0].strip("[]")
    channel = connect(host, port, secret, processes.index, _JOIN_SECONDS)
    return Follower(processes=processes, channel=channel)


def _bytes(value: bytes) -> np.ndarray:
    return np.frombuffer(value, np.uint8)


def _share(value: np.ndarray) -> np.ndarray:
    """Process 0's value."""
    gathered = multihost_utils.process_allgather(value)
    return np.asarray(gathered).reshape(-1, value.size)[0].astype(np.uint8)


class LeaderRunner:
    """A runner whose steps all processes compute; see `serving.engine.StepRunner`."""

    def __init__(self, runner: StepRunner, channel: LeaderChannel) -> None:
        """
        Args:
          runner: of this process.
          channel: to the others, who have a like runner.
        """
        self.limits = runner.limits
        self.cache_sizes = runner.cache_sizes
        self.vocab_size = runner.vocab_size
        self.eos_token_id = runner.eos_token_id
        self.look_back = runner.look_back
        self._runner = runner
        self._channel = channel

    @property
    def looks_ahead(self) -> bool:
        """As this process's runner."""
        return self._runner.looks_ahead

    def expect(self, rows: Sequence[RequestRows]) -> None:
        """Begins lookups on this process alone; the others look up when a step comes."""
        self._runner.expect(rows)

    def close(self) -> None:
        """Ends what runs beside the steps."""
        self._runner.close()

    def submit(self, rows: Sequence[RequestRows], sampling: SamplingBatch) -> StepHandle:
        """Sends a step to all, and dispatches it.

        Raises:
          ChannelError: a process is lost.
          ValueError: the rows do not fit the largest bucket.
        """
        self._channel.broadcast(encode_step(rows, sampling))
        return self._runner.submit(rows, sampling)


def follow(runner: StepRunner, channel: FollowerChannel, no_changes: LogitChanges) -> None:
    """Computes the steps of process 0 until it ends.

    Args:
      runner: of this process.
      channel: from process 0.
      no_changes: tables of a step that changes no logits.

    Raises:
      MessageError: process 0 is of another version.
      Exception: whatever a step raises.
    """
    running: deque[StepHandle] = deque()
    while (message := channel.receive()) is not None:
        running.append(runner.submit(*decode_step(message, no_changes)))
        if len(running) > _IN_FLIGHT:
            running.popleft().result()
    runner.close()


def run_follower(follower: Follower, load: Callable[[], tuple[StepRunner, LogitChanges]]) -> int:
    """Loads and follows; what fails is told to process 0 and ends the process.

    SIGTERM and SIGINT ask process 0 to end the server, and this process ends with it.

    Args:
      follower: this process.
      load: makes the runner, compiled, and the tables of a step that changes no logits.

    Returns:
      0, after process 0 has ended the server.
    """
    index, channel = follower.processes.index, follower.channel

    def ended(news: News) -> None:
        end_process(news.status, f"process {index}: {news.reason}")

    def closing(*_: Any) -> None:
        channel.tell(CLOSING, News(0))

    channel.watch(ended)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, closing)
    try:
        runner, no_changes = load()
        print(f"process {index} of {follower.processes.count} follows process 0", flush=True)
        follow(runner, channel, no_changes)
        channel.close()
    except Exception as error:
        time.sleep(1)  # where the failure is that process 0 is lost, the reader says so
        status = getattr(error, "status", 1)
        if status == 1:
            _LOG.exception("a step failed; the server ends")
        reason = " ".join(f"{error}".split()) or type(error).__name__
        channel.tell(FAILED, News(status, reason))
        end_process(status, f"process {index}: {reason}")
    return 0


class Watch:
    """Ends process 0 when another process fails, is lost or is told to end."""

    def __init__(self, channel: LeaderChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._fail: Callable[[str], None] = lambda message: None
        self._open_requests: Callable[[], int] = lambda: 0
        self._close: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)
        channel.watch(self._heard)

    def serves(
        self,
        *,
        fail: Callable[[str], None],
        open_requests: Callable[[], int],
        close: Callable[[], None],
    ) -> None:
        """Says how to end from now on.

        Args:
          fail: ends the engine and its requests with an error.
          open_requests: how many are still being answered.
          close: ends the server when the open requests are answered.
        """
        self._fail, self._open_requests, self._close = fail, open_requests, close

    def end(self, status: int, reason: str = "") -> None:
        """Ends the others."""
        self._channel.end(News(status, reason))

    def _heard(self, index: int, kind: int, news: News) -> None:
        if kind == CLOSING:
            self._close()
            return
        with self._lock:  # the first that is lost ends all
            reason = f"process {index} has failed: {news.reason}"
            self._channel.end(News(news.status, reason))
            self._fail(reason)
            until = time.monotonic() + _LAST_WORDS
            while self._open_requests() and time.monotonic() < until:
                time.sleep(0.05)
            end_process(news.status or 1, f"{reason}; the server ends")


def end_process(status: int, message: str) -> NoReturn:
    """Prints a line and ends at once: an ordinary end would wait for processes that are gone."""
    print(f"serving.main: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(status)
