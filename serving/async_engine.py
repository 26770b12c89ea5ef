"""The engine on a thread of its own, driven from asyncio."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from serving.engine import Engine, EngineStats
from serving.request import EngineDeadError, FinishReason, Request, RequestError, RequestOutput

_LOG = logging.getLogger(__name__)


class _Stream:
    """Outputs of one request on their way to the event loop that waits for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()


class AsyncEngine:
    """Runs an `Engine`; its methods may be called from any thread or event loop.

    The engine's thread starts at once. After a failed step, or one that takes too long, it is
    dead: every open request gets an output with finish_reason "error", and later ones
    `EngineDeadError`.
    """

    def __init__(self, engine: Engine, *, step_timeout: float = 600.0) -> None:
        """
        Args:
          engine: driven by this object alone from here on.
          step_timeout: seconds after which a step counts as failed.
        """
        self._engine = engine
        self._step_timeout = step_timeout
        self._step_began: float | None = None
        self._ended = threading.Event()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # open to callers; under the lock
        self._live: dict[str, _Stream] = {}  # of the requests in the engine; its thread's own
        self._lock = threading.Lock()
        self._stop_by: float | None = None  # monotonic seconds, once a shutdown is asked for
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="engine watchdog", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and self._failure is None and self._stop_by is None

    @property
    def failure(self) -> str | None:
        """What killed the engine, if something did."""
        return self._failure

    def check(self, request: Request) -> None:
        """As `Engine.check`."""
        self._engine.check(request)

    def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        return self._engine.stats()

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Yields the outputs of a request until one has a finish_reason.

        Closing or cancelling the iteration aborts the request.

        Raises:
          RequestError: the request can never be served, or its id is in use.
          EngineDeadError: the engine has stopped.
        """
        self.check(request)
        stream = self._open(request)
        try:
            while True:
                output = await stream.outputs.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self._take(request.request_id, stream):
                self._inbox.put(lambda: self._drop(request.request_id))

    def abort(self, request_id: str) -> None:
        """Ends a request from outside; its stream gets finish_reason "abort"."""
        stream = self._take(request_id)
        if stream is not None:
            self._inbox.put(lambda: self._drop(request_id))
            self._send({stream: [RequestOutput(request_id, finish_reason="abort")]})

    def reset_prefix_cache(self) -> None:
        """As `Engine.reset_prefix_cache`, before any request that is made later."""
        self._inbox.put(self._engine.reset_prefix_cache)

    def fail(self, reason: str) -> None:
        """Ends every open request with finish_reason "error"; later ones get `EngineDeadError`."""
        self._end_all("error", reason)

    def shutdown(self, timeout: float = 0.0) -> None:
        """Refuses new requests, finishes the open ones while there is time, and stops the thread.

        Requests that are still open then get finish_reason "abort". A second call can shorten
        the time of the first.

        Args:
          timeout: seconds that open requests get; the step in progress ends in any case.
        """
        stop_by = time.monotonic() + timeout
        with self._lock:
            self._stop_by = stop_by if self._stop_by is None else min(stop_by, self._stop_by)
        self._inbox.put(lambda: None)
        self._ended.wait()

    def _open(self, request: Request) -> _Stream:
        stream = _Stream(asyncio.get_running_loop())
        with self._lock:
            if not self.is_alive:
                raise EngineDeadError(f"the engine has stopped: {self._failure or 'shut down'}")
            if request.request_id in self._streams:
                raise RequestError(
                    f"request id {request.request_id!r} is in use", param="request_id"
                )
            self._streams[request.request_id] = stream
            self._inbox.put(lambda: self._add(request, stream))
        return stream

    def _take(self, request_id: str, expected: _Stream | None = None) -> _Stream | None:
        """Removes a stream, if it is open and the expected one; whoever gets it ends it."""
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is None or (expected is not None and stream is not expected):
                return None
            return self._streams.pop(request_id)

    def _add(self, request: Request, stream: _Stream) -> None:
        try:
            self._engine.add_request(request)
        except RequestError as error:
            if self._take(request.request_id, stream):
                reason = str(error)
                output = RequestOutput(
                    request.request_id, finish_reason="error", stop_reason=reason
                )
                self._send({stream: [output]})
        else:
            self._live[request.request_id] = stream

    def _drop(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._live.pop(request_id, None)

    def _run(self) -> None:
        try:
            while True:
                idle = not self._engine.has_work
                self._read_inbox(wait=idle and self._stop_by is None)
                if not self._goes_on():
                    break
                if self._engine.has_work:
                    self._step()
        except Exception as error:
            _LOG.exception("a step failed; the engine stops")
            self._end_all("error", f"{type(error).__name__}: {error}")
        else:
            self._end_all("abort", None)
        finally:
            self._engine.close()

    def _goes_on(self) -> bool:
        if self._failure is not None:
            return False
        if self._stop_by is None:
            return True
        return self._engine.has_work and time.monotonic() < self._stop_by

    def _step(self) -> None:
        self._step_began = time.monotonic()
        outputs = self._engine.step()
        self._step_began = None
        if self._failure is None:
            self._publish(outputs)

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._step_timeout / 4)):
            began = self._step_began
            if began is not None and time.monotonic() - began > self._step_timeout:
                message = f"a step has taken longer than {self._step_timeout:g} seconds"
                _LOG.error("%s; the engine stops", message)
                self._end_all("error", message)

    def _read_inbox(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _publish(self, outputs: list[RequestOutput]) -> None:
        ready: dict[_Stream, list[RequestOutput]] = {}
        for output in outputs:
            stream = self._live[output.request_id]
            ready.setdefault(stream, []).append(output)
            if output.finish_reason is not None:
                del self._live[output.request_id]
                self._take(output.request_id, stream)
        self._send(ready)

    def _send(self, ready: dict[_Stream, list[RequestOutput]]) -> None:
        """Hands outputs over, with one wake-up per event loop."""
        by_loop = defaultdict(list)
        for stream, outputs in ready.items():
            by_loop[stream.loop].append((stream, outputs))
        for loop, items in by_loop.items():
            with contextlib.suppress(RuntimeError):  # a closed loop has nobody waiting
                loop.call_soon_threadsafe(_deliver, items)

    def _end_all(self, reason: FinishReason, message: str | None) -> None:
        """Ends every open request; the first call decides what the engine failed of."""
        with self._lock:
            if not self._ended.is_set():
                self._failure = message
            streams, self._streams = self._streams, {}
        self._send(
            {
                stream: [RequestOutput(request_id, finish_reason=reason, stop_reason=message)]
                for request_id, stream in streams.items()
            }
        )
        self._ended.set()


def _deliver(items: list[tuple[_Stream, list[RequestOutput]]]) -> None:
    for stream, outputs in items:
        for output in outputs:
            stream.outputs.put_nowait(output)
