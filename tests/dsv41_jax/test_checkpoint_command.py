"""`python -m dsv41_jax.checkpoint`: complete directories, planted faults, and making one."""

import json
import os
import pathlib
import shutil
import time

import pytest

from dsv41_jax.checkpoint.__main__ import main
from dsv41_jax.checkpoint.reduced import keep_layers, pick_layers
from dsv41_jax.config import ConfigError
from dsv41_jax.hf_config import load_config
from dsv41_jax.layer_plan import AttentionMode, layer_plan

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    """The released layout: true headers over sparse data."""
    directory = tmp_path_factory.mktemp("released") / "model"
    assert main(["make-synthetic", str(directory), "--headers-only", "--shards", "48"]) == 0
    return directory


def inspect(capsys, directory, *options):
    capsys.readouterr()
    status = main(["inspect", str(directory), *options, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_released_layout_is_found_complete_within_seconds(released, capsys):
    began = time.monotonic()
    status, facts = inspect(capsys, released)
    assert time.monotonic() - began < 20
    assert (status, facts["complete"], facts["faults"]) == (0, True, [])
    assert (facts["shards"], facts["tensors"]) == (48, 96085)
    parts = facts["components"]
    assert {name: part["tensors"] for name, part in parts.items()} == {
        "experts": 92160,
        "engram": 4,
        "draft": 2401,
        "dense": 660,
        "embedding": 2,
        "vision": 266,
        "other": 592,
    }
    assert 470 < facts["bytes"] / 2**30 < 480
    blocks = sum(path.stat().st_blocks for path in released.iterdir())
    assert blocks * 512 < 64 << 20


def test_text_has_the_totals(released, capsys):
    assert main(["inspect", str(released)]) == 0
    out = capsys.readouterr().out
    assert "total         96085    96085    475.2" in out
    assert out.endswith("complete: every tensor that config.json describes, no other\n")


@pytest.fixture(scope="session")
def fewer(tmp_path_factory):
    """The released layout with 8 of 384 experts, for the faults."""
    directory = tmp_path_factory.mktemp("fewer") / "model"
    options = ("--headers-only", "--shards", "48", "--experts", "8")
    assert main(["make-synthetic", str(directory), *options]) == 0
    return directory


@pytest.fixture
def copy(fewer, tmp_path):
    """Links to the shards, so that a planted fault costs no copy; changed ones are replaced."""
    directory = tmp_path / "model"
    directory.mkdir()
    for path in fewer.iterdir():
        os.link(path, directory / path.name)
    return directory


def shard_of(directory, name):
    index = json.loads((directory / INDEX).read_text())
    return directory / index["weight_map"][name]


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.unlink()
    path.write_text(json.dumps(value))


def edit_header(shard, change):
    """Replaces a sparse shard's header; its data keeps its size."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    change(header)
    raw = json.dumps(header).encode()
    shard.unlink()
    with shard.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(size - length + len(raw))


def in_header(name, **changes):
    def plant(directory):
        edit_header(shard_of(directory, name), lambda header: header[name].update(changes))

    return plant


def missing_shard(directory):
    (directory / "model-00048-of-00048.safetensors").unlink()


def empty_and_truncated(directory):
    shard = directory / "model-00012-of-00048.safetensors"
    shard.unlink()
    shard.write_bytes(b"\0" * 4)


def short(directory):
    shard = directory / "model-00012-of-00048.safetensors"
    edit_header(shard, lambda header: None)  # a copy of its own
    with shard.open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 4096)


def no_json(directory):
    shard = directory / "model-00012-of-00048.safetensors"
    shard.unlink()
    shard.write_bytes((16).to_bytes(8, "little") + b"no header at all")


def other_revision(directory):
    (directory / "model-00047-of-00047.safetensors").touch()


def mixed_shards(directory):
    old, new = "model-00048-of-00048.safetensors", "model-00046-of-00046.safetensors"
    (directory / old).rename(directory / new)

    def rename(index):
        places = index["weight_map"]
        index["weight_map"] = {k: new if v == old else v for k, v in places.items()}

    edit_json(directory / INDEX, rename)


def wrongly_indexed(directory):
    def move(index):
        index["weight_map"]["embed.weight"] = "model-00048-of-00048.safetensors"

    edit_json(directory / INDEX, move)


def not_indexed(directory):
    edit_json(directory / INDEX, lambda index: index["weight_map"].pop("norm.weight"))


def renamed(directory):
    def rename(header):
        header["model.norm.weight"] = header.pop("norm.weight")

    edit_header(shard_of(directory, "norm.weight"), rename)

    def follow(index):
        index["weight_map"]["model.norm.weight"] = index["weight_map"].pop("norm.weight")

    edit_json(directory / INDEX, follow)


def other_experts(directory):
    def fewer(config):
        config["text_config"]["n_routed_experts"] = 7

    edit_json(directory / "config.json", fewer)


PLANTED = {
    "shard missing": (missing_shard, "names model-00048-of-00048.safetensors, which is missing"),
    "shard cut short": (short, "model-00012-of-00048.safetensors is truncated: its header"),
    "shard nearly empty": (empty_and_truncated, "is truncated: 4 bytes are too few"),
    "no header": (no_json, "model-00012-of-00048.safetensors has a bad header"),
    "left over from another revision": (other_revision, "belongs to another revision"),
    "shards of two revisions": (mixed_shards, "shards of two revisions are mixed"),
    "index points elsewhere": (
        wrongly_indexed,
        "places embed.weight in model-00048-of-00048.safetensors, which does not hold it",
    ),
    "index forgets": (not_indexed, "holds norm.weight, which model.safetensors.index.json does"),
    "tensor renamed": (renamed, "norm.weight is missing; expected BF16 [5120]"),
    "wrong dtype": (
        in_header("layers.8.attn.wkv.weight", dtype="I8"),
        "layers.8.attn.wkv.weight is I8 [512, 5120]; expected F8_E4M3 [512, 5120]",
    ),
    "transposed": (
        in_header("layers.39.ffn.experts.7.w2.weight", shape=[1152, 5120]),
        "layers.39.ffn.experts.7.w2.weight is I8 [1152, 5120]; expected I8 [5120, 1152]",
    ),
    "overlap": (
        in_header("layers.3.attn.kv_norm.weight", data_offsets=[0, 1024]),
        "overlap those of",
    ),
    "another expert count": (
        other_experts,
        "layers.0.ffn.gate.weight is BF16 [8, 5120]; expected BF16 [7, 5120]",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_named(copy, capsys, fault):
    plant, message = PLANTED[fault]
    plant(copy)
    status, facts = inspect(capsys, copy)
    assert status == 1 and not facts["complete"]
    assert any(message in found for found in facts["faults"]), facts["faults"][:5]


def test_tensors_of_a_missing_shard_are_not_named_one_by_one(copy, capsys):
    missing_shard(copy)
    _, facts = inspect(capsys, copy)
    assert len(facts["faults"]) == 1


def test_another_model_is_called_that(tmp_path, capsys):
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny_a", directory)
    for shard in directory.glob("model-*.safetensors"):
        edit_header(
            shard,
            lambda header: [
                header.__setitem__(f"model.{name}", header.pop(name))
                for name in list(header)
                if not name.startswith("__")
            ],
        )

    def rename(index):
        index["weight_map"] = {f"model.{k}": v for k, v in index["weight_map"].items()}

    edit_json(directory / INDEX, rename)
    status, facts = inspect(capsys, directory)
    [fault] = facts["faults"]
    assert status == 1 and fault.startswith("it holds another model: only 0 of its")


def test_released_configuration_can_be_named(capsys):
    status, facts = inspect(capsys, GOLDEN / "tiny_a", "--config", "released")
    assert status == 1 and facts["faults"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "has no config.json"),
        (["config.json"], "it has neither model.safetensors.index.json nor model.safetensors"),
    ],
)
def test_no_checkpoint_directory_is_refused(tmp_path, capsys, content, message):
    for name in content:
        shutil.copy(GOLDEN / "tiny_a" / name, tmp_path)
    assert main(["inspect", str(tmp_path)]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["look", "x"],
        ["inspect"],
        ["make-synthetic", "x", "--layers", "two"],
        ["make-synthetic", "x", "--experts", "0"],
    ],
)
def test_wrong_usage_exits_with_two(options):
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2


SMALL = ("--like", str(GOLDEN / "tiny_a"), "--vocab-size", "900")


def test_made_directory_is_complete_and_loads(tmp_path, capsys):
    from dsv41_jax import load

    directory = tmp_path / "made"
    options = ("--layers", "4", "--experts", "3", "--engram-rows", "2000", "--sparse-engram")
    assert main(["make-synthetic", str(directory), *SMALL, *options]) == 0
    status, facts = inspect(capsys, directory)
    assert (status, facts["shards"]) == (0, 3)
    config = load_config(directory)
    assert (config.num_hidden_layers, config.n_routed_experts) == (4, 3)
    assert 2000 <= config.engram.num_embeddings[0] < 4000
    model = load(directory, progress=False)
    assert model.engram.layer_ids == config.engram.layer_ids
    assert main(["make-synthetic", str(directory), *SMALL]) == 3
    assert "it holds a checkpoint already" in capsys.readouterr().err


def test_small_vocabulary_is_refused(tmp_path, capsys):
    status = main(["make-synthetic", str(tmp_path), "--like", str(GOLDEN / "tiny_a")])
    assert status == 3
    assert "the tokenizer that is written has 832 tokens" in capsys.readouterr().err


def test_picked_layers_have_every_kind():
    config = load_config("released")
    kept = keep_layers(config, pick_layers(config, 5))
    specs = layer_plan(kept)
    assert {spec.mode for spec in specs} == set(AttentionMode)
    assert {spec.ratio for spec in specs} == {0, 1, 2}
    assert any(spec.engram is not None for spec in specs)
    assert keep_layers(config, range(40)) == config
    assert {s.ratio for s in layer_plan(keep_layers(config, pick_layers(config, 3)))} >= {1, 2}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([3, 4], "layer 0 .* has no KV source at or before it"),
        ([2, 1], "must be ascending layers of the model"),
        ([2, 40], "must be ascending layers of the model, from 0 to 39"),
    ],
)
def test_layers_that_make_no_model_are_refused(layers, message):
    with pytest.raises(ConfigError, match=message):
        keep_layers(load_config("released"), layers)
