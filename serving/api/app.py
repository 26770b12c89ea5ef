"""The HTTP application: routes, error answers and middleware."""

from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest

from serving.api import (
    chat_completions,
    completions,
    health,
    messages,
    models,
    responses,
    tokenization,
)
from serving.api.context import Context
from serving.api.errors import ApiError, JsonResponse, bad_request, error_response
from serving.api.health import package_version
from serving.api.middleware import ApiKey, CatchErrors, RequestIds
from serving.api.streaming import as_api_error
from serving.chat import ChatError
from serving.request import EngineDeadError, RequestError


async def _known_error(_: HttpRequest, error: Exception) -> JsonResponse:
    return error_response(as_api_error(error))


async def _http_error(http: HttpRequest, error: HTTPException) -> JsonResponse:
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no route {http.url.path}"
    elif error.status_code == 405:
        message = f"{http.url.path} does not take {http.method}"
    phrase = HTTPStatus(error.status_code).phrase
    failure = ApiError(error.status_code, message, kind=phrase)
    return error_response(failure, dict(error.headers or {}))


async def _invalid(_: HttpRequest, error: RequestValidationError) -> JsonResponse:
    first = error.errors()[0]
    return error_response(bad_request(f"{first['loc'][-1]}: {first['msg']}", str(first["loc"][-1])))


def create_app(context: Context) -> FastAPI:
    """The application that serves `context`."""
    app = FastAPI(
        title="dsv41-jax",
        version=package_version(),
        description="OpenAI-compatible serving of DeepSeek-V4.1",
    )
    app.state.context = context
    modules = (completions, chat_completions, responses, messages, models, tokenization, health)
    for module in modules:
        app.include_router(module.router)
    for kind in (ApiError, ChatError, RequestError, EngineDeadError):
        app.add_exception_handler(kind, _known_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    # The last one added is the outermost.
    app.add_middleware(CatchErrors)
    if context.options.api_key is not None:
        app.add_middleware(ApiKey, api_key=context.options.api_key)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
    app.add_middleware(RequestIds)
    return app
