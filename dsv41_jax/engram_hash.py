"""N-gram hashing of token ids into Engram table rows, on the host in exact int64.

Letters: V vocabulary, n tokens of a step, N largest n-gram, A Engram layers, H hashes per
n-gram size, C = (N - 1) * H columns.
"""

import math
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import normalizers

from dsv41_jax.config import ConfigError, EngramConfig

NO_TOKEN = -1  # stands for a position before the text, and for an image token

_ONE_SPACE = "\ue000"  # private-use stand-in that keeps a lone space through the strip
_REPLACEMENT = "\ufffd"


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(tokenizers.Regex(r"^ $"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )


def token_map_from_tokenizer(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> np.ndarray:
    """Maps token ids to the compressed vocabulary: tokens that normalize alike share an id.

    A token that is no whole UTF-8 text is keyed by its spelling in the vocabulary. Compressed
    ids are handed out in order of first appearance. Ids the tokenizer does not define follow
    its last token's.

    Args:
      tokenizer: the checkpoint's tokenizer.
      vocab_size: number of token ids of the model.

    Returns:
      int64[V], values 0..compressed size - 1.

    Raises:
      ConfigError: the tokenizer has more tokens than the model.
    """
    defined = tokenizer.get_vocab_size(with_added_tokens=True)
    if defined > vocab_size:
        raise ConfigError(
            f"the tokenizer has {defined} tokens but vocab_size is {vocab_size}; "
            "they must come from the same model"
        )
    texts = tokenizer.decode_batch([[i] for i in range(defined)], skip_special_tokens=False)
    normalizer = _normalizer()
    compressed: dict[str, int] = {}
    token_map = np.zeros(vocab_size, np.int64)
    for token_id, text in enumerate(texts):
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normalizer.normalize_str(text) or text
        token_map[token_id] = compressed.setdefault(key, len(compressed))
    token_map[defined:] = token_map[defined - 1]
    return token_map


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return bool(np.all(number % np.arange(3, math.isqrt(number) + 1, 2, dtype=np.int64)))


def bucket_primes(engram: EngramConfig) -> np.ndarray:
    """Bucket moduli, int64[A, N - 1, H]: distinct primes from `engram_vocab_size` upwards."""
    used: set[int] = set()
    primes = []
    for _ in range(len(engram.layer_ids) * (engram.max_ngram_size - 1)):
        candidate = engram.vocab_size - 1
        for _ in range(engram.n_heads):
            candidate += 1
            while candidate in used or not _is_prime(candidate):
                candidate += 1
            used.add(candidate)
            primes.append(candidate)
    shape = (len(engram.layer_ids), engram.max_ngram_size - 1, engram.n_heads)
    return np.array(primes, np.int64).reshape(shape)


def column_offsets(primes: np.ndarray) -> np.ndarray:
    """First table row of each column, int64[A, C], from the moduli int64[A, N - 1, H]."""
    flat = primes.reshape(primes.shape[0], -1)
    return np.cumsum(flat, axis=1) - flat


def multipliers(engram: EngramConfig) -> np.ndarray:
    """Odd hash multipliers per layer and look-back, int64[A, N]; no product overflows int64."""
    bound = max(1, np.iinfo(np.int64).max // engram.compressed_vocab_size // 2)
    return np.stack(
        [
            np.random.default_rng(10007 * layer).integers(
                0, bound, size=engram.max_ngram_size, dtype=np.int64
            )
            * 2
            + 1
            for layer in engram.layer_ids
        ]
    )


def check_num_embeddings(engram: EngramConfig) -> None:
    """Refuses table sizes that are not the sums of their layers' bucket moduli.

    Raises:
      ConfigError: names the key, the layer and the size that would be right.
    """
    totals = bucket_primes(engram).sum(axis=(1, 2)).tolist()
    for layer, rows, total in zip(engram.layer_ids, engram.num_embeddings, totals, strict=True):
        if rows != total:
            raise ConfigError(
                f"engram_num_embeddings is {rows} for layer {layer}, but the bucket primes from "
                f"engram_vocab_size {engram.vocab_size} upwards add up to {total}"
            )


class EngramHasher:
    """Table rows of every n-gram that ends at a token.

    Attributes:
      config: the Engram part of the model's configuration.
      layer_ids: the A layers of the hash ids' second axis.
      pad_compressed_id: stands in for whatever look-back cannot see.
    """

    def __init__(self, config: EngramConfig, token_map: np.ndarray) -> None:
        """Prepares the constants of the hash.

        Args:
          config: the Engram part of the model's configuration.
          token_map: int64[V], token id to compressed id.

        Raises:
          ConfigError: `engram_num_embeddings` or `engram_compressed_vocab_size` contradicts the
            primes or the token map, or `engram_pad_token_id` is outside the vocabulary.
        """
        check_num_embeddings(config)
        size = int(token_map.max()) + 1
        if size != config.compressed_vocab_size:
            raise ConfigError(
                f"engram_compressed_vocab_size is {config.compressed_vocab_size} but the "
                f"tokenizer's {token_map.size} tokens normalize to {size} different texts; "
                "tokenizer.json and config.json must come from the same model"
            )
        if not 0 <= config.pad_token_id < token_map.size:
            raise ConfigError(
                f"engram_pad_token_id is {config.pad_token_id}; "
                f"the vocabulary has ids 0..{token_map.size - 1}"
            )
        self.config = config
        self.layer_ids = config.layer_ids
        self.pad_compressed_id = int(token_map[config.pad_token_id])
        self._vocab_size = token_map.size
        # NO_TOKEN indexes the last entry.
        self._compressed = np.append(token_map, self.pad_compressed_id).astype(np.int64)
        primes = bucket_primes(config)
        self._multipliers = multipliers(config)
        self._primes = primes[None]
        self._offsets = column_offsets(primes).reshape(self._primes.shape)

    @property
    def history_size(self) -> int:
        """Tokens before a step that its hashes look back on."""
        return self.config.max_ngram_size - 1

    def hash(self, token_ids: np.ndarray, history: np.ndarray) -> np.ndarray:
        """Hashes the n-grams that end at each token of one request; see `hash_many`.

        Args:
          token_ids: int[n], `NO_TOKEN` for image tokens.
          history: int[N - 1], the ids before them, oldest first; `NO_TOKEN` where there is no
            token or an image token.

        Returns:
          int64[n, A, C], row numbers of the layers' tables.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
        """
        return self.hash_many([token_ids], [history])

    def hash_many(
        self, token_ids: Sequence[np.ndarray], histories: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Hashes the n-grams that end at each token of several requests, all at once.

        Args:
          token_ids: by request, as in `hash`.
          histories: by request, as in `hash`.

        Returns:
          int64[n, A, C] of all tokens, request after request.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
        """
        return self.hash_ngrams(self.ngrams(token_ids, histories))

    def ngrams(
        self, token_ids: Sequence[np.ndarray], histories: Sequence[np.ndarray]
    ) -> np.ndarray:
        """What a token's rows follow from, of several requests: its id and those before it.

        Look-back stops for good at the first `NO_TOKEN` it meets.

        Args:
          token_ids: by request, as in `hash`.
          histories: by request, as in `hash`.

        Returns:
          int64[n, N] of all tokens, request after request: the id k positions before the token
          in column k, `NO_TOKEN` where look-back has stopped.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
        """
        size, look = self.history_size, self.config.max_ngram_size
        counts, parts = [], []
        for ids, history in zip(token_ids, histories, strict=True):
            if len(history) != size:
                raise ValueError(
                    f"hashing needs the {size} ids before the step, not {len(history)}"
                )
            counts.append(len(ids))
            parts += [history, ids]
        count = sum(counts)
        if not count:
            return np.zeros((0, look), np.int64)
        ids = np.concatenate(parts, dtype=np.int64)
        # NO_TOKEN becomes 0 and everything below it wraps around.
        if (ids - NO_TOKEN).view(np.uint64).max() > self._vocab_size:
            wrong = ids[(ids < NO_TOKEN) | (ids >= self._vocab_size)][0]
            raise ValueError(
                f"token id {wrong} is outside the vocabulary 0..{self._vocab_size - 1}"
            )
        # back[p, k] is the id k positions before p: a view that walks backwards.
        step = ids.itemsize
        shape, strides = (len(ids) - size, look), (step, -step)
        back = np.ndarray(shape, ids.dtype, ids, size * step, strides)
        if len(counts) > 1:
            # A request's history separates it from the one before.
            back = back[np.arange(count) + np.repeat(np.arange(len(counts)) * size, counts)]
        if ids.min() < 0:
            back = np.where(np.minimum.accumulate(back, axis=1) < 0, NO_TOKEN, back)
        return back

    def hash_ngrams(self, ngrams: np.ndarray) -> np.ndarray:
        """int64[n, A, C], row numbers of the layers' tables, of int64[n, N] from `ngrams`."""
        products = self._compressed[ngrams][:, None] * self._multipliers
        mixed = np.bitwise_xor.accumulate(products, axis=2)[:, :, 1:, None]
        rows = mixed % self._primes
        rows += self._offsets
        return rows.reshape(len(ngrams), len(self.layer_ids), self.config.num_columns)
