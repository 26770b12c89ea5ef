"""Sampling options of a request: checked, and turned into the engine's.

Where servers differ: max_tokens beyond the room left is limited to it; temperature is at most 2;
n above 1 needs a temperature above 0; logprobs are at most 20 and never the whole vocabulary;
max_completion_tokens wins over max_tokens; choice i of a prompt has the request's seed plus i.
An option that is known and not honoured is refused unless it is given its neutral value.
Special tokens never have spaces put between them, whatever spaces_between_special_tokens is.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.api.errors import bad_request
from serving.api.protocol import ChatBody, CompletionBody, GenerationBody
from serving.request import MAX_LOGPROBS, SamplingParams
from serving.tokenizer import Tokenizer

MAX_CHOICES = 128
MAX_TOP_K = 2**31 - 1
_SEEDS = (-(2**63), 2**63)


def _is(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == other for other in neutral)


def _empty(value: Any) -> bool:
    return not value


# Options that are known and not honoured, each with the values that change nothing.
_NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    "use_beam_search": _is(False),
    "length_penalty": _is(1),
    "truncate_prompt_tokens": _is(),
    "thinking_token_budget": _is(),
    "stream_interval": _is(1),
    "lora_request": _is(),
    "kv_transfer_params": _empty,
    "logits_processors": _empty,
    "vllm_xargs": _empty,
    "add_special_tokens": _is(False),
    "detokenize": _is(True),
    "web_search_options": _is(),
    "prompt_embeds": _empty,
    "suffix": _empty,
    "chat_template": _is(),
    "documents": _empty,
    "mm_processor_kwargs": _empty,
    "separate_reasoning": _is(True),
    "functions": _empty,
    "function_call": _is("none"),
    "modalities": _is(["text"]),
    "audio": _is(),
    "prediction": _is(),
}
_GUIDED = ("json", "regex", "choice", "grammar")  # as structured_outputs calls them


def _range(body: GenerationBody, name: str, wanted: str, good: Callable[[Any], bool]) -> None:
    value = getattr(body, name)
    if value is not None and not good(value):
        raise bad_request(f"{name} is {value}; it must be {wanted}", name)


def _check_ranges(body: GenerationBody, vocab_size: int) -> None:
    _range(body, "temperature", "from 0 to 2", lambda v: 0 <= v <= 2)
    _range(body, "top_p", "above 0 and at most 1", lambda v: 0 < v <= 1)
    _range(
        body, "top_k", f"0 or -1 (off), or from 1 to {MAX_TOP_K}", lambda v: -1 <= v <= MAX_TOP_K
    )
    _range(body, "min_p", "from 0 to 1", lambda v: 0 <= v <= 1)
    _range(body, "presence_penalty", "from -2 to 2", lambda v: -2 <= v <= 2)
    _range(body, "frequency_penalty", "from -2 to 2", lambda v: -2 <= v <= 2)
    _range(body, "repetition_penalty", "above 0", lambda v: v > 0)
    _range(body, "n", f"from 1 to {MAX_CHOICES}", lambda v: 1 <= v <= MAX_CHOICES)
    _range(body, "min_tokens", "at least 0", lambda v: v >= 0)
    _range(body, "seed", "a 64-bit integer", lambda v: _SEEDS[0] <= v < _SEEDS[1])
    _range(body, "prompt_logprobs", f"from 0 to {MAX_LOGPROBS}", lambda v: 0 <= v <= MAX_LOGPROBS)
    _range(body, "priority", "a 32-bit integer", lambda v: -(2**31) <= v < 2**31)
    if body.cache_salt == "":
        raise bad_request("cache_salt is empty; it must be a text, or left out", "cache_salt")
    _range(body, "best_of", "at least 1", lambda v: v >= 1)
    for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
        for token in getattr(body, name) or ():
            if not 0 <= token < vocab_size:
                raise bad_request(
                    f"{name} holds {token}; token ids are from 0 to {vocab_size - 1}", name
                )
    if body.allowed_token_ids == []:
        raise bad_request(
            "allowed_token_ids is empty; it must hold at least one token id", "allowed_token_ids"
        )
    for key in body.logit_bias or {}:
        if not key.removeprefix("-").isdecimal():
            raise bad_request(f"logit_bias has the key {key!r}; keys are token ids", "logit_bias")
        if not 0 <= int(key) < vocab_size:
            raise bad_request(
                f"logit_bias has the key {key}; token ids are from 0 to {vocab_size - 1}",
                "logit_bias",
            )


def _check_neutral(body: GenerationBody) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and not neutral(value):
            raise bad_request(f"{name} is not supported by this server", name)
    for kind in _GUIDED:
        name = f"guided_{kind}"
        if getattr(body, name) is not None:
            raise bad_request(
                f"{name} is not supported by this server; use structured_outputs.{kind}", name
            )
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise bad_request(f"best_of is {body.best_of}; it must be at least n, {n}", "best_of")
    if body.best_of not in (None, n):
        raise bad_request(f"best_of {body.best_of} is not supported by this server", "best_of")


def _stops(body: GenerationBody) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if "" in stops:
        raise bad_request("stop holds an empty string", "stop")
    return stops


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Alternatives per token, or None for no log-probabilities."""
    if isinstance(body, CompletionBody):
        _range(body, "logprobs", f"from 0 to {MAX_LOGPROBS}", lambda v: 0 <= v <= MAX_LOGPROBS)
        return body.logprobs
    _range(body, "top_logprobs", f"from 0 to {MAX_LOGPROBS}", lambda v: 0 <= v <= MAX_LOGPROBS)
    if not body.logprobs:
        if body.top_logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        return None
    return body.top_logprobs or 0


