"""POST /v1/chat/completions."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.api.chat_run import ChatRun, Part, start_chat
from serving.api.errors import JsonResponse
from serving.api.generation import context_of
from serving.api.logprobs import chat_logprobs, prompt_logprobs
from serving.api.middleware import request_id_of
from serving.api.protocol import ChatBody, json_body, read_body
from serving.api.streaming import EventStream, event, until_disconnect
from serving.chat import Delta
from serving.tokenizer import Tokenizer

router = APIRouter()


class _Chat:
    """One request being answered, in OpenAI's shape."""

    def __init__(self, run: ChatRun, tokenizer: Tokenizer, *, model: str, answer_id: str) -> None:
        self._run = run
        self._options = run.options
        self._with_ids = run.options.return_token_ids
        self._tokenizer = tokenizer
        self._head = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        parts = await self._run.all_parts()
        prompt = {"prompt_token_ids": self._run.prompt.token_ids} if self._with_ids else {}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, of_one) for index, of_one in enumerate(parts)],
            "usage": self._run.usage.body(),
            "prompt_logprobs": prompt_logprobs(self._tokenizer, parts[0][0].prompt_logprobs),
            **prompt,
        }

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        delta = self._run.join(parts)
        thinks = self._run.prompt.thinking and self._options.include_reasoning
        reasoning = delta.reasoning if thinks else None
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.content or (None if delta.tool_calls else ""),
            "refusal": None,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
        }
        if delta.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in delta.tool_calls
            ]
        logprobs = None
        if self._options.sampling.logprobs is not None:
            entries = [entry for part in parts for entry in part.logprobs or ()]
            logprobs = chat_logprobs(self._tokenizer, entries, as_ids=self._options.tokens_as_ids)
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
        }
        if self._with_ids:
            choice["token_ids"] = [token for part in parts for token in part.token_ids]
        return choice

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: the role, what each output adds, and how it ended."""
        begun: set[int] = set()
        async with contextlib.aclosing(self._run.parts()) as stream:
            async for index, part in stream:
                if index not in begun:
                    begun.add(index)
                    yield self._event(
                        index,
                        {"role": "assistant", "content": ""},
                        prompt_ids=self._run.prompt.token_ids if self._with_ids else None,
                    )
                logprobs = None
                if part.logprobs is not None:
                    logprobs = chat_logprobs(
                        self._tokenizer, part.logprobs, as_ids=self._options.tokens_as_ids
                    )
                fields = _delta_fields(part.delta)
                token_ids = part.token_ids if self._with_ids else None
                if fields or logprobs is not None or token_ids:
                    yield self._event(
                        index, fields or {"content": ""}, logprobs=logprobs, token_ids=token_ids
                    )
                if part.finish_reason is not None:
                    yield self._event(
                        index,
                        {},
                        finish_reason=part.finish_reason,
                        stop_reason=part.stop_reason,
                    )
        if self._options.include_usage:
            yield event(
                {
                    **self._head,
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": self._run.usage.body(),
                }
            )

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        prompt_ids: Sequence[int] | None = None,
        token_ids: Sequence[int] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        if token_ids is not None:
            choice["token_ids"] = token_ids
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if prompt_ids is not None:
            chunk["prompt_token_ids"] = prompt_ids
        if self._options.usage_in_every_chunk:
            chunk["usage"] = self._run.usage.body()
        return event(chunk)


def _delta_fields(delta: Delta) -> dict[str, Any]:
    """A delta as it is sent; empty if it adds nothing."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = fields["reasoning"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = [
            {"index": call.index, "function": {"arguments": call.arguments}}
            if call.name is None
            else {
                "index": call.index,
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.tool_calls
        ]
    return fields


@router.post(
    "/v1/chat/completions",
    openapi_extra=json_body(ChatBody),
)
async def create_chat_completion(http: HttpRequest) -> Response:
    """Answer a conversation."""
    context = context_of(http)
    body = await read_body(http, ChatBody, limit=context.options.max_body_bytes)
    model = context.check_model(body.model)
    answer_id = f"chatcmpl-{request_id_of(http)}"
    run = await start_chat(http, context, body, request_id=answer_id)
    chat = _Chat(run, context.tokenizer, model=model, answer_id=answer_id)
    if run.options.stream:
        return EventStream(context, chat.events())
    with context.open_requests:
        return JsonResponse(await until_disconnect(http, chat.answer()))
