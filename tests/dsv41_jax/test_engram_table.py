"""Engram lookups from a checkpoint directory."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest
import tokenizers

from dsv41_jax.checkpoint import Checkpoint, CheckpointError
from dsv41_jax.config import ConfigError
from dsv41_jax.engram_table import EngramTables, empty_rows
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


def test_requests_looked_up_together_are_those_looked_up_alone():
    directory = GOLDEN / "tiny_a"
    config = load_config(directory)
    tables = EngramTables.open(directory, config)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, config.vocab_size, count) for count in (1, 5, 0, 2, 1)]
    ids[1][2] = -1
    histories = [rng.integers(-1, config.vocab_size, 3) for _ in ids]
    total = sum(map(len, ids))
    out = empty_rows(config.engram, tables.layer_ids, total + 2)
    for rows in out.values():
        rows.codes[total:] = 7
    tables.lookup_many(ids, histories, out)
    alone = [tables.lookup(*request) for request in zip(ids, histories, strict=True)]
    for layer, rows in out.items():
        wanted = np.concatenate([request[layer].codes for request in alone])
        np.testing.assert_array_equal(rows.codes[:total], wanted)
        np.testing.assert_array_equal(
            rows.scales[:total], np.concatenate([request[layer].scales for request in alone])
        )
        assert (rows.codes[total:] == 7).all()


@pytest.mark.parametrize("options", [{"placement": "ram"}, {"prefault": True}], ids=str)
def test_placement_changes_no_row(options, capsys):
    directory = GOLDEN / "tiny_a"
    config = load_config(directory)
    mapped = EngramTables.open(directory, config)
    placed = EngramTables.open(directory, config, **options)
    assert "Reading Engram tables: 100%" in capsys.readouterr().err
    ids = np.arange(9)
    for layer, rows in mapped.lookup(ids, NONE).items():
        found = placed.lookup(ids, NONE)[layer]
        np.testing.assert_array_equal(found.codes, rows.codes)
        np.testing.assert_array_equal(found.scales, rows.scales)


def test_tables_in_ram_outlive_their_files(copy):
    config = load_config(copy)
    tables = EngramTables.open(copy, config, placement="ram", progress=False)
    before = tables.lookup(np.arange(4), NONE)
    for shard in copy.glob("*.safetensors"):
        with shard.open("r+b") as file:
            file.truncate(0)
    for layer, rows in tables.lookup(np.arange(4), NONE).items():
        np.testing.assert_array_equal(rows.codes, before[layer].codes)
