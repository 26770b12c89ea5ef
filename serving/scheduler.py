"""Continuous batching: which rows of which requests the next step computes.

Requests run in order of priority, and of arrival where that is the same. When pages run out the
last running one is preempted: it gives up its pages and slot and waits in its place; what it has
generated becomes part of what is computed again. A request that begins reuses the pages of
earlier ones with the same beginning.
"""

import bisect
import dataclasses
import time
from collections.abc import Collection

import numpy as np

from dsv41_jax.engram_ahead import UNKNOWN
from serving.block_pool import BlockPool
from serving.cache_groups import CacheGroups, Hit
from serving.logit_rules import LogitRules
from serving.page_keys import PageKeys
from serving.request import Request
from serving.sequence import Finish, Sequence
from sharding.limits import EngineLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledRows:
    """Consecutive rows of one request in one step.

    Attributes:
      number: the sequence.
      start: position of the first row.
      token_ids: int32[n], what the rows compute.
      history: int32[look_back], the ids before `start`, -1 where there is none.
      window_pages, global_pages: int32[C], pages by column, -1 where none is held.
      slot: row of the per-request state.
      logits: how many of the last rows want logits.
      samples: whether the last row samples a token.
      targets: int32[logits], the token whose log-probability a row wants; -1 where it samples.
      late_from: first position that the late layers compute.
    """

    number: int
    start: int
    token_ids: np.ndarray
    history: np.ndarray
    window_pages: np.ndarray
    global_pages: np.ndarray
    slot: int
    logits: int
    samples: bool
    targets: np.ndarray
    late_from: int


