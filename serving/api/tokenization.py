"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from serving.api.errors import JsonResponse, bad_request
from serving.api.generation import context_of, off_loop
from serving.api.protocol import ChatFields, DetokenizeBody, TokenizeBody, json_body, read_body
from serving.chat import encode_chat

router = APIRouter()


@router.post("/tokenize", openapi_extra=json_body(TokenizeBody))
async def tokenize(http: HttpRequest) -> JsonResponse:
    """Ids of a prompt, or of a chat's prompt."""
    context = context_of(http)
    body = await read_body(http, TokenizeBody, limit=context.options.max_body_bytes)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        text = body.prompt
        tokens = await off_loop(http, lambda: context.tokenizer.encode(text))
    else:
        fields = body.model_dump(include=set(ChatFields.model_fields))
        prompt = await off_loop(http, lambda: encode_chat(context.tokenizer, fields))
        tokens = list(prompt.token_ids)
    strings = [context.tokenizer.token_text(token) for token in tokens]
    return JsonResponse(
        {
            "count": len(tokens),
            "max_model_len": context.options.max_model_len,
            "tokens": tokens,
            "token_strs": strings if body.return_token_strs else None,
        }
    )


@router.get("/tokenizer_info")
async def tokenizer_info(http: HttpRequest) -> JsonResponse:
    """The checkpoint's tokenizer_config.json, with the special tokens clients ask for."""
    return JsonResponse(dict(context_of(http).options.tokenizer_info))


@router.post("/detokenize", openapi_extra=json_body(DetokenizeBody))
async def detokenize(http: HttpRequest) -> JsonResponse:
    """Text of ids, special tokens included."""
    context = context_of(http)
    body = await read_body(http, DetokenizeBody, limit=context.options.max_body_bytes)
    context.check_model(body.model)
    vocab_size = context.options.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise bad_request(
            f"tokens holds {wrong}; token ids are from 0 to {vocab_size - 1}", "tokens"
        )
    return JsonResponse({"prompt": context.tokenizer.decode(body.tokens)})
