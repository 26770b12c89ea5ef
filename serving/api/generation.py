"""What completions and chats share: engine requests made, checked, run and timed."""

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

import orjson
from starlette.requests import Request as HttpRequest

from serving.api.context import Context
from serving.api.errors import ApiError, bad_request, internal_error
from serving.api.metrics import RequestTimer
from serving.api.sampling import Options
from serving.request import Request, RequestOutput, SamplingParams

Item = TypeVar("Item")
_LONG_BODY = 16384  # bytes; encoding takes about a millisecond
log = logging.getLogger("serving.api")


def engine_requests(
    context: Context,
    request_id: str,
    prompts: Sequence[tuple[int, ...]],
    options: Options,
    *,
    default_max_tokens: int | None,
) -> list[Request]:
    """One engine request per choice; choice i of prompt p is number p * n + i.

    Raises:
      ApiError: 400, if there are too many choices or a prompt leaves no room.
      RequestError: the engine can never serve it.
    """
    requests = []
    total = len(prompts) * options.n
    if total > context.options.max_choices:
        raise bad_request(
            f"{len(prompts)} prompts with n {options.n} make {total} choices; at most "
            f"{context.options.max_choices} are made at once",
            "n",
        )
    unique = uuid.uuid4().hex[:8]  # clients may give two requests one id
    for number, prompt in enumerate(prompts):
        max_tokens = context.max_tokens(len(prompt), options.max_tokens, default_max_tokens)
        for choice in range(options.n):
            sampling: SamplingParams = options.sampling_for(choice=choice, max_tokens=max_tokens)
            request = Request(
                request_id=f"{request_id}-{unique}-{number * options.n + choice}",
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_time=time.monotonic(),
                priority=options.priority,
                cache_salt=options.cache_salt,
            )
            context.engine.check(request)
            requests.append(request)
    if context.options.log_requests:
        for request in requests:
            _log_request(context, request)
    return requests


def _log_request(context: Context, request: Request) -> None:
    entry = {
        "request_id": request.request_id,
        "prompt": context.tokenizer.decode(request.prompt_token_ids),
        "prompt_token_ids": request.prompt_token_ids,
        "sampling": dataclasses.asdict(request.sampling),
    }
    log.info("%s", orjson.dumps(entry).decode())


def timer_of(context: Context, request: Request, options: Options) -> RequestTimer:
    """A timer for one engine request, started."""
    return context.metrics.timer(
        prompt_tokens=len(request.prompt_token_ids),
        max_tokens=request.sampling.max_tokens,
        n=options.n,
    )


async def run_request(
    context: Context, request: Request, timer: RequestTimer
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of one request; closing it drops the request from the engine.

    Raises:
      ApiError: 503, the engine gave the request up; 500, the engine failed.
    """
    try:
        async with contextlib.aclosing(context.engine.generate(request)) as outputs:
            async for output in outputs:
                timer.output(output)
                if output.finish_reason == "abort":
                    raise ApiError(503, "the server is shutting down; the request is unfinished")
                if output.finish_reason == "error":
                    log.error("the engine failed a request: %s", output.stop_reason)
                    raise internal_error()
                yield output
    finally:
        timer.end("abort")


def context_of(http: HttpRequest) -> Context:
    """The server's context."""
    return http.app.state.context


async def off_loop(http: HttpRequest, work: Callable[[], Item]) -> Item:
    """Encode a prompt; on a thread if the body is long enough to hold others up."""
    if int(http.headers.get("content-length", _LONG_BODY)) < _LONG_BODY:
        return work()
    return await asyncio.to_thread(work)
