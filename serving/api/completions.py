"""POST /v1/completions."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.api.constraints import constrain_completion, named
from serving.api.context import Context
from serving.api.errors import JsonResponse, bad_request
from serving.api.generation import context_of, engine_requests, off_loop, run_request, timer_of
from serving.api.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from serving.api.middleware import request_id_of
from serving.api.protocol import CompletionBody, json_body, read_body
from serving.api.sampling import Options, read_options
from serving.api.streaming import EventStream, event, merge, until_disconnect
from serving.api.usage import Usage
from serving.request import Request, RequestError, RequestOutput, TokenLogprob

router = APIRouter()
_DEFAULT_MAX_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """A prompt's ids, and its text for `echo`."""

    token_ids: tuple[int, ...]
    text: str


def _read_prompts(context: Context, body: CompletionBody) -> list[_Prompt]:
    """The prompts as ids; strings are encoded as they are, without a BOS.

    Raises:
      ApiError: 400, if there is none, too many, or one is empty or out of the vocabulary.
    """
    prompt = body.prompt
    if prompt is None:
        raise bad_request("prompt is missing", "prompt")
    if isinstance(prompt, str):
        several: Sequence[str | list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        several = [prompt]  # type: ignore[list-item]
    else:
        several = prompt  # type: ignore[assignment]
    if not several:
        raise bad_request("prompt is empty; it must hold at least one token", "prompt")
    if len(several) > context.options.max_choices:
        raise bad_request(
            f"prompt holds {len(several)} prompts; at most {context.options.max_choices} are taken",
            "prompt",
        )
    prompts = []
    vocab_size = context.options.vocab_size
    for one in several:
        if isinstance(one, str):
            ids, text = context.tokenizer.encode(one), one
        else:
            wrong = next((token for token in one if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise bad_request(
                    f"prompt holds the token id {wrong}; token ids are from 0 to {vocab_size - 1}",
                    "prompt",
                )
            ids, text = one, context.tokenizer.decode(one) if body.echo else ""
        if not ids:
            raise bad_request("prompt is empty; it must hold at least one token", "prompt")
        prompts.append(_Prompt(tuple(ids), text))
    return prompts


class _Choice:
    """One choice while its outputs come in."""

    def __init__(
        self, context: Context, index: int, prompt: _Prompt, options: Options, *, echo: bool
    ) -> None:
        self._context = context
        self._index = index
        self._prompt = prompt
        self._options = options
        self._echo = echo
        self._echoed = False
        self._begun = False
        self._offsets = TextOffsets(
            context.tokenizer.vocabulary, skip_special_tokens=options.sampling.skip_special_tokens
        )

    def chunk(self, output: RequestOutput) -> dict[str, Any]:
        """What one output adds, as a choice of the answer."""
        text = output.text
        entries: tuple[TokenLogprob | None, ...] = output.logprobs or ()
        tokens = output.token_ids
        offsets: list[int] = []
        if self._echo and not self._echoed:
            self._echoed = True
            text = self._prompt.text + text
            if output.prompt_logprobs is not None:
                offsets = self._offsets.of_prompt(self._prompt.token_ids)
                tokens = (*self._prompt.token_ids, *tokens)
                entries = (*output.prompt_logprobs, *entries)
        logprobs = None
        if self._options.sampling.logprobs is not None:
            logprobs = completion_logprobs(
                self._context.tokenizer,
                entries,
                tokens,
                offsets=offsets + self._offsets.of_output(output.token_ids),
                as_ids=self._options.tokens_as_ids,
            )
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
            if not self._begun:
                choice["prompt_token_ids"] = self._prompt.token_ids
        self._begun = True
        return choice


class _Completion:
    """One request being answered."""

    def __init__(
        self,
        context: Context,
        *,
        model: str,
        request_id: str,
        body: CompletionBody,
        prompts: Sequence[_Prompt],
        options: Options,
        requests: Sequence[Request],
    ) -> None:
        self._context = context
        self._options = options
        self._requests = requests
        self._want_prompt_logprobs = body.prompt_logprobs is not None
        self._choices = [
            _Choice(context, index, prompts[index // options.n], options, echo=bool(body.echo))
            for index in range(len(requests))
        ]
        self._usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self._cached = [0] * len(prompts)
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def _count(self, index: int, output: RequestOutput) -> None:
        self._usage.completion_tokens += len(output.token_ids)
        prompt = index // self._options.n
        self._cached[prompt] = max(self._cached[prompt], output.num_cached_tokens)
        self._usage.cached_tokens = sum(self._cached)

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        context = self._context
        return merge(
            [
                run_request(context, request, timer_of(context, request, self._options))
                for request in self._requests
            ]
        )

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        chunks: list[list[dict[str, Any]]] = [[] for _ in self._requests]
        of_prompts: list[Any] = [None] * len(self._requests)
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                self._count(index, output)
                chunks[index].append(self._choices[index].chunk(output))
                if output.prompt_logprobs is not None and self._want_prompt_logprobs:
                    of_prompts[index] = prompt_logprobs(
                        self._context.tokenizer, output.prompt_logprobs
                    )
        choices = []
        for parts, of_prompt in zip(chunks, of_prompts, strict=True):
            choice = {**parts[-1], "text": "".join(part["text"] for part in parts)}
            if choice["logprobs"] is not None:
                choice["logprobs"] = {
                    name: [entry for part in parts for entry in part["logprobs"][name]]
                    for name in choice["logprobs"]
                }
            if self._options.return_token_ids:
                choice["token_ids"] = [token for part in parts for token in part["token_ids"]]
                choice["prompt_token_ids"] = parts[0]["prompt_token_ids"]
            choices.append({**choice, "prompt_logprobs": of_prompt})
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, one per output."""
        every = self._options.usage_in_every_chunk
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                self._count(index, output)
                chunk = {**self._head, "choices": [self._choices[index].chunk(output)]}
                if every:
                    chunk["usage"] = self._usage.body()
                yield event(chunk)
        if self._options.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.body()})


@router.post(
    "/v1/completions",
    openapi_extra=json_body(CompletionBody),
)
async def create_completion(http: HttpRequest) -> Response:
    """Continue one or several prompts."""
    context = context_of(http)
    body = await read_body(http, CompletionBody, limit=context.options.max_body_bytes)
    model = context.check_model(body.model)
    options = read_options(body, context.tokenizer, vocab_size=context.options.vocab_size)
    options, field = constrain_completion(body, options)
    prompts = await off_loop(http, lambda: _read_prompts(context, body))
    request_id = request_id_of(http)

    def make_requests() -> list[Request]:
        return engine_requests(
            context,
            f"cmpl-{request_id}",
            [prompt.token_ids for prompt in prompts],
            options,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
        )

    try:
        # A grammar is compiled on a thread, since it may take a while.
        on_thread = options.sampling.grammar is not None
        requests = await asyncio.to_thread(make_requests) if on_thread else make_requests()
    except RequestError as error:
        raise named(error, field) from error
    completion = _Completion(
        context,
        model=model,
        request_id=request_id,
        body=body,
        prompts=prompts,
        options=options,
        requests=requests,
    )
    if options.stream:
        return EventStream(context, completion.events())
    with context.open_requests:
        return JsonResponse(await until_disconnect(http, completion.answer()))
