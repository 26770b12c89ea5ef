"""The engine on a thread of its own, driven from asyncio."""

import asyncio
import contextlib
import logging
import queue
import threading
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

    The engine's thread starts at once. After a failed step it is dead: every open request gets
    an output with finish_reason "error", and later ones `EngineDeadError`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # open to callers; under the lock
        self._live: dict[str, _Stream] = {}  # of the requests in the engine; its thread's own
        self._lock = threading.Lock()
        self._stopping = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and self._failure is None and not self._stopping

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

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the thread; open requests get finish_reason "abort".

        Args:
          timeout: seconds to wait for the step in progress; None waits as long as it takes.
        """
        with self._lock:
            self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout)

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
        self._engine.add_request(request)
        self._live[request.request_id] = stream

    def _drop(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._live.pop(request_id, None)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._read_inbox(wait=not self._engine.has_work)
                if self._engine.has_work:
                    self._publish(self._engine.step())
        except Exception as error:
            _LOG.exception("a step failed; the engine stops")
            self._end_all("error", f"{type(error).__name__}: {error}")
        else:
            self._end_all("abort", None)

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
        with self._lock:
            self._failure = message
            streams, self._streams = self._streams, {}
        self._send(
            {
                stream: [RequestOutput(request_id, finish_reason=reason, stop_reason=message)]
                for request_id, stream in streams.items()
            }
        )


def _deliver(items: list[tuple[_Stream, list[RequestOutput]]]) -> None:
    for stream, outputs in items:
        for output in outputs:
            stream.outputs.put_nowait(output)
