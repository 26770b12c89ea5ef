"""Engram rows of steps to come, looked up on another thread while a step is computed."""

import concurrent.futures
import threading
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from dsv41_jax.engram_hash import NO_TOKEN
from dsv41_jax.engram_table import EngramTables, empty_rows
from pallas_kernels.packed_rows import PackedRows

UNKNOWN = -2  # stands for a token that is not sampled yet
TRACE_NAME = "engram lookup"  # of a lookup in a profile

_NOTHING = -2  # in an n-gram: the row is zeros


class EngramAhead:
    """A source of Engram rows that may be told what comes next; see `EngramRows`.

    `expect` says what the next steps will probably hold and returns at once; `step_rows` gives a
    step its rows. Rows that were expected are there by then, others are looked up on the spot: a
    wrong guess costs its lookup and changes no byte. One caller at a time.

    Attributes:
      layer_ids: the layers whose tables are here.
    """

    def __init__(self, tables: EngramTables, pool: concurrent.futures.Executor) -> None:
        """
        Args:
          tables: what rows are looked up in.
          pool: runs the lookups; the caller's, who shuts it down.
        """
        self.layer_ids = tables.layer_ids
        self._tables = tables
        self._pool = pool
        self._steps: deque[_Step] = deque()

    def expect(
        self, steps: Sequence[tuple[Sequence[np.ndarray], Sequence[np.ndarray], int]]
    ) -> None:
        """Begins the lookups of the next steps, instead of those expected before.

        Args:
          steps: what `step_rows` will probably be asked for, in order. Token ids may be
            `UNKNOWN`, at the end of a request's: they hold a place, and other tokens do not move
            when they become known.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
        """
        wanted = [self._wanted(*step) for step in steps]
        before, self._steps = self._steps, deque()
        for asked, ngrams in zip(steps, wanted, strict=True):
            step = self._next(before, len(ngrams))
            self._steps.append(step)
            if step.aim(ngrams, asked[:2]):
                self._pool.submit(step.catch_up)
        for step in before:
            step.drop()

    def step_rows(
        self, token_ids: Sequence[np.ndarray], histories: Sequence[np.ndarray], tokens: int
    ) -> dict[int, PackedRows]:
        """Numpy rows of the next step, expected or not; see `EngramRows`.

        Arrays that `expect` was given last are taken to hold what they held then.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
          Exception: whatever the lookup on the other thread raised.
        """
        step = self._next(self._steps, tokens)
        if not step.is_of(token_ids, histories):
            step.aim(self._wanted(token_ids, histories, tokens), (token_ids, histories))
        return step.take()

    def _next(self, steps: deque["_Step"], size: int) -> "_Step":
        """The first of the steps, or a new one where that has another size."""
        step = steps.popleft() if steps else None
        if step is not None and step.size == size:
            return step
        if step is not None:
            step.drop()
        return _Step(self._tables, size)

    def _wanted(
        self, token_ids: Sequence[np.ndarray], histories: Sequence[np.ndarray], tokens: int
    ) -> np.ndarray:
        """int64[tokens, N]: the n-gram of every row, `_NOTHING` in padding and where unknown."""
        hasher = self._tables.hasher
        wanted = np.full((tokens, hasher.config.max_ngram_size), _NOTHING, np.int64)
        if not token_ids:
            return wanted
        unknown = np.concatenate(token_ids) == UNKNOWN
        if unknown.any():
            token_ids = [np.where(ids == UNKNOWN, NO_TOKEN, ids) for ids in token_ids]
        wanted[: len(unknown)] = hasher.ngrams(token_ids, histories)
        wanted[: len(unknown)][unknown] = _NOTHING
        return wanted


class _Step:
    """The rows of one step on their way to what they are to be.

    Whoever holds the lock brings them there, the thread of the lookups or the one that takes
    them; rows that are right already are left alone.
    """

    def __init__(self, tables: EngramTables, size: int) -> None:
        self.size = size
        self._tables = tables
        self._lock = threading.Lock()
        self._wanted: np.ndarray | None = None  # n-grams; None once nobody asks for them
        self._held: np.ndarray | None = None  # those whose rows are there
        self._rows: dict[int, PackedRows] = {}
        self._asked: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] = ((), ())
        self._error: Exception | None = None

    def aim(
        self, wanted: np.ndarray, asked: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
    ) -> bool:
        """Sets what the rows are to be, and what asks for them; whether that is new."""
        before, self._asked = self._wanted, asked
        if before is not None and np.array_equal(before, wanted):
            return False
        self._wanted = wanted
        return True

    def is_of(self, token_ids: Sequence[np.ndarray], histories: Sequence[np.ndarray]) -> bool:
        """Whether these very arrays ask for the rows already."""
        return self._wanted is not None and all(
            len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
            for old, new in zip(self._asked, (token_ids, histories), strict=True)
        )

    def drop(self) -> None:
        """Nobody asks for the rows any more."""
        self._wanted = None

    def catch_up(self) -> None:
        """On the thread of the lookups: looks up what is missing; keeps an error for `take`."""
        with self._lock:
            wanted = self._wanted
            if wanted is None or self._error is not None:
                return
            try:
                with jax.profiler.TraceAnnotation(TRACE_NAME):
                    self._bring(wanted)
            except Exception as error:
                self._error = error

    def take(self) -> dict[int, PackedRows]:
        """The rows as they are to be; nothing writes to them afterwards."""
        with self._lock:
            if self._error is not None:
                raise self._error
            self._bring(self._wanted)
            self._wanted = None
            return self._rows

    def _bring(self, wanted: np.ndarray) -> None:
        if self._held is wanted:
            return
        if self._held is None:
            self._rows = empty_rows(self._tables.hasher.config, self._tables.layer_ids, self.size)
            self._held = np.full_like(wanted, _NOTHING)
        (stale,) = np.nonzero((self._held != wanted).any(axis=1))
        known = wanted[stale, 0] != _NOTHING
        blank, stale = stale[~known], stale[known]
        if blank.size:
            for layer in self._rows.values():
                layer.codes[blank] = layer.scales[blank] = 0
        if stale.size:
            self._gather(wanted, stale)
        self._held = wanted

    def _gather(self, wanted: np.ndarray, rows: np.ndarray) -> None:
        first, last = rows[0], rows[-1] + 1
        if last - first == len(rows):
            where: slice | np.ndarray = slice(first, last)
            out = {layer: _part(held, where) for layer, held in self._rows.items()}
            self._tables.gather(wanted[where], out)
            return
        found = empty_rows(self._tables.hasher.config, self._tables.layer_ids, len(rows))
        self._tables.gather(wanted[rows], found)
        for layer, held in self._rows.items():
            held.codes[rows], held.scales[rows] = found[layer].codes, found[layer].scales


def _part(rows: PackedRows, where: slice) -> PackedRows:
    return PackedRows(rows.codes[where], rows.scales[where])
