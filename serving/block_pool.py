"""A pool of interchangeable ids (cache pages, request slots) with reference counts and memory."""

from collections import OrderedDict

_BLANK, _PASSING, _LASTING = range(3)


class BlockPool:
    """Hands out ids 0..size-1; an id returns when its last holder releases it.

    An id can be remembered under a key that names its content. The content outlives its last
    holder: it can be found and held again until the id is handed out for something else. That
    happens to ids without a key first, then to those released as passing, and only then to the
    others; of several alike, to the one that was free longest.
    """

    def __init__(self, size: int) -> None:
        self._free = tuple(OrderedDict[int, None]() for _ in range(3))
        self._free[_BLANK].update(dict.fromkeys(range(size)))
        self._num_free = size
        self._order = [_BLANK] * size
        self._references = [0] * size
        self._key_of: list[bytes | None] = [None] * size
        self._block_of: dict[bytes, int] = {}

    @property
    def size(self) -> int:
        """All ids."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Ids nobody holds."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Ids somebody holds."""
        return self.size - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free ids, each with one holder, and forgets their content.

        Raises:
          ValueError: fewer are free; nothing is taken then.
        """
        if count > self._num_free:
            raise ValueError(f"{count} ids wanted, {self._num_free} of {self.size} are free")
        taken = []
        for free in self._free:
            while free and len(taken) < count:
                block, _ = free.popitem(last=False)
                self._forget(block)
                self._references[block] = 1
                taken.append(block)
        self._num_free -= count
        return taken

    def retain(self, block: int) -> None:
        """Adds a holder to an id that is in use, or free and remembered.

        Raises:
          ValueError: it is free and nothing is known of its content.
        """
        if not self._references[block]:
            if self._key_of[block] is None:
                raise ValueError(f"id {block} is not in use")
            del self._free[self._order[block]][block]
            self._num_free -= 1
        self._references[block] += 1

    def release(self, block: int, *, lasting: bool = True) -> None:
        """Drops one holder; the last one frees the id.

        Args:
          block: the id.
          lasting: whether its content is likely to be wanted again.

        Raises:
          ValueError: nobody holds it.
        """
        if not self._references[block]:
            raise ValueError(f"id {block} is not in use")
        self._references[block] -= 1
        if not self._references[block]:
            order = _LASTING if lasting else _PASSING
            self._put(block, _BLANK if self._key_of[block] is None else order)
            self._num_free += 1

    def remember(self, block: int, key: bytes) -> None:
        """Names the content of an id that is in use; of equal contents one is remembered."""
        known = self._block_of.get(key)
        if known == block or (known is not None and self._references[known]):
            return
        if known is not None:  # what is held stays longest
            del self._free[self._order[known]][known]
            self._forget(known)
            self._put(known, _BLANK)
        self._forget(block)
        self._key_of[block] = key
        self._block_of[key] = block

    def find(self, key: bytes) -> int | None:
        """The id whose content has this name."""
        return self._block_of.get(key)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the id."""
        return not self._references[block]

    def forget_all(self) -> None:
        """Forgets every content; holders keep their ids."""
        for free in self._free[_PASSING:]:
            for block in free:
                self._put(block, _BLANK)
            free.clear()
        self._key_of = [None] * self.size
        self._block_of.clear()

    def _put(self, block: int, order: int) -> None:
        self._order[block] = order
        self._free[order][block] = None

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            self._key_of[block] = None
            del self._block_of[key]
