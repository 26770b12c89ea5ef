"""Where tables are looked up changes no bit, and only what is needed is loaded."""

import argparse

import jax
import numpy as np
import pytest
from tiny_pipeline import LENGTH, run, tiny_config

from dsv41_jax.checkpoint import CheckpointError, load_params
from dsv41_jax.embedding_table import EmbeddingTable
from dsv41_jax.engram_device import DeviceTables
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.forward import forward
from dsv41_jax.host_batch import build_batch, round_rows
from dsv41_jax.inference import columns_for, request_rows
from dsv41_jax.model import Stage
from dsv41_jax.state import init_state
from sharding.mesh import stage_meshes
from sharding.pipeline import build_pipeline
from sharding.placement import TablePlacement, add_placement_options, placement_options
from sharding.stage_plan import build_stage_plan
from sharding.tensor_plan import plan_tensor_parallel

ELSEWHERE = TablePlacement(engram="device", embedding="host")


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_placement_options(parser)
    return placement_options(parser.parse_args(arguments))


def test_options_are_read():
    assert options() == TablePlacement()
    assert options("--engram-placement", "device", "--embedding-placement", "host") == ELSEWHERE


@pytest.mark.parametrize("placement", [TablePlacement(), TablePlacement(engram="ram"), ELSEWHERE])
def test_tables_are_opened_where_they_are_to_be(tiny, placement):
    config, (mesh,) = tiny_config(), stage_meshes(1, 2)
    tables = placement.open_engram(tiny, config, mesh, progress=False)
    assert isinstance(tables, DeviceTables if placement == ELSEWHERE else EngramTables)
    assert (placement.open_embedding(tiny, config) is None) == (placement != ELSEWHERE)


def test_one_device_computes_the_same_bits(tiny, token_ids):
    config, layers = tiny_config(), range(tiny_config().num_hidden_layers)
    columns, (mesh,) = columns_for(config, LENGTH), stage_meshes(1, 1)
    logits = []
    for placement in (TablePlacement(), ELSEWHERE):
        stage = Stage(config, layers, embedding=placement.embedding)
        on_device = placement.embedding == "device"
        params = load_params(tiny, config, embedding=on_device, progress=False)
        assert ("embed" in params) == on_device
        rows = request_rows(config, token_ids.tolist(), 0, LENGTH, LENGTH)
        batch = build_batch(
            config,
            [rows],
            tokens=round_rows(LENGTH),
            requests=1,
            columns=columns,
            logit_rows=round_rows(1),
            engram=placement.open_engram(tiny, config, mesh, progress=False),
            embedding=placement.open_embedding(tiny, config),
        )
        state = init_state(config, layers, window_pages=columns, global_pages=columns, slots=1)
        logits.append(jax.device_get(forward(stage, params, state, batch)[0]))
    np.testing.assert_array_equal(logits[1], logits[0])
    assert np.abs(logits[0]).max() > 0


def test_a_pipeline_computes_the_same_bits(tiny, token_ids, logits_of):
    config = tiny_config()
    pipeline = build_pipeline(
        tiny,
        build_stage_plan(config, stages=(3, 3)),
        plan_tensor_parallel(config, 2),
        placement=ELSEWHERE,
        progress=False,
    )
    first, second = pipeline.stages
    assert "embed" not in first.params and first.embedding is not None
    assert isinstance(first.engram, DeviceTables) and second.embedding is None
    found = run(pipeline, token_ids, LENGTH)[0]
    np.testing.assert_array_equal(found, logits_of((3, 3), tensor=2))


def test_rows_on_the_host_need_the_table_in_the_shards(tiny, monkeypatch):
    config = tiny_config()
    whole = EmbeddingTable.open(tiny, config)
    assert whole.rows(np.array([3, 1])).shape == (2, config.hidden_size)
    converted = type("Converted", (), {"tensors": {}})()
    monkeypatch.setattr("dsv41_jax.embedding_table.open_checkpoint", lambda path, config: converted)
    with pytest.raises(CheckpointError, match=r"embed\.weight is not in its shards"):
        EmbeddingTable.open(tiny, config)