@dataclasses.dataclass(frozen=True)
class Options:
    """A request's checked options.

    Attributes:
      sampling: for the engine; `max_tokens` is still to be limited to the room left.
      max_tokens: as asked, None for the default of the route.
      n: choices per prompt.
      stream: send as it is generated.
      include_usage, usage_in_every_chunk: where a stream carries usage.
      tokens_as_ids: name tokens in log-probabilities "token_id:123".
      return_token_ids: send the ids of prompts and of what is generated.
      include_reasoning: send what the model thinks.
      priority: lower runs first.
      cache_salt: prefixes are shared only with requests of the same salt.
    """

    sampling: SamplingParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool
    tokens_as_ids: bool
    return_token_ids: bool = False
    include_reasoning: bool = True
    priority: int = 0
    cache_salt: str | None = None

    def sampling_for(self, *, choice: int, max_tokens: int) -> SamplingParams:
        """The engine's options of one choice: a seed of its own, and its length."""
        seed = self.sampling.seed
        return dataclasses.replace(
            self.sampling,
            max_tokens=max_tokens,
            min_tokens=min(self.sampling.min_tokens, max_tokens),
            seed=None if seed is None else seed + choice,
        )


def _bad_words(tokenizer: Tokenizer, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """Every word's ids at the start of a text and after a space."""
    spelled: dict[tuple[int, ...], None] = {}
    for word in words or ():
        if not word.strip():
            raise bad_request("bad_words holds an empty word", "bad_words")
        for text in (word, " " + word.lstrip()):
            spelled[tuple(tokenizer.encode_plain(text))] = None
    return tuple(spelled)


def read_options(
    body: CompletionBody | ChatBody, tokenizer: Tokenizer, *, vocab_size: int
) -> Options:
    """Check the options of a request.

    Raises:
      ApiError: 400, naming the field that is out of range or not supported.
    """
    _check_ranges(body, vocab_size)
    _check_neutral(body)
    n = 1 if body.n is None else body.n
    temperature = 1.0 if body.temperature is None else body.temperature
    if n > 1 and temperature == 0:
        raise bad_request("n must be 1 when using greedy sampling (temperature 0)", "n")
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    max_name, max_tokens = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            max_name, max_tokens = "max_completion_tokens", body.max_completion_tokens
        if body.echo:
            raise bad_request("echo is not supported for chats", "echo")
    if max_tokens is not None and max_tokens < (0 if echo else 1):
        least = "at least 0" if echo else "at least 1"
        raise bad_request(f"{max_name} is {max_tokens}; it must be {least}", max_name)
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise bad_request(
            f"min_tokens {body.min_tokens} is above {max_name} {max_tokens}", "min_tokens"
        )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    logprobs = _logprobs(body)
    if body.logprob_token_ids and logprobs is None:
        raise bad_request("logprob_token_ids needs logprobs", "logprob_token_ids")
    prompt_logprobs = body.prompt_logprobs
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    streamed = body.stream_options
    penalty, allowed = body.repetition_penalty, body.allowed_token_ids
    return Options(
        sampling=SamplingParams(
            min_tokens=body.min_tokens or 0,
            temperature=float(temperature),
            top_p=1.0 if body.top_p is None else float(body.top_p),
            top_k=max(0, body.top_k or 0),
            min_p=float(body.min_p or 0.0),
            seed=body.seed,
            stop=_stops(body),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=body.skip_special_tokens is not False,
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            repetition_penalty=float(1.0 if penalty is None else penalty),
            logit_bias=tuple((int(k), float(v)) for k, v in (body.logit_bias or {}).items()),
            allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
            bad_words=_bad_words(tokenizer, body.bad_words),
            logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids or ())),
        ),
        max_tokens=max_tokens,
        n=n,
        stream=bool(body.stream),
        include_usage=bool(streamed and streamed.include_usage),
        usage_in_every_chunk=bool(streamed and streamed.continuous_usage_stats),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=bool(body.return_token_ids),
        include_reasoning=not isinstance(body, ChatBody) or body.include_reasoning is not False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
