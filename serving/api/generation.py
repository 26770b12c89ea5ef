"""What completions and chats share: engine requests made, checked, run and timed."""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request as HttpRequest

from serving.api.context import Context
from serving.api.errors import ApiError, internal_error
from serving.api.metrics import RequestTimer
from serving.api.sampling import Options
from serving.request import Request, RequestOutput, SamplingParams

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
      ApiError: 400, if a prompt leaves no room.
      RequestError: the engine can never serve it.
    """
    requests = []
    for number, prompt in enumerate(prompts):
        max_tokens = context.max_tokens(len(prompt), options.max_tokens, default_max_tokens)
        for choice in range(options.n):
            sampling: SamplingParams = options.sampling_for(choice=choice, max_tokens=max_tokens)
            request = Request(
                request_id=f"{request_id}-{number * options.n + choice}",
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_time=time.monotonic(),
            )
            context.engine.check(request)
            requests.append(request)
    return requests


def timer_of(context: Context, request: Request) -> RequestTimer:
    """A timer for one engine request, started."""
    return context.metrics.timer(
        prompt_tokens=len(request.prompt_token_ids), max_tokens=request.sampling.max_tokens
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
