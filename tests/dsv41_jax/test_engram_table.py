"""Engram lookups from a checkpoint directory."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest
import tokenizers

from dsv41_jax.checkpoint import Checkpoint, CheckpointError
from dsv41_jax.config import ConfigError
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.hf_config import load_config

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
NONE = np.full(3, -1)


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
def test_rows_are_those_of_the_recorded_hash_ids(name):
    directory = GOLDEN / name
    config = load_config(directory)
    golden = np.load(directory / "golden_engram.npz")
    checkpoint = Checkpoint.open(directory)
    tables = EngramTables.open(directory, config)
    ids = np.where(golden["hash.token_mask"][0], golden["hash.input_ids"][0], -1)
    rows = tables.lookup(ids, NONE)
    assert tuple(rows) == config.engram.layer_ids
    for axis, layer in enumerate(config.engram.layer_ids):
        wanted = golden["hash.ids"][0][:, axis]
        codes = checkpoint.read_bytes(f"layers.{layer}.engram.embed.weight")
        scales = checkpoint.read_bytes(f"layers.{layer}.engram.embed.scale")
        np.testing.assert_array_equal(rows[layer].codes, codes[wanted])
        np.testing.assert_array_equal(rows[layer].scales, scales[wanted])
        assert rows[layer].codes.dtype == rows[layer].scales.dtype == np.uint8


def test_a_stage_maps_its_own_tables_only():
    directory = GOLDEN / "tiny_a"
    config = load_config(directory)
    whole = EngramTables.open(directory, config)
    ids = np.arange(5)
    for layers, owned in ((range(0, 3), (1,)), (range(3, 9), (4,)), (range(5, 9), ())):
        part = EngramTables.open(directory, config, layers=layers)
        assert part.layer_ids == owned
        rows = part.lookup(ids, NONE)
        assert tuple(rows) == owned
        for layer in owned:
            np.testing.assert_array_equal(rows[layer].codes, whole.lookup(ids, NONE)[layer].codes)


def test_a_given_tokenizer_is_used():
    directory = GOLDEN / "tiny_a"
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tables = EngramTables.open(directory, load_config(directory), tokenizer=tokenizer)
    assert tables.hasher.pad_compressed_id == 2


@pytest.fixture
def copy(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny_a", directory)
    return directory


def test_missing_tokenizer_is_named(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as error:
        EngramTables.open(copy, load_config(copy))
    assert str(error.value) == f"{copy}: tokenizer.json is missing"


def test_broken_tokenizer_is_named(copy):
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer.json is no tokenizer file"):
        EngramTables.open(copy, load_config(copy))


def test_tokenizer_of_another_model_is_named(copy):
    shutil.copy(GOLDEN / "tiny_b" / "tokenizer.json", copy / "tokenizer.json")
    with pytest.raises(ConfigError, match="engram_compressed_vocab_size is 420 but .* to 416 "):
        EngramTables.open(copy, load_config(copy))


def test_a_model_without_tables_is_refused():
    directory = GOLDEN / "tiny_a"
    config = dataclasses.replace(load_config(directory), engram=None)
    with pytest.raises(ConfigError, match="has no Engram layers"):
        EngramTables.open(directory, config)
