"""Names of cache pages: equal names mean equal tokens up to the page's end, and equal rows."""

import hashlib

import numpy as np


class PageKeys:
    """The names of one request's pages, each made from the one before and the page's tokens."""

    def __init__(self, page_size: int, salt: str | None) -> None:
        """
        Args:
          page_size: tokens per page.
          salt: requests of different salts share nothing.
        """
        self._page_size = page_size
        self._root = b"" if salt is None else hashlib.sha256(salt.encode()).digest()
        self._keys: list[bytes] = []

    def first(self, pages: int, token_ids: np.ndarray) -> list[bytes]:
        """Names of the first `pages` pages.

        Args:
          pages: how many; all of them are full.
          token_ids: int32[>= pages * page_size], the request's tokens; they only ever grow.
        """
        size = self._page_size
        for page in range(len(self._keys), pages):
            parent = self._keys[-1] if self._keys else self._root
            tokens = token_ids[page * size : (page + 1) * size].tobytes()
            self._keys.append(hashlib.sha256(parent + tokens).digest())
        return self._keys[:pages]
