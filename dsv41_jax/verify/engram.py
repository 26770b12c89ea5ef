"""Cases `engram` and `real_engram`: token map, hash constants and hash ids, all exact."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dsv41_jax.config import EngramConfig
from dsv41_jax.engram_hash import (
    NO_TOKEN,
    EngramHasher,
    bucket_primes,
    column_offsets,
    multipliers,
    token_map_from_tokenizer,
)
from dsv41_jax.engram_table import read_tokenizer
from dsv41_jax.verify.measure import Measure, compare_exact, judge
from dsv41_jax.verify.tolerances import EXACT
from dsv41_jax.verify.vectors import Directory, VectorError, Vectors

PROMPT = 20  # ids of `hash.input_ids` that were hashed at once; the rest are single steps
REAL_TEXTS = "real_engram_texts.json"


def _exact(case: str, vectors: Vectors, found: dict[str, Any]) -> Iterator[Measure]:
    for quantity, got in found.items():
        if quantity in vectors:
            rows = compare_exact(quantity, got, vectors[quantity])
            yield from judge(case, None, quantity, {None: rows}, EXACT)


def _constants(config: EngramConfig) -> dict[str, np.ndarray]:
    primes = bucket_primes(config)
    return {
        "primes": primes,
        "offsets": column_offsets(primes),
        "multipliers": multipliers(config),
        "num_embeddings": primes.sum(axis=(1, 2)),
    }


def hash_in_steps(hasher: EngramHasher, ids: np.ndarray, prompt: int) -> np.ndarray:
    """int64[n, A, C]: the first `prompt` ids at once, then one at a time.

    Args:
      hasher: of the model.
      ids: int64[n], `NO_TOKEN` for image tokens.
      prompt: how many ids the first step has.
    """
    look_back = hasher.history_size
    padded = np.concatenate([np.full(look_back, NO_TOKEN), ids])
    bounds = [(0, prompt), *((i, i + 1) for i in range(prompt, len(ids)))]
    return np.concatenate(
        [hasher.hash(ids[first:last], padded[first : first + look_back]) for first, last in bounds]
    )


def _without_images(ids: np.ndarray, is_text: np.ndarray) -> np.ndarray:
    return np.where(is_text, ids.astype(np.int64), NO_TOKEN)


def check_engram(directory: Directory) -> Iterator[Measure]:
    """The directory's own tokenizer and configuration.

    Raises:
      VectorError: the model has no Engram, or arrays are missing or misshapen.
      ConfigError: the configuration contradicts the tokenizer or the primes.
      CheckpointError: there is no tokenizer.
    """
    vectors, config = directory.vectors("engram"), directory.config
    if config.engram is None:
        raise VectorError(f"{directory.path} has golden_engram.npz, but its model has no Engram")
    token_map = token_map_from_tokenizer(read_tokenizer(directory.path), config.vocab_size)
    hasher = EngramHasher(config.engram, token_map)
    found = {
        "token_map": token_map,
        "compressed_vocab_size": token_map.max() + 1,
        "pad_compressed_id": hasher.pad_compressed_id,
        **_constants(config.engram),
    }
    yield from _exact("engram", vectors, found)
    if "hash.ids" in vectors:
        ids = vectors.token_ids("hash.input_ids", config.vocab_size)
        masked = _without_images(ids, vectors["hash.token_mask"].astype(bool))
        hashed = [hash_in_steps(hasher, row, min(PROMPT, len(row))) for row in masked]
        yield from _exact("engram", vectors, {"hash.ids": np.stack(hashed)})


def check_real_engram(directory: Directory) -> Iterator[Measure]:
    """The released Engram over a real vocabulary; its token map is taken as recorded.

    Raises:
      VectorError: a file or an array is missing or misshapen.
      ConfigError: the recorded sizes contradict the primes.
    """
    vectors = Vectors(directory.path / "real_engram.npz")
    token_map = vectors["token_map"].astype(np.int64)
    recorded = directory.json(REAL_TEXTS)
    config = _recorded_config(recorded, directory)
    yield from _exact("real_engram", vectors, _constants(config))
    hasher = EngramHasher(config, token_map)
    texts = recorded.get("texts", [])
    found: dict[str, np.ndarray] = {"pad_compressed_id": hasher.pad_compressed_id}
    for index in range(len(texts)):
        if f"ids.{index}" in vectors:
            ids = vectors.token_ids(f"ids.{index}", token_map.size)
            found[f"hash.{index}"] = hash_in_steps(hasher, ids, len(ids))
    if "image.hash" in vectors:
        ids = vectors.token_ids("image.ids", token_map.size)
        prompt = int(vectors["image.prefill_len"])
        masked = _without_images(ids, vectors["image.mask"].astype(bool))
        found["image.hash"] = hash_in_steps(hasher, masked, prompt)
    yield from _exact("real_engram", vectors, found)
    for index, text in enumerate(texts):
        got, name = token_map[np.array(text["ids"])], f"compressed.{index}"
        rows = compare_exact(name, got, np.array(text["compressed"]))
        yield from judge("real_engram", None, name, {None: rows}, EXACT)


def _recorded_config(recorded: Any, directory: Directory) -> EngramConfig:
    try:
        params = recorded["params"]
        return EngramConfig(
            layer_ids=tuple(params["engram_layer_ids"]),
            num_embeddings=tuple(params["engram_num_embeddings"]),
            max_ngram_size=params["engram_max_ngram_size"],
            n_heads=params["engram_n_heads"],
            head_dim=32,  # of the table's rows, which are not here
            vocab_size=params["engram_vocab_size"],
            pad_token_id=params["engram_pad_id"],
            compressed_vocab_size=params["compressed_vocab_size"],
        )
    except (KeyError, TypeError) as error:
        raise VectorError(
            f"{directory.path / REAL_TEXTS} does not describe an Engram: {error!r}"
        ) from None
