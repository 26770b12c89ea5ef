"""What a request does to its logits: penalties, biases, bans and constraints, token by token."""

from collections import deque

import numpy as np

from dsv41_jax.sampling import LogitChanges, mask_words
from serving import bitmask
from serving.grammar import GrammarState
from serving.request import MAX_LOGIT_BIAS, SamplingParams
from sharding.limits import EngineLimits


def empty_changes(limits: EngineLimits, vocab_size: int) -> LogitChanges:
    """Tables of one step in which nothing is changed, as numpy arrays.

    There is a row for every request of a step, and in it room for every token a request can
    have seen and those it biases.
    """
    rows = limits.max_num_seqs
    tokens = min(vocab_size, limits.max_model_len + MAX_LOGIT_BIAS)
    return LogitChanges(
        ids=np.full((rows, tokens), -1, np.int32),
        divisor=np.ones((rows, tokens), np.float32),
        bias=np.zeros((rows, tokens), np.float32),
        allowed=np.full((rows, mask_words(vocab_size)), np.iinfo(np.uint32).max, np.uint32),
    )


class LogitRules:
    """The rules of one request; they follow its tokens and depend on nothing else."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_token_ids: tuple[int, ...],
        *,
        vocab_size: int,
        eos_token_id: int,
        grammar: GrammarState | None,
    ) -> None:
        """
        Args:
          sampling: the request's options.
          prompt_token_ids: its prompt; the repetition penalty counts it.
          vocab_size: V.
          eos_token_id: not sampled before `min_tokens`, unless it is ignored.
          grammar: what constrains the output, at its beginning; an output does not end (by EOS
            or a stop token) before it has begun.
        """
        self._vocab_size = vocab_size
        self._min_tokens = sampling.min_tokens
        self._ending = sampling.stop_token_ids + (() if sampling.ignore_eos else (eos_token_id,))
        self._grammar = grammar
        self._generated = 0
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._counts_tokens = bool(self._presence or self._frequency or self._repetition != 1.0)
        self._phrases = [word for word in sampling.bad_words if len(word) > 1]
        longest = max((len(word) - 1 for word in self._phrases), default=0)
        self._tail: deque[int] = deque(maxlen=longest)
        self._allowed = self._lasting_bans(sampling)
        self._table = _ChangeTable(dict(sampling.logit_bias))
        if self._repetition != 1.0:
            for token in dict.fromkeys(prompt_token_ids):
                self._table.set_divisor(token, self._repetition)

    def _lasting_bans(self, sampling: SamplingParams) -> np.ndarray | None:
        words = [word[0] for word in sampling.bad_words if len(word) == 1]
        if sampling.allowed_token_ids is None and not words:
            return None
        if sampling.allowed_token_ids is None:
            allowed = bitmask.full(self._vocab_size)
        else:
            allowed = bitmask.of_tokens(sampling.allowed_token_ids, self._vocab_size)
        bitmask.remove(allowed, words)
        return allowed

    def push(self, token: int) -> None:
        """Takes note of a sampled token."""
        self._generated += 1
        self._tail.append(token)
        if self._grammar is not None:
            self._grammar.push(token)
        if self._counts_tokens:
            self._table.count(token, self._repetition, self._presence, self._frequency)

    def write(self, changes: LogitChanges, row: int) -> bool:
        """Writes what holds for the next token into a row of the tables.

        Args:
          changes: as `empty_changes` makes it, the row untouched.
          row: which.

        Returns:
          Whether anything is changed; otherwise the row is as it was.
        """
        changed = self._table.write(changes, row)
        words = changes.allowed[row]
        if self._grammar is not None and self._grammar.is_active:
            self._grammar.write(words)
            changed = True
        if self._allowed is not None:
            self._narrow(words, words & self._allowed)
            changed = True
        banned = self._banned_now()
        if banned:
            rest = words.copy()
            bitmask.remove(rest, banned)
            self._narrow(words, rest)
            changed = True
        return changed

    def _narrow(self, words: np.ndarray, rest: np.ndarray) -> None:
        # A ban that would leave no token gives way to the rules before it.
        if not bitmask.is_empty(rest, self._vocab_size):
            words[:] = rest

    def _banned_now(self) -> list[int]:
        banned = []
        if self._phrases:
            tail = tuple(self._tail)
            banned = [
                word[-1] for word in self._phrases if tail[len(tail) - len(word) + 1 :] == word[:-1]
            ]
        awaited = None if self._grammar is None else self._grammar.awaited
        if self._generated < self._min_tokens:
            banned.extend(self._ending)
        elif awaited is not None:
            banned.extend(token for token in self._ending if token != awaited)
        return banned


class _ChangeTable:
    """Changed tokens of one request, in arrays that grow at the end."""

    def __init__(self, logit_bias: dict[int, float]) -> None:
        self._places: dict[int, int] = {}
        self._counts: list[int] = []
        self._logit_bias = logit_bias
        self._ids = np.empty(16, np.int32)
        self._divisor = np.empty(16, np.float32)
        self._bias = np.empty(16, np.float32)
        for token in logit_bias:
            self._place(token)

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is not None:
            return place
        place = self._places[token] = len(self._places)
        if place == len(self._ids):
            self._ids, self._divisor, self._bias = (
                np.concatenate([a, np.empty_like(a)])
                for a in (self._ids, self._divisor, self._bias)
            )
        self._ids[place] = token
        self._divisor[place] = 1.0
        self._bias[place] = self._logit_bias.get(token, 0.0)
        self._counts.append(0)
        return place

    def set_divisor(self, token: int, divisor: float) -> None:
        """Sets the repetition penalty of a token."""
        place = self._place(token)
        self._divisor[place] = divisor

    def count(self, token: int, repetition: float, presence: float, frequency: float) -> None:
        """Counts a generated token."""
        place = self._place(token)
        self._counts[place] += 1
        self._divisor[place] = repetition
        self._bias[place] = (
            self._logit_bias.get(token, 0.0) - presence - frequency * self._counts[place]
        )

    def write(self, changes: LogitChanges, row: int) -> bool:
        """Fills a row of the tables; False if there is nothing to change."""
        count = len(self._places)
        changes.ids[row, :count] = self._ids[:count]
        changes.divisor[row, :count] = self._divisor[:count]
        changes.bias[row, :count] = self._bias[:count]
        return count > 0
