"""POST /v1/chat/completions."""

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.api.context import Context
from serving.api.errors import JsonResponse, bad_request
from serving.api.generation import context_of, engine_requests, off_loop, run_request, timer_of
from serving.api.logprobs import chat_logprobs, prompt_logprobs
from serving.api.middleware import request_id_of
from serving.api.protocol import ChatBody, ChatFields, json_body, read_body
from serving.api.sampling import Options, read_options
from serving.api.streaming import EventStream, event, merge, until_disconnect
from serving.api.usage import Usage
from serving.chat import ChatPrompt, Delta, OutputParser, encode_chat
from serving.request import Request, RequestOutput, TokenLogprob

router = APIRouter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """What one engine output adds to one choice.

    Attributes:
      delta: reasoning, content and tool calls; may be empty.
      logprobs: of the new tokens, or None.
      num_tokens: how many new tokens there are.
      finish_reason, stop_reason: set in the last part.
    """

    delta: Delta
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def _join(deltas: Sequence[Delta], *, one_call: bool) -> Delta:
    """One delta of several; pieces of one tool call become one piece."""
    calls = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if one_call and call.index > 0:
            continue
        if calls and calls[-1].index == call.index and call.name is None:
            arguments = calls[-1].arguments + call.arguments
            calls[-1] = dataclasses.replace(calls[-1], arguments=arguments)
        else:
            calls.append(call)
    return Delta(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        tuple(calls),
    )


class _Chat:
    """One request being answered."""

    def __init__(
        self,
        context: Context,
        *,
        model: str,
        request_id: str,
        body: ChatBody,
        prompt: ChatPrompt,
        options: Options,
    ) -> None:
        self._context = context
        self._prompt = prompt
        self._options = options
        self._one_call = body.parallel_tool_calls is False
        # Stop strings count in the content only, which the engine cannot tell from the rest.
        self._requests = engine_requests(
            context,
            f"chatcmpl-{request_id}",
            [prompt.token_ids],
            dataclasses.replace(options, sampling=dataclasses.replace(options.sampling, stop=())),
            default_max_tokens=None,
        )
        self._usage = Usage(len(prompt.token_ids), reasoning_tokens=0)
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def _parts(self, request: Request) -> AsyncGenerator[_Part, None]:
        """One choice, parsed; ends the engine's request at a stop string."""
        sampling = self._options.sampling
        parser = OutputParser(
            self._context.tokenizer,
            start=self._prompt.start,
            parse_tool_calls=self._prompt.parse_tool_calls,
            stop=sampling.stop,
            keep_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        timer = timer_of(self._context, request)
        outputs = run_request(self._context, request, timer)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                part = self._parse(parser, output)
                if part.finish_reason is not None:
                    self._usage.reasoning_tokens += parser.reasoning_tokens
                    timer.end(output.finish_reason or "stop")
                yield part
                if part.finish_reason is not None:
                    return

    def _parse(self, parser: OutputParser, output: RequestOutput) -> _Part:
        ids = output.token_ids
        by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        keep_last = output.stop_reason is not None and (
            self._options.sampling.include_stop_str_in_output
        )
        before = parser.num_tokens
        deltas = parser.push(ids[:-1] if by_token and ids and not keep_last else ids)
        num_tokens = len(ids)
        finish_reason: str | None = None
        stop_reason = output.stop_reason
        if parser.stop_reason is not None:
            num_tokens = parser.num_tokens - before
            stop_reason = parser.stop_reason
            last, finish_reason = parser.finish("stop")
            deltas += last
        elif output.finish_reason is not None:
            end = "length" if output.finish_reason == "length" else "stop"
            last, finish_reason = parser.finish(end)
            deltas += last
            # The end of the output may complete a stop string that was held back.
            stop_reason = parser.stop_reason or stop_reason
        return _Part(
            delta=_join(deltas, one_call=self._one_call),
            num_tokens=num_tokens,
            logprobs=None if output.logprobs is None else output.logprobs[:num_tokens],
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.num_cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _all_parts(self) -> AsyncGenerator[tuple[int, _Part], None]:
        return merge([self._parts(request) for request in self._requests])

    def _count(self, part: _Part) -> None:
        self._usage.completion_tokens += part.num_tokens
        self._usage.cached_tokens = max(self._usage.cached_tokens, part.cached_tokens)

    def _logprobs(self, part: _Part) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        return chat_logprobs(
            self._context.tokenizer, part.logprobs, as_ids=self._options.tokens_as_ids
        )

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        parts: list[list[_Part]] = [[] for _ in self._requests]
        async with contextlib.aclosing(self._all_parts()) as stream:
            async for index, part in stream:
                self._count(part)
                parts[index].append(part)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, of_one) for index, of_one in enumerate(parts)],
            "usage": self._usage.body(),
            "prompt_logprobs": prompt_logprobs(
                self._context.tokenizer, parts[0][0].prompt_logprobs
            ),
        }

    def _choice(self, index: int, parts: Sequence[_Part]) -> dict[str, Any]:
        delta = _join([part.delta for part in parts], one_call=self._one_call)
        reasoning = delta.reasoning if self._prompt.thinking else None
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
            logprobs = chat_logprobs(
                self._context.tokenizer, entries, as_ids=self._options.tokens_as_ids
            )
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: the role, what each output adds, and how it ended."""
        begun: set[int] = set()
        async with contextlib.aclosing(self._all_parts()) as stream:
            async for index, part in stream:
                if index not in begun:
                    begun.add(index)
                    yield self._event(index, {"role": "assistant", "content": ""})
                self._count(part)
                logprobs = self._logprobs(part)
                fields = _delta_fields(part.delta)
                if fields or logprobs is not None:
                    yield self._event(index, fields or {"content": ""}, logprobs=logprobs)
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
                    "usage": self._usage.body(),
                }
            )

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
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
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._options.usage_in_every_chunk:
            chunk["usage"] = self._usage.body()
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


def _check_enforced(body: ChatBody) -> None:
    """Refuse what only a grammar can bring about."""
    if body.tool_choice == "required" or isinstance(body.tool_choice, dict):
        raise bad_request(
            "tool_choice required or a named function is not supported by this server; use auto "
            "or none",
            "tool_choice",
        )
    kind = body.response_format.get("type") if isinstance(body.response_format, dict) else None
    if kind is not None and kind != "text":
        raise bad_request(
            f"response_format of type {kind} is not supported by this server", "response_format"
        )


@router.post(
    "/v1/chat/completions",
    openapi_extra=json_body(ChatBody),
)
async def create_chat_completion(http: HttpRequest) -> Response:
    """Answer a conversation."""
    context = context_of(http)
    body = await read_body(http, ChatBody, limit=context.options.max_body_bytes)
    model = context.check_model(body.model)
    options = read_options(body, vocab_size=context.options.vocab_size)
    fields = body.model_dump(include=set(ChatFields.model_fields))
    prompt = await off_loop(http, lambda: encode_chat(context.tokenizer, fields))
    _check_enforced(body)
    chat = _Chat(
        context,
        model=model,
        request_id=request_id_of(http),
        body=body,
        prompt=prompt,
        options=options,
    )
    if options.stream:
        return EventStream(context, chat.events())
    with context.open_requests:
        return JsonResponse(await until_disconnect(http, chat.answer()))
