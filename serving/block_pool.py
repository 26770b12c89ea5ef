"""A pool of interchangeable ids (cache pages, request slots) with reference counts."""

from collections import deque


class BlockPool:
    """Hands out ids 0..size-1; an id returns when its last holder releases it.

    The id that was free longest is handed out first, so that rows of finished requests stay
    intact as long as they can.
    """

    def __init__(self, size: int) -> None:
        self._free = deque(range(size))
        self._references = [0] * size

    @property
    def size(self) -> int:
        """All ids."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Ids nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Ids somebody holds."""
        return self.size - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free ids, each with one holder.

        Raises:
          ValueError: fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise ValueError(f"{count} ids wanted, {len(self._free)} of {self.size} are free")
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, block: int) -> None:
        """Adds a holder to an id that is in use."""
        self._check_used(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drops one holder; the last one frees the id."""
        self._check_used(block)
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)

    def _check_used(self, block: int) -> None:
        if not self._references[block]:
            raise ValueError(f"id {block} is not in use")
