"""A request inside the engine: its tokens, how far they are computed, and what it holds."""

import dataclasses

import numpy as np

from serving.cache_groups import PageTable
from serving.logit_rules import LogitRules
from serving.page_keys import PageKeys
from serving.request import FinishReason, Request, TokenLogprob


@dataclasses.dataclass(frozen=True)
class Finish:
    """Why a request ended; `stop_reason` as in `RequestOutput`."""

    reason: FinishReason
    stop_reason: str | int | None = None


class Sequence:
    """Mutable bookkeeping of one request; owned by the scheduler.

    Attributes:
      number: identity within the engine; never reused, unlike request ids and slots.
      request: what was asked for.
      seed: of the random stream, uint32.
      num_computed: positions whose rows are scheduled or done.
      num_scored: prompt rows whose log-probabilities are scheduled or done.
      awaits_token: a sampled token is on its way.
      pages: what the request holds of the caches.
      num_named: pages from the beginning whose content has a name.
      num_cached: prompt positions whose rows were there already; None before it first runs.
      begin_time: `time.monotonic()` seconds when it first ran, or None.
      rules: what it does to its logits, or None if nothing.
      late_from: first position that the late layers compute (bounded replay); 0 is exact.
      slot: row of the per-request state, or None while it is not running.
      finish: set once the request has ended.
      prompt_logprobs: one entry per scored prompt token, the first is None.
    """

    def __init__(
        self,
        request: Request,
        *,
        number: int,
        seed: int,
        max_model_len: int,
        pages: PageTable,
        rules: LogitRules | None,
        keys: PageKeys | None,
        late_from: int,
    ) -> None:
        self.request = request
        self.number = number
        self.seed = seed
        self.num_computed = 0
        self.num_scored = 0
        self.awaits_token = False
        self.pages = pages
        self.num_named = 0
        self.num_cached: int | None = None
        self.begin_time: float | None = None
        self.rules = rules
        self.late_from = late_from
        self._keys = keys
        self.slot: int | None = None
        self.finish: Finish | None = None
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_tokens = self.num_prompt
        self._max_model_len = max_model_len
        room = min(self.num_prompt + request.sampling.max_tokens, max_model_len)
        self._tokens = np.empty(max(room, self.num_prompt), np.int32)
        self._tokens[: self.num_prompt] = request.prompt_token_ids

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return self.num_tokens - self.num_prompt

    @property
    def first_logit_row(self) -> int:
        """Position of the first row whose logits are still wanted."""
        if self.request.sampling.prompt_logprobs is not None:
            if self.num_scored < self.num_prompt - 1:
                return self.num_scored
        return self.num_tokens - 1

    @property
    def ends_next(self) -> bool:
        """Whether the next token is the last one there is room for."""
        return (
            self.num_generated + 1 >= self.request.sampling.max_tokens
            or self.num_tokens + 1 >= self._max_model_len
        )

    def page_keys(self, pages: int) -> list[bytes]:
        """Names of the first pages, all full; none if pages are not reused."""
        return [] if self._keys is None else self._keys.first(pages, self._tokens)

    def tokens(self, start: int, end: int) -> np.ndarray:
        """int32[end - start], a copy."""
        return self._tokens[start:end].copy()

    def history(self, start: int, count: int) -> np.ndarray:
        """int32[count]: the ids before `start`, oldest first, -1 before the prompt."""
        if start >= count:
            return self._tokens[start - count : start].copy()
        known = start
        return np.concatenate(
            [np.full(count - known, -1, np.int32), self._tokens[start - known : start]]
        )

    def append(self, token: int, eos_token_id: int) -> None:
        """Adds a sampled token and decides whether it ends the request."""
        sampling = self.request.sampling
        self.awaits_token = False
        if sampling.max_tokens == 0:
            self.finish = Finish("length")
            return
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.rules is not None:
            self.rules.push(token)
        if token == eos_token_id and not sampling.ignore_eos:
            self.finish = Finish("stop")
        elif token in sampling.stop_token_ids:
            self.finish = Finish("stop", token)
        elif self.num_generated >= sampling.max_tokens or self.num_tokens >= self._max_model_len:
            self.finish = Finish("length")
