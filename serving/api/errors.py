"""Errors in OpenAI's shape."""

from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer other than success.

    Attributes:
      status: HTTP status.
      param: the request's field at fault, if one is.
      kind: the `type` sent; errors of HTTP itself have the status's phrase.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind or _TYPES.get(status) or HTTPStatus(status).phrase


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param)


def internal_error() -> ApiError:
    """What a client is told about a fault of ours; the log holds the rest."""
    return ApiError(500, "Internal server error")


def error_body(error: ApiError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": error.param,
            "code": error.status,
        }
    }


class JsonResponse(Response):
    """JSON through orjson; not-a-number and infinities become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Bytes of `content`."""
        return orjson.dumps(content)


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JsonResponse:
    """The whole answer of an error."""
    return JsonResponse(error_body(error), status_code=error.status, headers=headers)
