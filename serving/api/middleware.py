"""Around every route: request ids, the API key, and no traceback to a client."""

import hmac
import logging
import time
import uuid

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.errors import ApiError, error_response
from serving.api.streaming import ClientGoneError, as_api_error

_GUARDED = ("/v1", "/v2", "/inference")
_MAX_ID = 128
_NOT_LOGGED = ("/health", "/ping", "/metrics", "/load")
access_log = logging.getLogger("serving.access")


def request_id_of(http: HttpRequest) -> str:
    """The id of this HTTP request, as sent back in X-Request-Id."""
    return http.scope["request_id"]


def _header(scope: Scope, name: bytes) -> str | None:
    value = next((value for key, value in scope["headers"] if key == name), None)
    return None if value is None else value.decode("latin-1")


def _given_id(scope: Scope) -> str | None:
    """The client's id, if it is printable and not too long."""
    value = _header(scope, b"x-request-id")
    return value if value and len(value) <= _MAX_ID and value.isprintable() else None


class RequestIds:
    """Takes X-Request-Id from the request, or makes one; returns it and logs one line with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or uuid.uuid4().hex
        scope["request_id"] = request_id

        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]
                message = {**message, "headers": headers}
            await send(message)

        began = time.monotonic()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope["path"] not in _NOT_LOGGED:
                entry = {
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.monotonic() - began, 4),
                }
                access_log.info(orjson.dumps(entry).decode())


class ApiKey:
    """Lets only those with the key into /v1, /v2 and /inference; OPTIONS passes.

    It comes as a bearer token, or in X-Api-Key as Anthropic's clients send it.
    """

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = ((b"authorization", "Bearer "), (b"x-api-key", ""))
        self._key = api_key

    def _holds_key(self, scope: Scope) -> bool:
        return any(
            hmac.compare_digest(
                (_header(scope, name) or "").encode("latin-1"), (prefix + self._key).encode()
            )
            for name, prefix in self._expected
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer (ASGI)."""
        guarded = (
            scope["type"] == "http"
            and scope["method"] != "OPTIONS"
            and any(scope["path"] == p or scope["path"].startswith(p + "/") for p in _GUARDED)
        )
        if guarded and not self._holds_key(scope):
            error = ApiError(401, "the API key is missing or wrong")
            await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


class CatchErrors:
    """Turns what no route expected into a plain 500; the log gets the traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer (ASGI)."""
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except (ClientGoneError, ClientDisconnect):
            return
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            await error_response(as_api_error(error))(scope, receive, send)
