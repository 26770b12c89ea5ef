"""What every route needs, and the requests that are open."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from serving.api.errors import ApiError
from serving.api.metrics import Metrics
from serving.engine import EngineStats
from serving.request import Request, RequestOutput
from serving.tokenizer import Tokenizer


class GenerationEngine(Protocol):
    """The asynchronous engine as the routes see it."""

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        ...

    def check(self, request: Request) -> None:
        """Raises `RequestError` for a request that can never be served."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, the last with a finish reason; closing it drops the request."""
        ...

    def stats(self) -> EngineStats:
        """Counts for /metrics."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests are not disturbed."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """Options of the HTTP surface.

    Attributes:
      model_names: names the model is served under; the first is reported.
      model_root: where the model comes from, for /v1/models.
      max_model_len: most tokens of a request, prompt and output.
      vocab_size: token ids are below this.
      api_key: what /v1 routes ask for; None lets everybody in.
      max_body_bytes: larger bodies are refused.
      max_choices: more prompts, or choices, in one request are refused.
      log_requests: log every prompt and its options, not only that it was asked.
      tokenizer_info: what /tokenizer_info answers.
      server_info: what /server_info answers.
    """

    model_names: tuple[str, ...]
    model_root: str
    max_model_len: int
    vocab_size: int
    api_key: str | None = None
    max_body_bytes: int = 32 * 2**20
    max_choices: int = 1024
    log_requests: bool = False
    tokenizer_info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    server_info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class OpenRequests:
    """Counts the requests being answered, and refuses new ones once the server is closing."""

    def __init__(self) -> None:
        self.count = 0
        self.closing = False

    def __enter__(self) -> None:
        if self.closing:
            raise ApiError(503, "the server is shutting down")
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Everything the routes work with."""

    engine: GenerationEngine
    tokenizer: Tokenizer
    options: ApiOptions
    metrics: Metrics
    open_requests: OpenRequests = dataclasses.field(default_factory=OpenRequests)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.options.model_names[0]

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
          ApiError: 404, if the model is not served here.
        """
        if name is None:
            return self.model_name
        if name not in self.options.model_names:
            served = ", ".join(self.options.model_names)
            raise ApiError(
                404, f"The model `{name}` does not exist; served here: {served}", param="model"
            )
        return name

    def max_tokens(self, prompt_tokens: int, asked: int | None, default: int | None) -> int:
        """Tokens a prompt may generate: as asked or by default, within the room left.

        Raises:
          ApiError: 400, if the prompt leaves no room.
        """
        limit = self.options.max_model_len
        if prompt_tokens >= limit:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, your prompt has "
                f"{prompt_tokens} tokens; it must leave room for at least one more",
                param="prompt",
            )
        wanted = default if asked is None else asked
        room = limit - prompt_tokens
        return room if wanted is None else min(wanted, room)
