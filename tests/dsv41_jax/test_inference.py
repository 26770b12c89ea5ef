"""The Python API as a user calls it, and what it says to wrong calls."""

import pathlib
import shutil

import numpy as np
import pytest

import dsv41_jax
from dsv41_jax.checkpoint import CheckpointError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PROMPT, NEW, CHUNK = 96, 6, 64  # scored in the shape of test_row_independence


@pytest.fixture(scope="module", params=["tiny_a", pytest.param("tiny_b", marks=pytest.mark.full)])
def golden(request):
    return GOLDEN / request.param


@pytest.fixture(scope="module")
def model(golden):
    return dsv41_jax.load(golden, progress=False)


@pytest.fixture(scope="module")
def prompt(golden):
    return np.load(golden / "golden_text.npz")["input_ids"][:PROMPT].tolist()


def test_greedy_tokens_are_the_likeliest_of_their_scores(model, prompt):
    tokens = dsv41_jax.generate(model, prompt, max_new_tokens=NEW)
    assert 1 <= len(tokens) <= NEW
    logits = dsv41_jax.score(model, [*prompt, *tokens[:-1]], chunk_size=CHUNK)
    assert logits[len(prompt) - 1 :].argmax(axis=1).tolist() == tokens


def test_a_seed_decides_the_draws(model, prompt):
    def draw(seed):
        return dsv41_jax.generate(model, prompt, max_new_tokens=NEW, temperature=1.0, seed=seed)

    assert draw(3) == draw(3)
    assert len({tuple(draw(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    "token_ids, message",
    [
        ([], "token_ids is empty"),
        ([1, 512], "token id 512 is outside the vocabulary 0..511"),
        ([-1], "token id -1 is outside"),
        ([1.5, 2.0], "whole numbers, not an array of float64"),
        ([True], "whole numbers, not an array of bool"),
        (["1"], "whole numbers, not an array of <U1"),
        ("hello", "whole numbers, not str"),
        (None, "whole numbers, not NoneType"),
        ([[1, 2]], "not an array of int64 with 2 axes"),
        ([[1], [2, 3]], "it is nested unevenly"),
        ([5] * 1000, "1000 tokens exceed the model's context of"),
    ],
)
def test_wrong_tokens_are_refused(model, token_ids, message):
    with pytest.raises(ValueError, match=message):
        dsv41_jax.score(model, token_ids)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=-1), "max_new_tokens is -1; it must be a whole number"),
        (dict(max_new_tokens=1.5), "max_new_tokens is 1.5"),
        (dict(max_new_tokens=1, temperature=-1.0), "temperature is -1.0; it must be 0 or"),
        (dict(max_new_tokens=1, temperature=float("nan")), "temperature is nan"),
        (dict(max_new_tokens=1, temperature=float("inf")), "temperature is inf"),
        (dict(max_new_tokens=1, seed=1.5), "seed is 1.5; it must be a whole number"),
        (dict(max_new_tokens=1, seed=None), "seed is None"),
        (dict(max_new_tokens=10**6), "tokens exceed the model's context"),
    ],
)
def test_wrong_options_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        dsv41_jax.generate(model, [5, 6], **options)


@pytest.mark.parametrize("chunk", [0, -3, 2.5, True])
def test_wrong_chunk_sizes_are_refused(model, chunk):
    with pytest.raises(ValueError, match="chunk_size is .*a whole number of at least 1"):
        dsv41_jax.score(model, [5, 6], chunk_size=chunk)


@pytest.mark.parametrize("path", ["released", "no/such/place", __file__])
def test_only_a_directory_is_loaded(path):
    with pytest.raises(CheckpointError, match="load takes the directory of a checkpoint"):
        dsv41_jax.load(path)


def test_a_configuration_of_another_model_is_told_by_the_tensors(tmp_path):
    shutil.copytree(GOLDEN / "tiny_b", tmp_path / "mixed")
    shutil.copy(GOLDEN / "tiny_a" / "config.json", tmp_path / "mixed")
    with pytest.raises(CheckpointError, match=r"mixed: 3\d\d faults: "):
        dsv41_jax.load(tmp_path / "mixed")


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'scores'"):
        dsv41_jax.scores  # noqa: B018
