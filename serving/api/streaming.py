"""Outputs of several requests merged, server-sent events, and clients that hang up."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serving.api.context import Context
from serving.api.errors import ApiError, JsonResponse, error_body, internal_error
from serving.chat import ChatError
from serving.request import EngineDeadError, RequestError

Item = TypeVar("Item")
log = logging.getLogger("serving.api")

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    prefix = b"" if name is None else b"event: " + name.encode() + b"\n"
    return prefix + b"data: " + orjson.dumps(data) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return event(error_body(error))


def as_api_error(error: Exception) -> ApiError:
    """What the client is told; faults of ours are logged with their traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (RequestError, ChatError)):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has stopped")
    log.error("a request failed", exc_info=error)
    return internal_error()


async def merge(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all streams as they come, each with the position of its stream.

    However it ends, every stream is closed; if one fails, so does the whole.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item | Exception | None]] = asyncio.Queue()

    async def drain(index: int) -> None:
        end = None
        try:
            async with contextlib.aclosing(streams[index]) as stream:
                async for item in stream:
                    queue.put_nowait((index, item))
        except Exception as error:
            end = error
        queue.put_nowait((index, end))

    tasks = [asyncio.ensure_future(drain(index)) for index in range(len(streams))]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(http: HttpRequest, work: Coroutine[Any, Any, Item]) -> Item:
    """Do the work unless the client hangs up first, which cancels it.

    Raises:
      ClientGoneError: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """A stream of server-sent events; ends its generator when the client hangs up.

    The status is sent with the first event, so that a request that fails before it is answered
    with a proper error. A later failure is sent as an event, and then the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        context: Context,
        events: AsyncGenerator[bytes, None],
        *,
        done: bytes = DONE,
        failure: Callable[[ApiError], bytes] = _error_event,
        error_body: Callable[[ApiError], dict[str, Any]] = error_body,
    ) -> None:
        super().__init__(headers=HEADERS)
        self._context = context
        self._events = events
        self._done = done
        self._failure = failure
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI)."""
        sender = asyncio.ensure_future(self._send(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            with self._context.open_requests:
                await asyncio.wait((sender, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, gone):
                task.cancel()
            await asyncio.gather(sender, gone, return_exceptions=True)
            await self._events.aclose()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        tail = self._done
        try:
            async for chunk in self._events:
                if not started:
                    await send(self._start())
                    started = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            failure = as_api_error(error)
            if not started:
                answer = JsonResponse(self._error_body(failure), status_code=failure.status)
                await answer(scope, receive, send)
                return
            tail = self._failure(failure) + self._done
        if not started:
            await send(self._start())
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    def _start(self) -> Message:
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        return {"type": "http.response.start", "status": 200, "headers": headers}
