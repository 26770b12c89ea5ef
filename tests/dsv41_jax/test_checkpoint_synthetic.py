"""Random checkpoints: complete, deterministic, and distributed like trained ones."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from dsv41_jax.checkpoint import Checkpoint, CheckpointError, load_params, open_checkpoint
from dsv41_jax.checkpoint.config_json import config_json
from dsv41_jax.checkpoint.synthetic import make_checkpoint
from dsv41_jax.hf_config import load_config, parse_config

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="module")
def config():
    return load_config(GOLDEN / "tiny_b")


@pytest.fixture(scope="module")
def made(config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    make_checkpoint(directory, config, seed=3)
    return directory


def values(checkpoint, name):
    """float64 values of one tensor, scales applied."""
    array = checkpoint.read(name)
    if checkpoint.tensors[name].dtype not in ("I8", "F8_E4M3"):
        return array.astype(np.float64)
    scale = 2.0 ** (checkpoint.read_bytes(f"{name[:-6]}scale").astype(np.float64) - 127)
    if array.dtype == np.int8:
        codes = array.view(np.uint8)
        array = np.stack((E2M1[codes & 15], E2M1[codes >> 4]), -1).reshape(len(codes), -1)
    scale = np.repeat(scale, 32, axis=1)
    if len(scale) < len(array):
        scale = np.repeat(scale, 32, axis=0)
    return array.astype(np.float64) * scale[: len(array), : array.shape[1]]


@pytest.mark.parametrize("name", ["released", "tiny_a", "tiny_b"])
def test_configuration_survives_the_round_trip(name):
    config = load_config(name if name == "released" else GOLDEN / name)
    assert parse_config(json.loads(json.dumps(config_json(config)))) == config


def test_configuration_without_optional_parts_survives(config):
    plain = dataclasses.replace(
        config, engram=None, draft=None, vision=None, compress_ratios=config.compress_ratios[:8]
    )
    assert parse_config(config_json(plain)) == plain


def test_made_checkpoint_is_complete_and_has_several_shards(config, made):
    assert load_config(made) == config
    checkpoint = open_checkpoint(made, config)
    assert len({tensor.shard for tensor in checkpoint.tensors.values()}) == 3
    load_params(made, config, progress=False)


def test_values_depend_on_the_seed_and_not_on_the_shards(config, made, tmp_path):
    make_checkpoint(tmp_path / "same", config, seed=3, shards=5)
    make_checkpoint(tmp_path / "other", config, seed=4)
    first, same, other = map(Checkpoint.open, (made, tmp_path / "same", tmp_path / "other"))
    for name in first.tensors:
        np.testing.assert_array_equal(first.read_bytes(name), same.read_bytes(name))
    name = "layers.0.ffn.experts.0.w1.weight"
    assert (first.read(name) != other.read(name)).mean() > 0.8
    assert (first.read(name) != first.read(name.replace("experts.0", "experts.1"))).mean() > 0.8


def test_matrices_are_distributed_like_the_vectors(config, made):
    ours, theirs = Checkpoint.open(made), Checkpoint.open(GOLDEN / "tiny_b")
    for name, tensor in ours.tensors.items():
        text = name.startswith("layers.") or name in ("embed.weight", "head.weight")
        if text and name.endswith(".weight") and len(tensor.shape) == 2:
            ratio = values(ours, name).std() / values(theirs, name).std()
            assert 0.6 < ratio < 1.6, name


def test_norms_are_distributed_like_the_vectors(made):
    ours, theirs = Checkpoint.open(made), Checkpoint.open(GOLDEN / "tiny_b")
    for name, tensor in ours.tensors.items():
        if name.endswith("norm.weight") and len(tensor.shape) == 1:
            ratio = values(ours, name).mean() / values(theirs, name).mean()
            assert 0.8 < ratio < 1.25, name


def test_an_existing_checkpoint_is_not_overwritten(config, made):
    with pytest.raises(CheckpointError, match="it holds a checkpoint already"):
        make_checkpoint(made, config)
