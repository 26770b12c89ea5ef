"""Converted checkpoints: equal bit for bit on any mesh, and safe against interruption."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dsv41_jax
from dsv41_jax.checkpoint import CheckpointError, abstract_params, load_params, open_checkpoint
from dsv41_jax.checkpoint.__main__ import main as inspect
from dsv41_jax.checkpoint.manifest import MANIFEST_NAME, Manifest
from dsv41_jax.hf_config import load_config
from sharding import convert

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "tests" / "golden" / "tiny_a"
OPTIONS = ("--pipeline-stages", "5,4", "--tensor-parallel-size", "2", "--enable-expert-parallel")


@pytest.fixture(scope="module")
def config():
    return load_config(TINY)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    assert convert.main([str(TINY), str(out), *OPTIONS]) == 0
    return out


@pytest.fixture(scope="module")
def original(config):
    return load_params(TINY, config, progress=False)


def refused(capsys, *arguments):
    assert convert.main([str(argument) for argument in arguments]) == 3
    return capsys.readouterr().err


def test_whole_model_is_the_original_bit_for_bit(config, converted, original):
    chex.assert_trees_all_equal(load_params(converted, config, progress=False), original)
    assert convert.verify(TINY, converted, config) == []


def test_shards_are_those_of_the_devices(converted):
    experts = converted / "stage_0" / "layers_0" / "ffn.experts.w1.weight" / "c"
    assert sorted(path.name for path in experts.iterdir()) == ["0", "1"]
    manifest = Manifest.read(converted)
    assert manifest.complete and manifest.stages == (5, 4)
    assert manifest.units["embed"] == 0 and manifest.units["head"] == 1


def test_another_mesh_gets_the_same_values(config, converted, original):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("expert", "tensor"))

    def sharding(path, leaf):
        split = path[-2].key == "wq_b" and path[-1].key == "weight" and len(leaf.shape) == 2
        experts = ("expert", "tensor") if "experts" in [key.key for key in path] else None
        return NamedSharding(mesh, PartitionSpec("tensor" if split else experts))

    layers = range(3, 7)  # of both stages
    shardings = jax.tree_util.tree_map_with_path(sharding, abstract_params(config, layers))
    params = load_params(converted, config, layers=layers, shardings=shardings, progress=False)
    assert params["layers_4"]["ffn"]["experts"]["w2"]["scale"].shape[0] == 8  # of 5 experts
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        wanted = original
        for key in path:
            wanted = wanted[key.key]
        values = np.asarray(leaf)
        np.testing.assert_array_equal(values[: len(wanted)], np.asarray(wanted))
        assert not values[len(wanted) :].any()


def test_model_opens_from_the_converted_directory(converted):
    first, second = (dsv41_jax.load(path, progress=False) for path in (TINY, converted))
    ids = np.arange(8)
    for layer, rows in first.engram.lookup(ids, np.full(3, -1)).items():
        np.testing.assert_array_equal(
            rows.codes, second.engram.lookup(ids, np.full(3, -1))[layer].codes
        )
    chex.assert_trees_all_equal(first.params, second.params)


def test_inspect_knows_a_converted_directory(converted, tmp_path, capsys):
    assert inspect(["inspect", str(converted)]) == 0
    manifest = json.loads((converted / MANIFEST_NAME).read_text())
    interrupted = tmp_path / "out"
    interrupted.mkdir()
    for path in converted.iterdir():
        if path.is_file():
            os.link(path, interrupted / path.name)
    (interrupted / MANIFEST_NAME).unlink()
    (interrupted / MANIFEST_NAME).write_text(json.dumps(manifest | {"sizes": {}}))
    assert inspect(["inspect", str(interrupted)]) == 1
    assert "its conversion was interrupted: 0 of 12 parts are there" in capsys.readouterr().out


def test_converting_again_changes_nothing(converted, capsys):
    before = (converted / MANIFEST_NAME).stat().st_mtime_ns
    assert convert.main([str(TINY), str(converted), *OPTIONS]) == 0
    assert (converted / MANIFEST_NAME).stat().st_mtime_ns == before


def test_other_conversions_and_directories_are_refused(converted, tmp_path, capsys):
    assert "with other stages" in refused(capsys, TINY, converted)
    assert "another tensor parallel size" in refused(
        capsys, TINY, converted, "--pipeline-stages", "5,4"
    )
    assert "of another checkpoint" in refused(capsys, TINY.parent / "tiny_b", converted)
    assert "convert the original instead" in refused(capsys, converted, tmp_path / "new")
    (tmp_path / "notes.txt").touch()
    assert "it is not empty; name a new directory" in refused(capsys, TINY, tmp_path)
    assert "has no config.json" in refused(capsys, tmp_path, tmp_path / "new")


def test_wrong_usage_exits_with_two():
    with pytest.raises(SystemExit) as caught:
        convert.main([str(TINY)])
    assert caught.value.code == 2


def test_lost_file_is_named(config, converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "out")
    (out / "stage_0" / "layers_3" / "attn.wkv.weight" / "zarr.json").unlink()
    with pytest.raises(CheckpointError, match=r"stage_0/layers_3 has \d+ files of \d+ bytes"):
        open_checkpoint(out, config)


def test_manifest_that_is_none_is_named(config, tmp_path):
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"format": 7}))
    with pytest.raises(CheckpointError, match="conversion.json cannot be understood"):
        load_params(tmp_path, config, progress=False)


def test_killed_conversion_is_detected_and_continued(config, tmp_path, capsys):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "sharding.convert", str(TINY), str(out)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first = out / "stage_0" / "layers_1"
    until = time.monotonic() + 240
    while not first.is_dir() and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    manifest = Manifest.read(out)
    assert not manifest.complete
    with pytest.raises(CheckpointError, match=r"its conversion was interrupted: \d+ of 12 parts"):
        load_params(out, config, progress=False)
    kept = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    assert convert.main([str(TINY), str(out), "--verify"]) == 0
    assert "is complete and equal bit for bit" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == kept
    assert not list(out.rglob("*tmp*"))
