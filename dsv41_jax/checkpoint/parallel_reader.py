"""Several threads copy the slices that devices own from the map, in file order."""

import collections
import concurrent.futures
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
import tqdm

from dsv41_jax.checkpoint.groups import (
    ParameterGroup,
    Part,
    Shardings,
    assemble,
    parts_of,
    placed_shape,
    sharding_of,
)
from dsv41_jax.checkpoint.reader import Checkpoint

DEFAULT_READERS = min(8, os.cpu_count() or 1)

_ALIGNMENT = 64  # JAX on CPU takes over an aligned host buffer and copies any other
_COPY_BYTES = 64 << 20  # of one copy, so that large tensors have several readers


class _Box:
    """Host memory of one part of a leaf, taken when its first bytes are read."""

    def __init__(self, part: Part, group: ParameterGroup) -> None:
        self.part = part
        self._group = group
        self._lock = threading.Lock()
        self._bytes: np.ndarray | None = None
        self.missing = 0  # copies that are still to be made

    def bytes(self) -> np.ndarray:
        """uint8 view of the box; its last axis counts bytes. Padding experts are zero."""
        with self._lock:
            if self._bytes is None:
                *rows, columns = self.part.shape
                self._bytes = _aligned_bytes((*rows, columns * self._group.dtype.itemsize))
                if self._group.stacked:
                    self._bytes[max(0, len(self._group.names) - self.part.start[0]) :] = 0
            return self._bytes

    def done(self) -> bool:
        """Counts one copy; whether it was the last."""
        with self._lock:
            self.missing -= 1
            return self.missing == 0

    def release(self) -> np.ndarray:
        """The box's values; it lets go of them."""
        values = self.bytes().view(self._group.dtype)
        self._bytes = None
        return values


@dataclasses.dataclass(frozen=True)
class _Copy:
    """One contiguous run of rows from a tensor to a box."""

    leaf: "_Leaf"
    box: _Box
    source: np.ndarray
    target: Callable[[], np.ndarray]


class _Leaf:
    """One leaf while it is read."""

    def __init__(self, group: ParameterGroup, shardings: Shardings | None) -> None:
        self.group = group
        self.sharding = sharding_of(shardings, group.keys)
        self.shape = placed_shape(group, self.sharding)
        self.boxes = [_Box(part, group) for part in parts_of(self.shape, self.sharding)]
        self.array: jax.Array | None = None
        self._lock = threading.Lock()
        self._missing = 0

    def copies(self, checkpoint: Checkpoint) -> Iterator[tuple[str, int, _Copy]]:
        """What is to be copied, each with its shard and the offset in it."""
        itemsize = self.group.dtype.itemsize
        for i, name in enumerate(self.group.names):
            source = checkpoint.read_bytes(name)
            tensor = checkpoint.tensors[name]
            for box in self.boxes:
                low, high = box.part.start, box.part.stop
                if self.group.stacked:
                    if not low[0] <= i < high[0]:
                        continue
                    low, high = low[1:], high[1:]
                columns = slice(low[-1] * itemsize, high[-1] * itemsize)
                if source.ndim == 1:
                    runs = [(slice(columns.start, columns.stop), slice(None))]
                else:
                    row_bytes = math.prod(source.shape[1:])
                    step = max(1, _COPY_BYTES // row_bytes)
                    runs = [
                        (slice(row, min(row + step, high[0])), slice(row - low[0], None))
                        for row in range(low[0], high[0], step)
                    ]
                for rows, target in runs:
                    part = source[rows] if source.ndim == 1 else source[rows, ..., columns]
                    offset = tensor.begin + rows.start * (source.strides[0])
                    yield tensor.shard, offset, self._copy(box, part, i, target)

    def _copy(self, box: _Box, source: np.ndarray, expert: int, rows: slice) -> _Copy:
        box.missing += 1

        def target() -> np.ndarray:
            whole = box.bytes()
            whole = whole[expert - box.part.start[0]] if self.group.stacked else whole
            return whole[rows][: len(source)]

        return _Copy(self, box, source, target)

    def start(self) -> None:
        """Counts the boxes; those without a copy are padding throughout."""
        self._missing = sum(box.missing > 0 for box in self.boxes)
        if not self._missing:
            self.finish()

    def box_done(self) -> None:
        """Notes that one box is full; the last one sends the leaf to its devices."""
        with self._lock:
            self._missing -= 1
            last = not self._missing
        if last:
            self.finish()

    def finish(self) -> None:
        values = [(box.part, box.release()) for box in self.boxes]
        self.array = assemble(self.shape, self.sharding, values).block_until_ready()


class UnitReader:
    """Reads leaves, some at a time, with several threads that follow the files' order.

    Host memory in flight is bounded by the leaves that are read together; where the device
    takes over host buffers, nothing exists twice.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shardings: Shardings | None,
        progress: tqdm.tqdm,
        readers: int = DEFAULT_READERS,
    ) -> None:
        self._checkpoint = checkpoint
        self._shardings = shardings
        self._progress = progress
        self._readers = readers
        self._lock = threading.Lock()

    def read(self, groups: list[ParameterGroup]) -> dict[tuple[str, ...], jax.Array]:
        """Device arrays of some leaves, by path."""
        leaves = [_Leaf(group, self._shardings) for group in groups]
        found = [copy for leaf in leaves for copy in leaf.copies(self._checkpoint)]
        found.sort(key=lambda item: item[:2])
        for leaf in leaves:
            leaf.start()
        waiting = collections.deque(copy for _, _, copy in found)
        with concurrent.futures.ThreadPoolExecutor(self._readers) as pool:
            futures = [pool.submit(self._work, waiting) for _ in range(self._readers)]
            for future in futures:
                future.result()
        return {leaf.group.keys: leaf.array for leaf in leaves}

    def _work(self, waiting: collections.deque[_Copy]) -> None:
        while True:
            try:
                copy = waiting.popleft()
            except IndexError:
                return
            np.copyto(copy.target(), copy.source)
            with self._lock:
                self._progress.update(copy.source.size)
            if copy.box.done():
                copy.leaf.box_done()


def bytes_to_read(groups: Iterable[ParameterGroup], shardings: Shardings | None) -> int:
    """What the devices of this process hold, replicas counted once and padding not at all."""
    total = 0
    for group in groups:
        sharding = sharding_of(shardings, group.keys)
        for part in parts_of(placed_shape(group, sharding), sharding):
            first = min(part.stop[0], group.shape[0]) - min(part.start[0], group.shape[0])
            total += first * math.prod(part.shape[1:]) * group.dtype.itemsize
    return total


def _aligned_bytes(shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].reshape(shape)
