"""Meshes, and what is placed on them."""

import jax
import pytest
from tiny_pipeline import LEGAL, tiny_config

from dsv41_jax.axes import Partition
from dsv41_jax.checkpoint import reader
from dsv41_jax.model import Stage
from sharding.mesh import AXES, provide_cpu_devices, stage_meshes
from sharding.pipeline import build_pipeline
from sharding.rules import parameter_specs
from sharding.stage_plan import PartitionError, build_stage_plan, lay_out, ranges_of


def test_stages_get_consecutive_devices_under_the_same_axes():
    meshes = stage_meshes(2, 4)
    assert [mesh.axis_names for mesh in meshes] == [AXES, AXES]
    assert [mesh.devices.shape for mesh in meshes] == [(1, 1, 4), (1, 1, 4)]
    assert [d for mesh in meshes for d in mesh.devices.flat] == jax.devices()[:8]


def test_too_few_devices_are_refused():
    with pytest.raises(PartitionError, match="5 pipeline stages of 2 devices need 10 devices"):
        stage_meshes(5, 2)


def test_asking_for_devices_after_the_start_changes_nothing():
    before = jax.devices()
    provide_cpu_devices(3)
    assert jax.devices() == before


def test_a_refused_plan_opens_no_weight_file(tiny, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a weight file was opened")

    monkeypatch.setattr(reader.Checkpoint, "open", refuse)
    plan = lay_out(tiny_config(), ranges_of((2, 4)), relay=False)
    with pytest.raises(PartitionError, match="kv of layer 1 .stage 0. is read by layer 2"):
        build_pipeline(tiny, plan)
    with pytest.raises(AssertionError, match="a weight file was opened"):
        build_pipeline(tiny, build_stage_plan(tiny_config(), stages=LEGAL))


def test_a_plan_of_another_model_is_refused(tiny):
    other = build_stage_plan(tiny_config(), stages=LEGAL, relay=True)
    other = type(other)(**{**vars(other), "num_layers": 7})
    with pytest.raises(PartitionError, match="made for another configuration"):
        build_pipeline(tiny, other)


def test_a_stage_holds_the_parameters_of_its_layers_on_its_own_devices(pipeline_of):
    pipeline = pipeline_of(LEGAL)
    held = [set(stage.params) for stage in pipeline.stages]
    assert held == [
        {"embed", "layers_0"},
        {"layers_1", "layers_2"},
        {"layers_3", "layers_4", "layers_5", "norm", "head"},
    ]
    for number, stage in enumerate(pipeline.stages):
        for leaf in jax.tree.leaves(stage.params):
            assert leaf.devices() == {jax.devices()[number]}


def test_a_stage_of_window_layers_holds_no_compressed_pool(pipeline_of):
    states = pipeline_of(LEGAL).init_state(window_pages=2, global_pages=3, slots=1)
    assert not (states[0].kv or states[0].index_k or states[0].open_group)
    assert [sorted(state.window) for state in states] == [[0], [1, 2], [3, 4, 5]]
    assert [sorted(state.kv) for state in states] == [[], [1], [3]]


def test_a_stage_without_engram_layers_maps_no_table(pipeline_of):
    tables = [stage.engram for stage in pipeline_of(LEGAL).stages]
    assert tables[0] is None and tables[2] is None
    assert tables[1].layer_ids == (2,)


def test_whole_experts_are_spread_over_the_expert_and_the_tensor_axis():
    config = tiny_config()
    stage = Stage(config, range(1), Partition(tensor=2, expert=2))
    specs = parameter_specs(stage)["layers_0"]
    assert specs["ffn"]["experts"]["w1"]["weight"][0] == ("expert", "tensor")
    assert specs["attn"]["wq_b"]["scale"][0] == "tensor"
    sliced = Stage(config, range(1), Partition(tensor=2))
    assert parameter_specs(sliced)["layers_0"]["ffn"]["experts"]["w2"]["scale"][2] == "tensor"
