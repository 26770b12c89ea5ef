"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape.

Thinking is on unless it is disabled, as in chats.
"""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.api.chat_run import ChatRun, start_chat
from serving.api.context import Context
from serving.api.errors import ApiError, JsonResponse, bad_request, error_body
from serving.api.generation import context_of, off_loop
from serving.api.messages_body import CountBody, MessagesBody, chat_body, names
from serving.api.middleware import request_id_of
from serving.api.protocol import ChatFields, json_body, read_body
from serving.api.relabel import relabel
from serving.api.streaming import (
    ClientGoneError,
    EventStream,
    as_api_error,
    event,
    until_disconnect,
)
from serving.chat import ChatError, Delta, ToolCallDelta, encode_chat
from serving.request import RequestError

router = APIRouter()
_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_DELTAS = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
_FIELDS = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def _error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's shape, with the fields of OpenAI's in it."""
    body = error_body(error)["error"] | {"type": _TYPES.get(error.status, "api_error")}
    return {"type": "error", "error": body}


def _failure(error: ApiError) -> bytes:
    return event(_error_body(error), "error")


def _input(arguments: str) -> Any:
    """Arguments as an object; others, such as ones cut short, as one string of that name."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


class _Answer:
    """A message that grows; every change is an event."""

    def __init__(self, run: ChatRun, *, model: str, answer_id: str) -> None:
        self._run = run
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._message: dict[str, Any] = {
            "id": answer_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        usage = self._run.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _begin(self, kind: str, **fields: Any) -> Iterator[bytes]:
        yield from self._end()
        empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
        self._open = {"type": kind, **empty.get(kind, {"input": {}}), **fields}
        self._text = ""
        self._blocks.append(self._open)
        yield self._event("content_block_start", index=self._index, content_block=self._open)

    def _end(self) -> Iterator[bytes]:
        if self._open is None:
            return
        block = self._open
        if block["type"] == "tool_use":
            block["input"] = _input(self._text)
        else:
            block[block["type"]] = self._text
        if block["type"] == "thinking":
            block["signature"] = self._message["id"]
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield self._event("content_block_delta", index=self._index, delta=delta)
        yield self._event("content_block_stop", index=self._index)
        self._open = None

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    def _add(self, kind: str, text: str) -> Iterator[bytes]:
        if not text:
            return
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(kind)
        self._text += text
        delta = {"type": _DELTAS[kind], _FIELDS[kind]: text}
        yield self._event("content_block_delta", index=self._index, delta=delta)

    def _call(self, call: ToolCallDelta) -> Iterator[bytes]:
        if call.name is not None:
            yield from self._begin("tool_use", id=call.call_id, name=call.name)
        yield from self._add("tool_use", call.arguments)

    def _take(self, delta: Delta) -> Iterator[bytes]:
        yield from self._add("thinking", delta.reasoning)
        yield from self._add("text", delta.content)
        for call in delta.tool_calls:
            yield from self._call(call)

    def _finish(self, reason: str, stop: str | int | None) -> Iterator[bytes]:
        yield from self._end()
        by_sequence = isinstance(stop, str) and reason == "stop"
        end = {
            "stop_reason": "stop_sequence"
            if by_sequence
            else _STOP_REASONS.get(reason, "end_turn"),
            "stop_sequence": stop if by_sequence else None,
        }
        self._message |= end | {"usage": self._usage()}
        yield self._event("message_delta", delta=end, usage=self._usage())
        yield self._event("message_stop")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The message as events."""
        async with contextlib.aclosing(self._run.parts()) as stream:
            begun = False
            async for _, part in stream:
                if not begun:
                    begun = True
                    self._message["usage"] = self._usage() | {"output_tokens": 0}
                    yield self._event("message_start", message=self._message)
                for data in self._take(part.delta):
                    yield data
                if part.finish_reason is not None:
                    for data in self._finish(part.finish_reason, part.stop_reason):
                        yield data

    async def answer(self) -> dict[str, Any]:
        """The whole message."""
        async with contextlib.aclosing(self.events()) as stream:
            async for _ in stream:
                pass
        return self._message


async def _answered(work: Callable[[], Awaitable[Response]]) -> Response:
    """An answer, or its error in Anthropic's shape."""
    try:
        return await work()
    except (ClientGoneError, ClientDisconnect):
        raise
    except Exception as error:
        failure = as_api_error(error)
        return JsonResponse(_error_body(failure), status_code=failure.status)


async def _create(http: HttpRequest, context: Context) -> Response:
    body = await read_body(http, MessagesBody, limit=context.options.max_body_bytes)
    model = context.check_model(body.model)
    if body.max_tokens is None:
        raise bad_request("max_tokens is missing", "max_tokens")
    chat, origins = chat_body(body)
    answer_id = f"msg_{request_id_of(http)}"
    try:
        run = await start_chat(http, context, chat, request_id=answer_id)
    except (ApiError, ChatError, RequestError) as error:
        raise relabel(as_api_error(error), origins, "messages", names(body)) from error
    answer = _Answer(run, model=model, answer_id=answer_id)
    if run.options.stream:
        return EventStream(
            context, answer.events(), done=b"", failure=_failure, error_body=_error_body
        )
    with context.open_requests:
        return JsonResponse(await until_disconnect(http, answer.answer()))


async def _count(http: HttpRequest, context: Context) -> Response:
    body = await read_body(http, CountBody, limit=context.options.max_body_bytes)
    context.check_model(body.model)
    chat, origins = chat_body(body)
    fields = chat.model_dump(include=set(ChatFields.model_fields))
    try:
        prompt = await off_loop(http, lambda: encode_chat(context.tokenizer, fields))
    except ChatError as error:
        raise relabel(as_api_error(error), origins, "messages", names(body)) from error
    return JsonResponse({"input_tokens": len(prompt.token_ids)})


@router.post("/v1/messages", openapi_extra=json_body(MessagesBody))
async def create_message(http: HttpRequest) -> Response:
    """Answer a conversation in Anthropic's shape."""
    return await _answered(lambda: _create(http, context_of(http)))


@router.post("/v1/messages/count_tokens", openapi_extra=json_body(CountBody))
async def count_tokens(http: HttpRequest) -> Response:
    """Tokens of a conversation's prompt."""
    return await _answered(lambda: _count(http, context_of(http)))
