"""A conversation being answered: engine outputs parsed into deltas, in no surface's shape."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request as HttpRequest

from serving.api.constraints import constrain_chat, named_in_chat
from serving.api.context import Context
from serving.api.generation import engine_requests, off_loop, run_request, timer_of
from serving.api.protocol import ChatBody, ChatFields
from serving.api.sampling import Options, read_options
from serving.api.streaming import merge
from serving.api.usage import Usage
from serving.chat import ChatPrompt, Delta, OutputParser, encode_chat
from serving.request import Request, RequestError, RequestOutput, TokenLogprob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one engine output adds to one choice.

    Attributes:
      delta: reasoning, content and tool calls; may be empty.
      logprobs: of the new tokens, or None.
      token_ids: the new tokens.
      finish_reason, stop_reason: set in the last part.
    """

    delta: Delta
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def join_deltas(deltas: Sequence[Delta], *, one_call: bool) -> Delta:
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


class ChatRun:
    """One conversation's choices.

    Attributes:
      prompt: the rendered conversation.
      options: of the request.
      one_call: keep the first tool call of each choice only.
      usage: grows with the parts.
    """

    def __init__(
        self,
        context: Context,
        *,
        request_id: str,
        prompt: ChatPrompt,
        options: Options,
        one_call: bool,
    ) -> None:
        self._context = context
        self.prompt = prompt
        self.options = options
        self.one_call = one_call
        # Stop strings count in the content only, which the engine cannot tell from the rest.
        self._requests = engine_requests(
            context,
            request_id,
            [prompt.token_ids],
            dataclasses.replace(options, sampling=dataclasses.replace(options.sampling, stop=())),
            default_max_tokens=None,
        )
        self.usage = Usage(len(prompt.token_ids), reasoning_tokens=0)

    @property
    def num_choices(self) -> int:
        """Choices that are generated."""
        return len(self._requests)

    async def parts(self) -> AsyncGenerator[tuple[int, Part], None]:
        """Parts of all choices as they come, each with its choice's number."""
        merged = merge([self._parts(request) for request in self._requests])
        async with contextlib.aclosing(merged) as stream:
            async for index, part in stream:
                self.usage.completion_tokens += len(part.token_ids)
                self.usage.cached_tokens = max(self.usage.cached_tokens, part.cached_tokens)
                yield index, part

    async def all_parts(self) -> list[list[Part]]:
        """The parts of every choice, once all have ended."""
        parts: list[list[Part]] = [[] for _ in self._requests]
        async with contextlib.aclosing(self.parts()) as stream:
            async for index, part in stream:
                parts[index].append(part)
        return parts

    def join(self, parts: Sequence[Part]) -> Delta:
        """Everything that the parts of one choice add."""
        return join_deltas([part.delta for part in parts], one_call=self.one_call)

    async def _parts(self, request: Request) -> AsyncGenerator[Part, None]:
        """One choice, parsed; ends the engine's request at a stop string."""
        sampling = self.options.sampling
        parser = OutputParser(
            self._context.tokenizer,
            start=self.prompt.start,
            parse_tool_calls=self.prompt.parse_tool_calls,
            stop=sampling.stop,
            keep_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        timer = timer_of(self._context, request, self.options)
        outputs = run_request(self._context, request, timer)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                part = self._parse(parser, output)
                if part.finish_reason is not None:
                    self.usage.reasoning_tokens += parser.reasoning_tokens
                    timer.end(output.finish_reason or "stop")
                yield part
                if part.finish_reason is not None:
                    return

    def _parse(self, parser: OutputParser, output: RequestOutput) -> Part:
        ids = output.token_ids
        by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        keep_last = output.stop_reason is not None and (
            self.options.sampling.include_stop_str_in_output
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
        delta = join_deltas(deltas, one_call=self.one_call)
        if not self.options.include_reasoning:
            delta = dataclasses.replace(delta, reasoning="")
        return Part(
            delta=delta,
            token_ids=ids[:num_tokens],
            logprobs=None if output.logprobs is None else output.logprobs[:num_tokens],
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.num_cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )


async def start_chat(
    http: HttpRequest, context: Context, body: ChatBody, *, request_id: str
) -> ChatRun:
    """Check, render and queue a conversation.

    Raises:
      ApiError, ChatError, RequestError: naming the field that is wrong.
    """
    options = read_options(body, context.tokenizer, vocab_size=context.options.vocab_size)
    fields = body.model_dump(include=set(ChatFields.model_fields))
    prompt = await off_loop(http, lambda: encode_chat(context.tokenizer, fields))
    options, field = constrain_chat(context.tokenizer, body, prompt, options)

    def run() -> ChatRun:
        return ChatRun(
            context,
            request_id=request_id,
            prompt=prompt,
            options=options,
            one_call=body.parallel_tool_calls is False,
        )

    try:
        # A grammar is compiled on a thread, since it may take a while.
        return run() if options.sampling.grammar is None else await asyncio.to_thread(run)
    except RequestError as error:
        raise named_in_chat(error, field, body, prompt, options) from error
