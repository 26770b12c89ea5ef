"""Sets of token ids as packed words: bit i of word w stands for token 32 w + i (numpy)."""

from collections.abc import Iterable

import numpy as np

from dsv41_jax.sampling import mask_words


def full(vocab_size: int) -> np.ndarray:
    """uint32[W] with every token in it, and every bit past the last one."""
    return np.full(mask_words(vocab_size), np.iinfo(np.uint32).max, np.uint32)


def of_tokens(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """uint32[W] with just `tokens` in it."""
    words = np.zeros(mask_words(vocab_size), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def remove(words: np.ndarray, tokens: Iterable[int]) -> None:
    """Takes `tokens` out of uint32[W] words, in place."""
    for token in tokens:
        words[token // 32] &= ~np.uint32(1 << token % 32)


def is_empty(words: np.ndarray, vocab_size: int) -> bool:
    """Whether no token below `vocab_size` is in the set."""
    rest = vocab_size % 32
    if not rest:
        return not words.any()
    return not words[:-1].any() and not int(words[-1]) & ((1 << rest) - 1)
