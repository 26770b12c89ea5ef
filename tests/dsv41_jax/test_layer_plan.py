"""Layers are classified as the released model's tables say."""

import dataclasses
import pathlib

import pytest

from dsv41_jax.hf_config import load_config
from dsv41_jax.layer_plan import AttentionMode, layer_plan

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


def test_released_layers_have_the_modes_of_the_model():
    plan = layer_plan(load_config("released"))
    by_mode = {mode: [spec.layer for spec in plan if spec.mode is mode] for mode in AttentionMode}
    assert by_mode[AttentionMode.WINDOW] == [0, 1]
    assert by_mode[AttentionMode.FULL] == [2, 8, 14, 20]
    assert by_mode[AttentionMode.REINDEX] == [24, 28, 32, 36]
    assert len(by_mode[AttentionMode.REUSE]) == 30


def test_released_sources_are_the_nearest_at_or_before():
    plan = layer_plan(load_config("released"))
    assert [plan[layer].kv_source for layer in (0, 1, 2, 7, 8, 13, 19, 20, 39)] == [
        *(None, None, 2, 2, 8, 8, 14, 20, 20)
    ]
    assert [plan[layer].index_source for layer in (1, 2, 7, 19, 23, 24, 27, 35, 39)] == [
        *(None, 2, 2, 14, 20, 24, 24, 32, 36)
    ]


def test_candidates_mask_every_later_index_source_but_not_their_own():
    plan = layer_plan(load_config("released"))
    assert [spec.layer for spec in plan if spec.candidate_source == 20] == [24, 28, 32, 36]
    assert [spec.layer for spec in plan if spec.publishes_candidates] == [20]


@pytest.mark.parametrize(
    "off", [{"candidate_source_layer_id": -1}, {"candidate_topk_blocks": 0}], ids=str
)
def test_candidates_can_be_switched_off(off):
    plan = layer_plan(dataclasses.replace(load_config("released"), **off))
    assert not any(spec.publishes_candidates or spec.candidate_source for spec in plan)


def test_released_engram_and_draft_layers():
    plan = layer_plan(load_config("released"))
    assert {spec.layer: spec.engram for spec in plan if spec.engram is not None} == {1: 0, 14: 1}
    assert [spec.layer for spec in plan if spec.draft_target] == [37, 38, 39]


def test_layers_of_the_small_checkpoints():
    window, full, reindex, reuse = AttentionMode
    plan = layer_plan(load_config(GOLDEN / "tiny_a"))
    expected = [window, window, full, reuse, full, full, reuse, reindex, reuse]
    assert [spec.mode for spec in plan] == expected
    plan = layer_plan(load_config(GOLDEN / "tiny_b"))
    expected = [window, window, full, reuse, full, reuse, reindex, reuse]
    assert [spec.mode for spec in plan] == expected
    assert [spec.ratio for spec in plan] == [0, 0, 2, 2, 1, 1, 1, 1]


def test_what_a_layer_owns_follows_from_its_mode():
    for spec in layer_plan(load_config("released")):
        assert spec.owns_kv == (spec.kv_source == spec.layer)
        assert spec.owns_index == (spec.index_source == spec.layer)
