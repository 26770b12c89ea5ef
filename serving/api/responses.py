"""POST /v1/responses: stateless answers as a list of items, whole or as named events."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.api.chat_run import ChatRun, Part, start_chat
from serving.api.errors import ApiError, JsonResponse
from serving.api.generation import context_of
from serving.api.logprobs import chat_logprobs
from serving.api.middleware import request_id_of
from serving.api.protocol import json_body, read_body
from serving.api.relabel import relabel
from serving.api.responses_body import NAMES, ResponsesBody, chat_body
from serving.api.streaming import EventStream, as_api_error, event, until_disconnect
from serving.chat import ChatError, ToolCallDelta
from serving.request import RequestError
from serving.tokenizer import Tokenizer

router = APIRouter()
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class _Answer:
    """A response that grows; every change is an event."""

    def __init__(
        self, run: ChatRun, tokenizer: Tokenizer, body: ResponsesBody, *, model: str, answer_id: str
    ) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        sampling = run.options.sampling
        self._response: dict[str, Any] = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": (body.reasoning or {}).get("effort"),
                "summary": None,
            },
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": sampling.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    @property
    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        return self._response

    def failure(self, error: ApiError) -> bytes:
        """What a stream says when it breaks."""
        return self._event("error", code=error.kind, message=str(error), param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(data, kind)

    def _place(self) -> dict[str, Any]:
        place = {"output_index": len(self._output) - 1, "item_id": self._open["id"]}
        return place if self._open["type"] == "function_call" else place | {"content_index": 0}

    def _begin(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """End the open item and begin another."""
        yield from self._end("completed")
        item_id = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._open = item
        self._output.append(item)
        yield self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=item
        )
        if kind in _PARTS:
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._event("response.content_part.added", **self._place(), part=part)

    def _end(self, status: str) -> Iterator[bytes]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        item, place = self._open, self._place()
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            text = {"text": part["text"]}
            if item["type"] == "message":
                text["logprobs"] = part["logprobs"]
            yield self._event(f"response.{part['type']}.done", **place, **text)
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event(
            "response.output_item.done", output_index=place["output_index"], item=item
        )
        self._open = None

    def _text(self, kind: str, text: str, part: Part) -> Iterator[bytes]:
        if self._open is None or self._open["type"] != kind:
            if kind == "reasoning":
                yield from self._begin(kind, summary=[], content=[])
            else:
                yield from self._begin(kind, role="assistant", content=[])
        content = self._open["content"][0]
        content["text"] += text
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            fields["logprobs"] = self._logprobs(part)
            content["logprobs"] += fields["logprobs"]
        yield self._event(f"response.{content['type']}.delta", **self._place(), **fields)

    def _logprobs(self, part: Part) -> list[dict[str, Any]]:
        if part.logprobs is None:
            return []
        return chat_logprobs(self._tokenizer, part.logprobs, as_ids=False)["content"]

    def _call(self, call: ToolCallDelta) -> Iterator[bytes]:
        if call.name is not None:
            yield from self._begin(
                "function_call", call_id=call.call_id, name=call.name, arguments=""
            )
        if call.arguments:
            self._open["arguments"] += call.arguments
            yield self._event(
                "response.function_call_arguments.delta", **self._place(), delta=call.arguments
            )

    def _take(self, part: Part) -> Iterator[bytes]:
        delta = part.delta
        if delta.reasoning:
            yield from self._text("reasoning", delta.reasoning, part)
        if delta.content:
            yield from self._text("message", delta.content, part)
        for call in delta.tool_calls:
            yield from self._call(call)

    def _finish(self, reason: str) -> Iterator[bytes]:
        cut = reason == "length"
        if not self._output:
            # A stream always has an item, so that clients find a place for the text.
            yield from self._begin("message", role="assistant", content=[])
        yield from self._end("incomplete" if cut else "completed")
        usage = self._run.usage
        self._response["status"] = "incomplete" if cut else "completed"
        self._response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self._response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        yield self._event(f"response.{self._response['status']}", response=self._response)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        async with contextlib.aclosing(self._run.parts()) as stream:
            begun = False
            async for _, part in stream:
                if not begun:
                    begun = True
                    yield self._event("response.created", response=self._response)
                    yield self._event("response.in_progress", response=self._response)
                for data in self._take(part):
                    yield data
                if part.finish_reason is not None:
                    for data in self._finish(part.finish_reason):
                        yield data

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        async with contextlib.aclosing(self.events()) as stream:
            async for _ in stream:
                pass
        return self._response


@router.post("/v1/responses", openapi_extra=json_body(ResponsesBody))
async def create_response(http: HttpRequest) -> Response:
    """Answer an input of items; nothing is stored."""
    context = context_of(http)
    body = await read_body(http, ResponsesBody, limit=context.options.max_body_bytes)
    model = context.check_model(body.model)
    chat, origins = chat_body(body)
    answer_id = f"resp_{request_id_of(http)}"
    try:
        run = await start_chat(http, context, chat, request_id=answer_id)
    except (ApiError, ChatError, RequestError) as error:
        raise relabel(as_api_error(error), origins, "input", NAMES) from error
    answer = _Answer(run, context.tokenizer, body, model=model, answer_id=answer_id)
    if run.options.stream:
        return EventStream(context, answer.events(), done=b"", failure=answer.failure)
    with context.open_requests:
        return JsonResponse(await until_disconnect(http, answer.answer()))
