"""What goes into the engine and what comes out of it: plain frozen data."""

import dataclasses
from typing import Literal

from dsv41_jax.sampling import MAX_BANNED, NUM_ALTERNATIVES

MAX_LOGPROBS = NUM_ALTERNATIVES  # alternatives the sampler returns for every token
MAX_STOP_TOKENS = MAX_BANNED - 1  # that min_tokens can hold off, beside EOS

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request the engine can never serve; `param` names the offending field, if one does."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(RuntimeError):
    """The engine stopped after a failed step, or was shut down."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when they end.

    Attributes:
      max_tokens: most tokens to generate; 0 only makes sense with `prompt_logprobs`.
      min_tokens: EOS and stop tokens are not sampled, and stop strings not looked for, before
        this many tokens.
      temperature: below 1e-5 is greedy.
      top_p: in (0, 1]; 1 is off.
      top_k: 0 is off.
      min_p: in [0, 1]; least probability relative to the likeliest token; 0 is off.
      seed: the request's own random stream; None lets the engine draw one.
      stop: strings that end the text.
      stop_token_ids: tokens that end the text.
      include_stop_str_in_output: keep the stop string that was found.
      ignore_eos: go on after EOS.
      logprobs: alternatives per generated token, 0 for the token alone, None for no logprobs.
      prompt_logprobs: likewise for the prompt's tokens.
      skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Checks every range; see `RequestError`."""
        _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 0")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or more")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _require(all(self.stop), "stop", "an empty string", "text")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or 0 <= value <= MAX_LOGPROBS,
                name,
                value,
                f"from 0 to {MAX_LOGPROBS}",
            )
        if self.min_tokens and len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; together with min_tokens "
                f"it can have {MAX_STOP_TOKENS}",
                param="stop_token_ids",
            )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value}; it must be {allowed}", param=name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      request_id: unique among the requests in the engine.
      prompt_token_ids: at least one.
      sampling: see `SamplingParams`.
      arrival_time: `time.monotonic()` seconds when the request came in.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float = 0.0


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token under the raw distribution (before temperature).

    Attributes:
      token_id: the token.
      logprob: natural logarithm.
      rank: 1 for the likeliest token.
      top: the likeliest tokens as (id, logprob), best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """What one step adds to one request.

    Attributes:
      request_id: whose.
      token_ids: the new tokens; may be empty.
      text: the new text: stop strings are cut, incomplete UTF-8 and what may become a stop
        string are held back until they are decided.
      logprobs: one per new token, or None if not asked for.
      prompt_logprobs: one per prompt token, None for the first; once, with the first output.
      finish_reason: None while the request goes on.
      stop_reason: the stop string or stop token id that was found; None for EOS. With
        `finish_reason` "error" it is the message.
      num_cached_tokens: prompt tokens whose cache rows were reused.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
