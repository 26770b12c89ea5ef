"""Cache pages by group: which ones a request holds.

A finished request's pages stay in the pools, named by their tokens, until they are needed for
others. A prefix can be reused if every group still has what a continuation reads: all global
pages, and the window pages of the last `sliding_window` positions before it. A prefix ends
where a page ends, so no compressor group is open there. Global pages are few bytes and stay for
long; window pages that a request has left behind go first, but for those at the ends of
prompts, at the ends of requests and where requests were seen to part: continuations begin there.

With prefix replay a prefix is also reused where its window is gone: the rows of that window are
computed again, the first of them without their own. That is an approximation, which depends on
what is cached and passes into the pages of later positions.
"""

import dataclasses
from collections.abc import Sequence as Rows

import numpy as np

from serving.block_pool import BlockPool
from sharding.cache_sizes import CacheSizes
from sharding.limits import EngineLimits


class PageTable:
    """The pages one request holds; column c of a table covers positions from c * page_size.

    Attributes:
      window: int32[C], -1 where no page is held.
      global_: int32[C], likewise.
      lasting: bool[C], window pages with which a continuation may begin.
    """

    def __init__(self, columns: int) -> None:
        self.window = np.full(columns, -1, np.int32)
        self.global_ = np.full(columns, -1, np.int32)
        self.lasting = np.zeros(columns, bool)
        self.first_window = 0  # window pages are held in columns first_window..end-1
        self.end = 0  # global pages in columns 0..end-1


@dataclasses.dataclass(frozen=True)
class Hit:
    """Pages of earlier requests that hold the beginning of another.

    Attributes:
      global_: pages of columns 0..len - 1.
      window: pages of the last columns of these, as many as a continuation reads.
      shared: columns whose global pages are there, whether or not the window's are.
    """

    global_: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    shared: int = 0


class CacheGroups:
    """The page pools of both groups and the rules by which requests hold pages of them."""

    def __init__(
        self, limits: EngineLimits, sizes: CacheSizes, *, prefix_replay: bool = False
    ) -> None:
        """
        Args:
          limits: page size, window and columns.
          sizes: pages of each pool.
          prefix_replay: whether windows that are gone are computed again.
        """
        self._prefix_replay = prefix_replay
        self._page_size = limits.page_size
        self._sliding_window = limits.sliding_window
        self._columns = limits.columns
        self.window = BlockPool(sizes.window_pages)
        self.global_ = BlockPool(sizes.global_pages)

    @property
    def usage(self) -> float:
        """Share of the scarcer group's pages in use, in [0, 1]."""
        return max(pool.num_used / max(1, pool.size) for pool in (self.window, self.global_))

    def new_table(self) -> PageTable:
        """An empty table."""
        return PageTable(self._columns)

    def pages(self, tokens: int) -> int:
        """Global pages that hold `tokens` positions."""
        return -(-tokens // self._page_size)

    def room(self, table: PageTable, start: int) -> int:
        """How many positions from `start` on the held and the free pages can take."""
        free = min(self.window.num_free, self.global_.num_free)
        end = min(table.end + free, self._columns)
        return end * self._page_size - start

    def reserve(self, table: PageTable, start: int, count: int) -> None:
        """Gives `table` the pages of positions [start, start + count) that it lacks.

        Raises:
          ValueError: more than `room` says.
        """
        end = self.pages(start + count)
        new = end - table.end
        if new <= 0:
            return
        if count > self.room(table, start):
            raise ValueError(f"positions {start}..{start + count - 1} do not fit the free pages")
        table.window[table.end : end] = self.window.allocate(new)
        table.global_[table.end : end] = self.global_.allocate(new)
        table.end = end

    def find(self, keys: Rows[bytes]) -> Hit:
        """The longest beginning that every group still has, or with replay can do without.

        Args:
          keys: names of the pages that may be reused.
        """
        pages = []
        for key in keys:
            page = self.global_.find(key)
            if page is None:
                break
            pages.append(page)
        exact = self._with_window(pages, keys)
        if self._prefix_replay:
            replayed = self._first_column(len(pages) * self._page_size)
            if replayed > len(exact.global_):
                return Hit(tuple(pages[:replayed]), (), len(pages))
        return exact

    def _with_window(self, pages: list[int], keys: Rows[bytes]) -> Hit:
        end = len(pages)
        while end:
            window = []
            for column in range(end - 1, self._first_column(end * self._page_size) - 1, -1):
                page = self.window.find(keys[column])
                if page is None:
                    end = column
                    break
                window.append(page)
            else:
                return Hit(tuple(pages[:end]), tuple(reversed(window)), len(pages))
        return Hit(shared=len(pages))

    def fits(self, hit: Hit, tokens: int) -> bool:
        """Whether a request of `tokens` positions can begin with a hit and be computed."""
        new = self.pages(tokens) - len(hit.global_)
        global_taken = sum(map(self.global_.is_free, hit.global_))
        window_taken = sum(map(self.window.is_free, hit.window))
        return new + global_taken <= self.global_.num_free and window_taken < self.window.num_free

    def attach(self, table: PageTable, hit: Hit) -> int:
        """Gives an empty table the pages of a hit; returns how many positions they hold."""
        table.end = len(hit.global_)
        table.first_window = table.end - len(hit.window)
        for pool, pages in ((self.global_, hit.global_), (self.window, hit.window)):
            for page in pages:
                pool.retain(page)
        table.global_[: table.end] = hit.global_
        table.window[table.first_window : table.end] = hit.window
        for end in (table.end, hit.shared):
            self.mark(table, end)
        return table.end * self._page_size

    def mark(self, table: PageTable, end: int) -> None:
        """Lets the window pages last that a continuation at the end of column `end` - 1 reads."""
        table.lasting[self._first_column(end * self._page_size) : end] = True

    def remember(self, table: PageTable, keys: Rows[bytes], first: int) -> None:
        """Names the pages of columns from `first` on, whose rows are all computed or scheduled."""
        for column in range(first, len(keys)):
            self.global_.remember(int(table.global_[column]), keys[column])
            if column >= table.first_window:
                self.window.remember(int(table.window[column]), keys[column])

    def forget_all(self) -> None:
        """Forgets what pages hold; requests keep theirs."""
        self.global_.forget_all()
        self.window.forget_all()

    def trim(self, table: PageTable, start: int) -> None:
        """Frees the window pages that no row at `start` or later reads."""
        for column in range(table.first_window, min(self._first_column(start), table.end)):
            self.window.release(int(table.window[column]), lasting=bool(table.lasting[column]))
            table.window[column] = -1
            table.first_window = column + 1

    def release(self, table: PageTable) -> None:
        """Frees every page, the last ones first to go; the table is empty afterwards."""
        for column in range(table.end - 1, table.first_window - 1, -1):
            self.window.release(int(table.window[column]))
        for column in range(table.end - 1, -1, -1):
            self.global_.release(int(table.global_[column]))
        table.window[:] = -1
        table.global_[:] = -1
        table.lasting[:] = False
        table.first_window = table.end = 0

    def _first_column(self, position: int) -> int:
        """Column of the oldest position that a row at `position` reads."""
        return max(0, position - self._sliding_window + 1) // self._page_size
