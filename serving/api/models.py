"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from serving.api.context import Context
from serving.api.errors import JsonResponse
from serving.api.generation import context_of

router = APIRouter()


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "dsv41-jax",
        "root": context.options.model_root,
        "parent": None,
        "max_model_len": context.options.max_model_len,
        "vocab_size": context.options.vocab_size,
    }


@router.get("/v1/models")
async def list_models(http: HttpRequest) -> JsonResponse:
    """The names the model is served under."""
    context = context_of(http)
    cards = [_card(context, name) for name in context.options.model_names]
    return JsonResponse({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def retrieve_model(http: HttpRequest, name: str) -> JsonResponse:
    """One of them."""
    context = context_of(http)
    return JsonResponse(_card(context, context.check_model(name)))
