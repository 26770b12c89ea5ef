"""What goes into the engine and what comes out of it: plain frozen data."""

import dataclasses
from typing import Literal, get_args

from dsv41_jax.sampling import NUM_ALTERNATIVES

MAX_LOGPROBS = NUM_ALTERNATIVES  # alternatives the sampler returns for every token
MAX_LOGIT_BIAS = 1024  # tokens one request may bias

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]
FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request the engine can never serve; `param` names the offending field, if one does."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(RuntimeError):
    """The engine stopped after a failed step, or was shut down."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """What an output has to look like.

    Attributes:
      kind: how `text` is read: a JSON schema, a regular expression, a JSON list of texts to
        choose from, or a grammar in llguidance's Lark; json_object needs no text.
      text: see `kind`.
      starts_after: token after which the output is constrained (such as the end of thinking);
        None constrains it from the first token.
    """

    kind: GrammarKind
    text: str = ""
    starts_after: int | None = None

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        _require(self.kind in kinds, "grammar", self.kind, f"one of {', '.join(kinds)}")


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
      presence_penalty: in [-2, 2]; subtracted from the logits of tokens generated so far.
      frequency_penalty: in [-2, 2]; subtracted as often as the token was generated.
      repetition_penalty: above 0; divides positive logits, and multiplies negative ones, of
        tokens in the prompt or generated so far; 1 is off.
      logit_bias: (token id, bias in [-100, 100]) pairs, added after the penalties.
      allowed_token_ids: the only tokens that are sampled; None allows all.
      bad_words: token sequences that are not generated.
      logprob_token_ids: tokens whose log-probability comes with every generated token.
      grammar: what the output has to follow; not together with `min_tokens`,
        `allowed_token_ids` or `bad_words`, which could leave it no token.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Checks every range; see `RequestError`."""
        _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 0")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.top_k < 2**31, "top_k", self.top_k, f"from 0 (off) to {2**31 - 1}")
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
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "from -2 to 2")
        penalty = self.repetition_penalty
        _require(0 < penalty < float("inf"), "repetition_penalty", penalty, "above 0")
        self._check_token_lists()
        if self.grammar is not None:
            self._check_beside_grammar()

    def _check_token_lists(self) -> None:
        biases, allowed, words = self.logit_bias, self.allowed_token_ids, self.bad_words
        for token, bias in biases:
            _require(-100 <= bias <= 100, "logit_bias", f"{bias} for {token}", "from -100 to 100")
        _require(
            len(biases) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"{len(biases)} tokens",
            f"at most {MAX_LOGIT_BIAS}",
        )
        _require(len(dict(biases)) == len(biases), "logit_bias", biases, "one bias per token")
        _require(allowed != (), "allowed_token_ids", "empty", "at least one token")
        _require(all(words), "bad_words", "an empty word", "words of at least one token")
        banned = {word[0] for word in words if len(word) == 1}
        _require(
            allowed is None or not banned.issuperset(allowed),
            "bad_words",
            "all of allowed_token_ids",
            "such that an allowed token is left",
        )
        watched = len(self.logprob_token_ids)
        _require(
            watched <= MAX_LOGPROBS,
            "logprob_token_ids",
            f"{watched} tokens",
            f"at most {MAX_LOGPROBS}",
        )

    def _check_beside_grammar(self) -> None:
        for name in ("allowed_token_ids", "bad_words", "min_tokens"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} cannot be used where a grammar (a response format, structured "
                    "outputs, or tools that must be followed) decides which tokens may come; "
                    f"leave {name} out",
                    param=name,
                )

    @property
    def changes_logits(self) -> bool:
        """Whether any option changes logits before a token is chosen."""
        return bool(
            self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.grammar is not None
        )

    def token_lists(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Every option that names tokens, with those tokens."""
        starts_after = None if self.grammar is None else self.grammar.starts_after
        return (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(token for token, _ in self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", tuple(token for word in self.bad_words for token in word)),
            ("logprob_token_ids", self.logprob_token_ids),
            ("grammar", () if starts_after is None else (starts_after,)),
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
      priority: lower ones run first; equal ones in the order they are added.
      cache_salt: requests share cached prefixes only with those of the same salt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token under the raw distribution (before temperature).

    Attributes:
      token_id: the token.
      logprob: natural logarithm.
      rank: 1 for the likeliest token.
      top: the likeliest tokens as (id, logprob), best first, as many as were asked for.
      watched: (id, logprob) of every one of `logprob_token_ids`, in their order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    watched: tuple[tuple[int, float], ...] = ()


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
      begin_time: `time.monotonic()` seconds of the request's first step; None before it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    begin_time: float | None = dataclasses.field(default=None, compare=False)