@dataclasses.dataclass(frozen=True)
class UpcomingRows:
    """Rows of one request that the next step will probably compute.

    Attributes:
      token_ids: int32[n]; one `UNKNOWN` where the token is on its way.
      history: int32[look_back], the ids before them.
    """

    token_ids: np.ndarray
    history: np.ndarray


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step: its rows by request, and who was preempted for it."""

    rows: tuple[ScheduledRows, ...]
    preempted: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(len(rows.token_ids) for rows in self.rows)


class Scheduler:
    """By priority, then first come, first served, under the budgets of `EngineLimits`.

    Attributes:
      num_queried_tokens: prompt tokens of requests that looked for cached pages.
      num_hit_tokens: those of them that were found.
    """

    def __init__(
        self,
        limits: EngineLimits,
        cache: CacheGroups,
        *,
        look_back: int,
        reuses_pages: bool,
        decoder_replay: bool = False,
        microbatches: int = 1,
    ) -> None:
        """
        Args:
          limits: tokens, logit rows and requests of a step.
          cache: the page pools.
          look_back: how many earlier token ids every row group carries.
          reuses_pages: whether requests share what equal beginnings hold.
          decoder_replay: whether late layers compute a prompt's last window alone.
          microbatches: how many steps share the budget of one, and its requests, so that one
            can begin while another's tokens are on their way.
        """
        self.num_queried_tokens = self.num_hit_tokens = 0
        self._reuses_pages = reuses_pages
        self._decoder_replay = decoder_replay
        self._microbatches = microbatches
        self._limits = limits
        self._cache = cache
        self._look_back = look_back
        self._slots = BlockPool(limits.max_num_seqs)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._sequences: dict[int, Sequence] = {}
        self._next_number = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._sequences)

    def find(self, number: int) -> Sequence | None:
        """The sequence, or None once it is finished."""
        return self._sequences.get(number)

    def add(self, request: Request, seed: int, rules: LogitRules | None = None) -> Sequence:
        """Queues a request, with what it does to its logits."""
        sequence = Sequence(
            request,
            number=self._next_number,
            seed=seed,
            max_model_len=self._limits.max_model_len,
            pages=self._cache.new_table(),
            rules=rules,
            keys=self._keys(request),
            late_from=self._late_from(request),
        )
        self._next_number += 1
        self._sequences[sequence.number] = sequence
        bisect.insort(self._waiting, sequence, key=_turn)
        return sequence

    def _keys(self, request: Request) -> PageKeys | None:
        if not self._reuses_pages:
            return None
        return PageKeys(self._limits.page_size, request.cache_salt)

    def _late_from(self, request: Request) -> int:
        # Rows whose logits are wanted are computed by every layer.
        if not self._decoder_replay or request.sampling.prompt_logprobs is not None:
            return 0
        return max(0, len(request.prompt_token_ids) - self._limits.sliding_window)

    def _most_reused(self, sequence: Sequence) -> int:
        """Positions of a request that may come from the cache.

        The row of the first logits that are wanted is computed, whatever is cached. With
        bounded replay other requests' window rows of late layers may be missing, so all that
        this one reads are computed too.
        """
        if not self._decoder_replay:
            return sequence.first_logit_row
        return min(sequence.first_logit_row, sequence.late_from)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """Ends a request and frees what it holds; rows in flight are ignored later."""
        sequence.finish = finish
        del self._sequences[sequence.number]
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._free(sequence)

    def schedule(self) -> StepPlan:
        """Plans the next step; no rows if nothing can run."""
        for sequence in self._running:
            self._name_pages(sequence)
            self._cache.trim(sequence.pages, sequence.num_computed)
        budget = self._budget()
        rows: list[ScheduledRows] = []
        preempted: list[int] = []
        position = 0
        while position < len(self._running) and budget.tokens and budget.requests:
            sequence = self._running[position]
            wanted = budget.rows(sequence)
            room = self._cache.room(sequence.pages, sequence.num_computed)
            if wanted and not room:
                preempted.append(self._preempt_last())
                continue
            if wanted:
                rows.append(self._take(sequence, min(wanted, room), budget))
            position += 1
        if not preempted:
            self._admit(rows, budget)
        return StepPlan(tuple(rows), tuple(preempted))

    def upcoming(self, arriving: Collection[int]) -> list[UpcomingRows]:
        """What `schedule` will probably plan next; takes nothing.

        Requests that wait are left out, and so is everything that pages decide. Nothing is
        expected where no token at all is known.

        Args:
          arriving: sequences whose token on its way comes before then.
        """
        if all(sequence.awaits_token for sequence in self._running):
            return []
        budget, expected = self._budget(), []
        for sequence in self._running:
            if not (budget.tokens and budget.requests):
                break
            start, count = sequence.num_computed, budget.rows(sequence)
            token_ids = sequence.tokens(start, start + count)
            if sequence.number in arriving and not sequence.ends_next:
                token_ids = np.array([UNKNOWN], np.int32)
            if token_ids.size:
                expected.append(UpcomingRows(token_ids, sequence.history(start, self._look_back)))
                budget.tokens -= token_ids.size
                budget.requests -= 1
        return expected

    def _budget(self) -> "_Budget":
        active = len(self._running) + min(len(self._waiting), self._slots.num_free)
        return _Budget(
            tokens=-(-self._limits.max_num_batched_tokens // self._microbatches),
            requests=-(-active // self._microbatches),
            prompt_logits=self._limits.prompt_logit_rows,
        )

    def _admit(self, rows: list[ScheduledRows], budget: "_Budget") -> None:
        while self._waiting and budget.tokens and budget.requests and self._slots.num_free:
            sequence = self._waiting[0]
            full = self._most_reused(sequence) // self._limits.page_size
            hit = self._cache.find(sequence.page_keys(full))
            sequence.num_computed = len(hit.global_) * self._limits.page_size
            wanted = budget.rows(sequence)
            if not wanted or not self._cache.fits(hit, sequence.num_tokens):
                sequence.num_computed = 0
                return
            del self._waiting[0]
            bisect.insort(self._running, sequence, key=_turn)
            (sequence.slot,) = self._slots.allocate(1)
            self._begin(sequence, hit)
            room = self._cache.room(sequence.pages, sequence.num_computed)
            rows.append(self._take(sequence, min(wanted, room), budget))

    def _begin(self, sequence: Sequence, hit: Hit) -> None:
        self._cache.attach(sequence.pages, hit)
        self._cache.mark(sequence.pages, (sequence.num_prompt - 1) // self._limits.page_size)
        sequence.num_named = len(hit.global_)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            sequence.begin_time = time.monotonic()
            if self._reuses_pages:
                self.num_queried_tokens += sequence.num_prompt
                self.num_hit_tokens += sequence.num_computed

    def _name_pages(self, sequence: Sequence) -> None:
        """Lets others reuse the full pages of rows that are scheduled: steps run in order."""
        full = sequence.num_computed // self._limits.page_size
        if full == sequence.num_named:
            return
        keys = sequence.page_keys(full)
        self._cache.remember(sequence.pages, keys, sequence.num_named)
        sequence.num_named = full

    def _take(self, sequence: Sequence, count: int, budget: "_Budget") -> ScheduledRows:
        start = sequence.num_computed
        end = start + count
        self._cache.reserve(sequence.pages, start, count)
        samples = end == sequence.num_tokens
        logits = max(0, end - max(start, sequence.first_logit_row))
        targets = np.full(logits, -1, np.int32)
        if logits > samples:
            targets[: logits - samples] = sequence.tokens(end - logits + 1, end - samples + 1)
        rows = ScheduledRows(
            number=sequence.number,
            start=start,
            token_ids=sequence.tokens(start, end),
            history=sequence.history(start, self._look_back),
            window_pages=sequence.pages.window.copy(),
            global_pages=sequence.pages.global_.copy(),
            slot=sequence.slot,
            logits=logits,
            samples=samples,
            targets=targets,
            late_from=sequence.late_from,
        )
        budget.tokens -= count
        budget.requests -= 1
        budget.prompt_logits -= logits - samples
        sequence.num_computed = end
        sequence.num_scored += logits - samples
        sequence.awaits_token = samples
        return rows

    def _preempt_last(self) -> int:
        sequence = self._running.pop()
        self._free(sequence)
        sequence.num_computed = 0
        bisect.insort(self._waiting, sequence, key=_turn)
        return sequence.number

    def _free(self, sequence: Sequence) -> None:
        self._name_pages(sequence)
        self._cache.release(sequence.pages)
        self._slots.release(sequence.slot)
        sequence.slot = None


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.number


@dataclasses.dataclass
class _Budget:
    """What is left of one step."""

    tokens: int
    requests: int
    prompt_logits: int

    def rows(self, sequence: Sequence) -> int:
        """How many rows `sequence` may compute next.

        No row while its next token is on its way: after a preemption the rows computed again must
        end with that token.
        """
        if sequence.awaits_token:
            return 0
        start = sequence.num_computed
        remaining = sequence.num_tokens - start
        prompt_rows = sequence.num_tokens - 1 - max(start, sequence.first_logit_row)
        if prompt_rows > self.prompt_logits:
            remaining -= 1 + prompt_rows - self.prompt_logits
        return min(remaining, self.tokens)
