"""How the server is: /health, /ping, /version, /server_info, /load, /metrics, cache reset."""

import importlib.metadata

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.api.errors import ApiError, JsonResponse
from serving.api.generation import context_of
from serving.api.metrics import CONTENT_TYPE

router = APIRouter()


def package_version() -> str:
    """The installed version of this package."""
    try:
        return importlib.metadata.version("dsv41-jax")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@router.get("/health")
async def health(http: HttpRequest) -> Response:
    """200 with an empty body while the server takes requests, else 503."""
    context = context_of(http)
    if context.open_requests.closing:
        raise ApiError(503, "the server is shutting down")
    if not context.engine.is_alive:
        raise ApiError(503, "the engine has stopped")
    return Response()


@router.get("/ping")
@router.post("/ping")
async def ping(http: HttpRequest) -> Response:
    """As /health."""
    return await health(http)


@router.get("/version")
async def version() -> JsonResponse:
    """The installed version of this package."""
    return JsonResponse({"version": package_version()})


@router.get("/server_info")
async def server_info(http: HttpRequest) -> JsonResponse:
    """Versions, device and sizes of the server."""
    return JsonResponse(dict(context_of(http).options.server_info))


@router.post("/reset_prefix_cache")
@router.post("/flush_cache")
@router.get("/flush_cache")
async def reset_prefix_cache(http: HttpRequest) -> JsonResponse:
    """Forget all cached prefixes; any body is taken, and none is read."""
    context_of(http).engine.reset_prefix_cache()
    return JsonResponse({"success": True})


@router.get("/load")
async def load(http: HttpRequest) -> JsonResponse:
    """How many requests are being answered."""
    return JsonResponse({"server_load": context_of(http).open_requests.count})


@router.get("/metrics")
@router.head("/metrics")
async def metrics(http: HttpRequest) -> Response:
    """Prometheus text."""
    return Response(context_of(http).metrics.text(), media_type=CONTENT_TYPE)
