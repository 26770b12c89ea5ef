"""The released tensor layout: complete, invertible, and every difference to it named."""

import collections
import dataclasses
import math
import pathlib

import pytest

from dsv41_jax.checkpoint import (
    Checkpoint,
    ParameterPath,
    StoredTensor,
    TensorSpec,
    expected_tensors,
    layout_faults,
    parameter_path,
    tensor_name,
)
from dsv41_jax.checkpoint.reader import DTYPES
from dsv41_jax.hf_config import load_config

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def stored(spec):
    size = math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
    return StoredTensor(spec.dtype, spec.shape, "model.safetensors", 0, size)


@pytest.fixture
def layout():
    expected = expected_tensors(load_config(GOLDEN / "tiny_a"))
    return expected, {name: stored(spec) for name, spec in expected.items()}


def test_released_layout_is_complete():
    expected = expected_tensors(load_config("released"))
    assert len(expected) == 96085
    sizes, counts = collections.Counter(), collections.Counter()
    for spec in expected.values():
        counts[spec.component] += 1
        sizes[spec.component] += stored(spec).nbytes
    assert counts["draft"] == 2401
    assert counts["vision"] == 259 + 4 + 3
    assert counts["experts"] == 40 * 384 * 6
    assert counts["engram"] == 4
    rows = 384006168 + 384016682
    assert sizes["engram"] == rows * (256 + 8)
    assert sizes["embedding"] == 2 * 129280 * 5120 * 2
    assert round(sum(sizes.values()) / 1e9) == 510


def test_released_shapes_are_the_published_ones():
    expected = expected_tensors(load_config("released"))
    shapes = {
        "layers.0.attn.wq_a.weight": (1280, 5120),
        "layers.0.attn.wq_a.scale": (40, 160),
        "layers.5.attn.wo_a.weight": (8192, 4096),
        "layers.5.ffn.experts.383.w2.weight": (5120, 1152),
        "layers.5.ffn.experts.383.w2.scale": (5120, 72),
        "layers.1.engram.wkv.weight": (25600, 6144),
        "layers.14.engram.embed.scale": (384016682, 8),
        "layers.2.hc_attn_fn": (24, 20480),
        "layers.20.attn.indexer.wq_b.weight": (4096, 1280),
        "mtp.0.main_proj.weight": (5120, 15360),
        "mtp.2.confidence_head.proj.weight": (1, 5376),
    }
    assert {name: expected[name].shape for name in shapes} == shapes
    assert "layers.2.attn.compressor.wgate.weight" in expected
    assert "layers.20.attn.compressor.wgate.weight" not in expected
    assert "layers.24.attn.indexer.wq_b.weight" in expected
    assert "layers.24.attn.indexer.wk.weight" not in expected


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
def test_vectors_have_exactly_the_derived_layout(name):
    expected = expected_tensors(load_config(GOLDEN / name))
    assert layout_faults(expected, Checkpoint.open(GOLDEN / name).tensors) == []


@pytest.mark.parametrize("name", ["released", "tiny_a", "tiny_b"])
def test_names_and_paths_map_one_to_one(name):
    names = expected_tensors(load_config(name if name == "released" else GOLDEN / name))
    paths = [parameter_path(name) for name in names]
    assert len(set(paths)) == len(names)
    assert [tensor_name(path) for path in paths] == list(names)


def test_paths_are_the_parameter_trees():
    assert parameter_path("layers.3.attn.wq_a.weight") == ParameterPath(
        ("layers_3", "attn", "wq_a", "weight")
    )
    assert parameter_path("layers.12.ffn.experts.7.w1.scale") == ParameterPath(
        ("layers_12", "ffn", "experts", "w1", "scale"), 7
    )
    assert parameter_path("layers.0.hc_attn_fn").keys == ("layers_0", "hc_attn_fn")
    assert parameter_path("vision.blocks.1.norm1.weight").keys == (
        "vision", "blocks_1", "norm1", "weight",
    )  # fmt: skip
    assert parameter_path("mtp.2.norm.weight").keys == ("mtp_2", "norm", "weight")


def test_missing_tensor_is_named(layout):
    expected, found = layout
    del found["layers.3.ffn.experts.4.w2.scale"]
    assert layout_faults(expected, found) == [
        "layers.3.ffn.experts.4.w2.scale is missing; expected F8_E8M0 [96, 2]"
    ]


def test_unexpected_tensor_is_named(layout):
    expected, found = layout
    found["layers.0.attn.compressor.wkv.weight"] = stored(TensorSpec("BF16", (64, 96), "other"))
    assert layout_faults(expected, found) == [
        "layers.0.attn.compressor.wkv.weight (BF16 [64, 96]) is unexpected; "
        "config.json describes none"
    ]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("embed.weight", {"shape": (512, 64)}, "is BF16 [512, 64]; expected BF16 [512, 96]"),
        ("head.weight", {"shape": (96, 512)}, "is BF16 [96, 512]; expected BF16 [512, 96]"),
        (
            "layers.0.attn.wkv.weight",
            {"dtype": "BF16"},
            "is BF16 [64, 96]; expected F8_E4M3 [64, 96]",
        ),
        (
            "layers.0.ffn.experts.0.w1.weight",
            {"dtype": "U8"},
            "is U8 [64, 48]; expected I8 [64, 48]",
        ),
        (
            "layers.1.engram.embed.weight",
            {"shape": (661, 32)},
            "is F8_E4M3 [661, 32]; expected F8_E4M3 [660, 32]",
        ),
        ("layers.0.attn.attn_sink", {"dtype": "BF16"}, "is BF16 [4]; expected F32 [4]"),
    ],
)
def test_misshapen_and_wrongly_typed_tensors_are_named(layout, name, change, message):
    expected, found = layout
    found[name] = dataclasses.replace(found[name], **change)
    assert layout_faults(expected, found) == [f"{name} {message}"]


def test_another_models_configuration_is_told_apart():
    expected = expected_tensors(load_config(GOLDEN / "tiny_a"))
    faults = layout_faults(expected, Checkpoint.open(GOLDEN / "tiny_b").tensors)
    assert len(faults) > 100
