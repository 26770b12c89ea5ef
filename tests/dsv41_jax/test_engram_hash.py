"""Engram token map, constants and hash ids against recorded values."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest
import tokenizers

from dsv41_jax.config import ConfigError
from dsv41_jax.engram_hash import (
    EngramHasher,
    bucket_primes,
    check_num_embeddings,
    column_offsets,
    multipliers,
    token_map_from_tokenizer,
)
from dsv41_jax.hf_config import load_config
from serving.chat.released_tokenizer import released_tokenizer_text

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = ["tiny_a", "tiny_b"]
RELEASED = load_config("released").engram


@functools.cache
def real_tokenizer():
    return tokenizers.Tokenizer.from_str(released_tokenizer_text())


def tiny_config(name):
    return load_config(GOLDEN / name).engram


def load(name):
    if name == "real":
        return RELEASED, np.load(GOLDEN / "real_engram.npz"), real_tokenizer()
    directory = GOLDEN / name
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return tiny_config(name), np.load(directory / "golden_engram.npz"), tokenizer


@pytest.fixture(params=[*TINY, "real"], scope="module")
def recorded(request):
    return load(request.param)


def hash_in_steps(hasher, ids, cuts):
    """Hashes `ids` cut into steps, each given the ids before it."""
    padded = np.concatenate((np.full(hasher.history_size, -1), ids))
    steps = [
        hasher.hash(ids[a:b], padded[a : a + hasher.history_size])
        for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)
    ]
    return np.concatenate(steps)


def test_token_map_is_the_recorded_one(recorded):
    config, golden, tokenizer = recorded
    token_map = token_map_from_tokenizer(tokenizer, golden["token_map"].size)
    np.testing.assert_array_equal(token_map, golden["token_map"])
    assert token_map.max() + 1 == config.compressed_vocab_size
    assert token_map[config.pad_token_id] == golden["pad_compressed_id"]


def test_constants_are_the_recorded_ones(recorded):
    config, golden, _ = recorded
    primes = bucket_primes(config)
    np.testing.assert_array_equal(primes, golden["primes"])
    np.testing.assert_array_equal(column_offsets(primes), golden["offsets"])
    np.testing.assert_array_equal(multipliers(config), golden["multipliers"])
    assert tuple(primes.sum(axis=(1, 2))) == config.num_embeddings


@pytest.mark.parametrize("name", TINY)
def test_hash_ids_of_prefill_and_single_steps_are_the_recorded_ones(name):
    config, golden, _ = load(name)
    hasher = EngramHasher(config, golden["token_map"])
    for row in range(2):
        ids = np.where(golden["hash.token_mask"][row], golden["hash.input_ids"][row], -1)
        for cuts in ([*range(20, 26)], [], [*range(1, 26)], [3, 8, 19]):
            np.testing.assert_array_equal(hash_in_steps(hasher, ids, cuts), golden["hash.ids"][row])


def test_hash_ids_of_real_texts_and_an_image_are_the_recorded_ones():
    golden = np.load(GOLDEN / "real_engram.npz")
    hasher = EngramHasher(RELEASED, golden["token_map"])
    for j in range(12):
        np.testing.assert_array_equal(
            hash_in_steps(hasher, golden[f"ids.{j}"], [2, 7]), golden[f"hash.{j}"]
        )
    ids = np.where(golden["image.mask"], golden["image.ids"], -1)
    start = int(golden["image.prefill_len"])
    for cuts in ([*range(start, len(ids))], [6, 10]):
        np.testing.assert_array_equal(hash_in_steps(hasher, ids, cuts), golden["image.hash"])


def test_real_texts_have_the_recorded_ids():
    golden = np.load(GOLDEN / "real_engram.npz")
    tokenizer = real_tokenizer()
    texts = json.loads((GOLDEN / "real_engram_texts.json").read_text("utf-8"))
    for text in texts["texts"]:
        ids = tokenizer.encode(text["text"], add_special_tokens=False).ids
        assert ids == text["ids"]
        assert golden["token_map"][ids].tolist() == text["compressed"]


def test_no_tokens_give_no_rows():
    config, golden, _ = load("tiny_a")
    hasher = EngramHasher(config, golden["token_map"])
    none = hasher.hash(np.zeros(0, np.int32), np.full(3, -1))
    assert none.shape == (0, 2, config.num_columns)


def test_ids_the_tokenizer_lacks_follow_its_last_token():
    _, golden, tokenizer = load("tiny_a")
    token_map = token_map_from_tokenizer(tokenizer, 520)
    np.testing.assert_array_equal(token_map[:512], golden["token_map"])
    assert set(token_map[512:]) == {golden["token_map"][-1]}


@pytest.mark.parametrize("name", TINY)
def test_wrong_table_sizes_are_named(name):
    config = tiny_config(name)
    rows = config.num_embeddings
    with pytest.raises(ConfigError) as error:
        check_num_embeddings(dataclasses.replace(config, num_embeddings=(rows[0], rows[1] + 2)))
    assert str(error.value) == (
        f"engram_num_embeddings is {rows[1] + 2} for layer {config.layer_ids[1]}, but the bucket "
        f"primes from engram_vocab_size {config.vocab_size} upwards add up to {rows[1]}"
    )


def test_mismatching_compressed_vocabulary_is_named():
    config, golden, _ = load("tiny_a")
    wrong = dataclasses.replace(config, compressed_vocab_size=419)
    with pytest.raises(ConfigError, match=r"engram_compressed_vocab_size is 419 .* to 420 differ"):
        EngramHasher(wrong, golden["token_map"])


def test_tokenizer_larger_than_the_model_is_refused():
    _, _, tokenizer = load("tiny_a")
    with pytest.raises(ConfigError, match="has 512 tokens but vocab_size is 500"):
        token_map_from_tokenizer(tokenizer, 500)


@pytest.mark.parametrize("wrong", [512, -2])
def test_ids_outside_the_vocabulary_are_named(wrong):
    config, golden, _ = load("tiny_a")
    hasher = EngramHasher(config, golden["token_map"])
    with pytest.raises(ValueError, match=rf"token id {wrong} is outside the vocabulary 0\.\.511"):
        hasher.hash(np.array([3, wrong]), np.full(3, -1))


def test_history_of_the_wrong_length_is_refused():
    config, golden, _ = load("tiny_a")
    hasher = EngramHasher(config, golden["token_map"])
    with pytest.raises(ValueError, match="needs the 3 ids before the step, not 2"):
        hasher.hash(np.array([3]), np.full(2, -1))
