"""Continuous batching: which rows of which requests the next step computes.

Running and waiting requests are both in order of arrival, and every running request is older
than every waiting one. A preempted request gives up its pages and slot and waits at the front;
what it has generated becomes part of what is computed again.
"""

import dataclasses
from collections import deque

import numpy as np

from serving.block_pool import BlockPool
from serving.cache_groups import CacheGroups
from serving.limits import EngineLimits
from serving.logit_rules import LogitRules
from serving.request import Request
from serving.sequence import Finish, Sequence


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


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step: its rows, oldest request first, and who was preempted for it."""

    rows: tuple[ScheduledRows, ...]
    preempted: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(len(rows.token_ids) for rows in self.rows)


class Scheduler:
    """First come, first served, under the budgets of `EngineLimits`."""

    def __init__(self, limits: EngineLimits, cache: CacheGroups, *, look_back: int) -> None:
        """
        Args:
          limits: tokens, logit rows and requests of a step.
          cache: the page pools.
          look_back: how many earlier token ids every row group carries.
        """
        self._limits = limits
        self._cache = cache
        self._look_back = look_back
        self._slots = BlockPool(limits.max_num_seqs)
        self._waiting: deque[Sequence] = deque()
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
        )
        self._next_number += 1
        self._sequences[sequence.number] = sequence
        self._waiting.append(sequence)
        return sequence

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
            self._cache.trim(sequence.pages, sequence.num_computed)
        budget = _Budget(
            tokens=self._limits.max_num_batched_tokens,
            prompt_logits=self._limits.prompt_logit_rows,
        )
        rows: list[ScheduledRows] = []
        preempted: list[int] = []
        position = 0
        while position < len(self._running) and budget.tokens:
            sequence = self._running[position]
            wanted = budget.rows(sequence)
            room = self._cache.room(sequence.pages, sequence.num_computed)
            if wanted and not room:
                preempted.append(self._preempt_youngest())
                continue
            if wanted:
                rows.append(self._take(sequence, min(wanted, room), budget))
            position += 1
        if not preempted:
            self._admit(rows, budget)
        return StepPlan(tuple(rows), tuple(preempted))

    def _admit(self, rows: list[ScheduledRows], budget: "_Budget") -> None:
        while self._waiting and budget.tokens and self._slots.num_free:
            sequence = self._waiting[0]
            wanted = budget.rows(sequence)
            room = self._cache.room(sequence.pages, 0)
            fits = self._cache.pages(sequence.num_tokens) <= self._cache.global_.num_free
            if not (wanted and room and fits):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            (sequence.slot,) = self._slots.allocate(1)
            rows.append(self._take(sequence, min(wanted, room), budget))

    def _take(self, sequence: Sequence, count: int, budget: "_Budget") -> ScheduledRows:
        start = sequence.num_computed
        end = start + count
        self._cache.reserve(sequence.pages, start, count)
        samples = end == sequence.num_tokens
        first_logit = sequence.first_logit_row
        logits = max(0, end - max(start, first_logit))
        targets = np.full(logits, -1, np.int32)
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
        )
        budget.tokens -= count
        budget.prompt_logits -= logits - samples
        sequence.num_computed = end
        sequence.num_scored += logits - samples
        sequence.awaits_token = samples
        return rows

    def _preempt_youngest(self) -> int:
        sequence = self._running.pop()
        self._free(sequence)
        sequence.num_computed = 0
        self._waiting.appendleft(sequence)
        return sequence.number

    def _free(self, sequence: Sequence) -> None:
        self._cache.release(sequence.pages)
        self._slots.release(sequence.slot)
        sequence.slot = None


@dataclasses.dataclass
class _Budget:
    """What is left of one step."""

    tokens: int
    prompt_logits: int

    def rows(self, sequence: Sequence) -> int:
        """How many rows `sequence` may compute next.

        None while its next token is on its way: after a preemption the rows computed again must
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
