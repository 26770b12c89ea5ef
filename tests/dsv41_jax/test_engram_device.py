"""Engram tables on devices give the rows that the host's give."""

import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from dsv41_jax.axes import TENSOR
from dsv41_jax.engram_device import DeviceTables
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.hf_config import load_config

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_a"


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_rows_are_those_of_the_host_whoever_holds_them(devices):
    config = load_config(TINY)
    tables = EngramTables.open(TINY, config, placement="device")
    mesh = Mesh(np.array(jax.devices()[:devices]), (TENSOR,))
    placed = DeviceTables(tables, mesh)
    assert placed.layer_ids == tables.layer_ids
    rng = np.random.default_rng(devices)
    ids = [rng.integers(0, config.vocab_size, count) for count in (1, 40, 3)]
    ids[1][7] = -1
    histories = [rng.integers(-1, config.vocab_size, 3) for _ in ids]
    found = placed.step_rows(ids, histories, 48)
    for layer, rows in tables.step_rows(ids, histories, 48).items():
        assert found[layer].codes.sharding.is_fully_replicated
        assert found[layer].codes.sharding.device_set == set(mesh.devices.flat)
        np.testing.assert_array_equal(found[layer].codes, rows.codes)
        np.testing.assert_array_equal(found[layer].scales, rows.scales)


def test_every_device_holds_its_share_of_rows(capsys):
    tables = EngramTables.open(TINY, load_config(TINY), placement="device")
    mesh = Mesh(np.array(jax.devices()[:4]), (TENSOR,))
    placed = DeviceTables(tables, mesh, progress=True)
    assert "Copying Engram tables to the devices: 100%" in capsys.readouterr().err
    for layer, table in placed.tables.items():
        rows = len(tables.tables[layer].codes)
        shares = [shard.data.shape[0] for shard in table.codes.addressable_shards]
        assert shares == [-(-rows // 4)] * 4


def test_a_step_without_tokens_has_rows_of_zeros():
    tables = EngramTables.open(TINY, load_config(TINY), placement="device")
    placed = DeviceTables(tables, Mesh(np.array(jax.devices()[:1]), (TENSOR,)))
    for rows in placed.step_rows([], [], 16).values():
        assert rows.codes.shape[0] == 16 and not rows.codes.any() and not rows.scales.any()


def test_an_id_outside_the_vocabulary_is_named():
    tables = EngramTables.open(TINY, load_config(TINY), placement="device")
    placed = DeviceTables(tables, Mesh(np.array(jax.devices()[:1]), (TENSOR,)))
    with pytest.raises(ValueError, match="token id 1000 is outside the vocabulary"):
        placed.step_rows([np.array([1000])], [np.full(3, -1)], 16)
