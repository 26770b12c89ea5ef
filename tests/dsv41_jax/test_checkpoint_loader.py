"""Loading parameters: every byte in its place, stages, nothing partial, bounded memory."""

import dataclasses
import json
import math
import pathlib
import shutil
import subprocess
import sys
import types

import chex
import flax.linen as nn
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.checkpoint import (
    Checkpoint,
    CheckpointError,
    abstract_params,
    component_sizes,
    expected_tensors,
    load_params,
    open_checkpoint,
    parameter_path,
)
from dsv41_jax.checkpoint.synthetic import make_checkpoint
from dsv41_jax.hf_config import load_config
from dsv41_jax.model import Stage

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = ["tiny_a", "tiny_b"]


def leaf(params, keys):
    for key in keys:
        params = params[key]
    return params


def flat(params):
    return {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_holds_the_stored_bytes(name):
    directory = GOLDEN / name
    config = load_config(directory)
    params = flat(load_params(directory, config, progress=False))
    checkpoint = Checkpoint.open(directory)
    seen = set()
    for tensor, spec in expected_tensors(config).items():
        if not spec.in_params:
            continue
        path = parameter_path(tensor)
        array = np.asarray(params[path.keys])
        array = array if path.expert is None else array[path.expert]
        np.testing.assert_array_equal(array.view(np.uint8), checkpoint.read_bytes(tensor))
        seen.add(path.keys)
    assert seen == set(params)


def test_dtypes_are_what_the_model_takes():
    directory = GOLDEN / "tiny_b"
    params = load_params(directory, load_config(directory), progress=False)
    layer = params["layers_3"]
    chex.assert_shape(layer["ffn"]["experts"]["w1"]["weight"], (7, 64, 48))
    dtypes = {
        ("attn", "wo_a", "weight"): ml_dtypes.float8_e4m3fn,
        ("attn", "wo_a", "scale"): np.uint8,
        ("attn", "attn_sink"): np.float32,
        ("ffn", "experts", "w2", "weight"): np.uint8,
        ("ffn", "experts", "w2", "scale"): np.uint8,
        ("attn_norm", "weight"): ml_dtypes.bfloat16,
    }
    assert {keys: leaf(layer, keys).dtype for keys in dtypes} == dtypes


@pytest.mark.parametrize("name", TINY)
def test_abstract_tree_is_the_loaded_one(name):
    directory = GOLDEN / name
    config = load_config(directory)
    params = load_params(directory, config, progress=False)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, abstract_params(config))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("tiny_a", range(0, 9)),
        ("tiny_b", range(0, 8)),
        ("released", range(1, 3)),
        ("released", range(20, 21)),
        ("released", range(39, 40)),
    ],
)
def test_abstract_tree_is_the_models(name, layers):
    config = load_config(name if name == "released" else GOLDEN / name)
    model = nn.meta.unbox(jax.eval_shape(Stage(config, layers).init))
    chex.assert_trees_all_equal_shapes_and_dtypes(model, abstract_params(config, layers))


def test_released_abstract_tree_needs_no_file():
    params = abstract_params(load_config("released"))
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    experts = params["layers_39"]["ffn"]["experts"]["w1"]["weight"]
    assert experts.shape == (384, 2304, 2560)
    assert "embed" not in params["layers_1"]["engram"]
    assert nbytes < 300e9


def test_stages_together_are_the_whole_model():
    directory = GOLDEN / "tiny_a"
    config = load_config(directory)
    whole = load_params(directory, config, progress=False)
    stages = [
        load_params(directory, config, layers=layers, progress=False)
        for layers in (range(0, 4), range(4, 5), range(5, 9))
    ]
    assert "embed" in stages[0] and not {"norm", "head"} & stages[0].keys()
    assert list(stages[1]) == ["layers_4"]
    assert {"norm", "head"} <= stages[2].keys() and "embed" not in stages[2]
    chex.assert_trees_all_equal(stages[0] | stages[1] | stages[2], whole)


@pytest.mark.parametrize("layers", [range(3, 3), range(0, 10), range(-1, 4), range(0, 8, 2)])
def test_layers_outside_the_model_are_refused(layers):
    directory = GOLDEN / "tiny_a"
    with pytest.raises(
        ValueError, match=r"are no consecutive layers of a model with layers 0\.\.8"
    ):
        load_params(directory, load_config(directory), layers=layers, progress=False)


def test_draft_vision_and_tables_are_counted_and_left_alone():
    directory = GOLDEN / "tiny_a"
    config = load_config(directory)
    sizes = component_sizes(open_checkpoint(directory, config), config)
    assert sizes["draft"].tensors == 115
    assert sizes["vision"].tensors == 26
    assert sizes["engram"].tensors == 4
    assert sizes["engram"].nbytes == (660 + 864) * 33
    params = load_params(directory, config, progress=False)
    assert sum(x.nbytes for x in jax.tree.leaves(params)) == sum(
        sizes[part].nbytes for part in ("experts", "dense", "embedding", "other")
    )


def test_progress_goes_to_stderr(capsys):
    directory = GOLDEN / "tiny_a"
    load_params(directory, load_config(directory), layers=range(1))
    out, err = capsys.readouterr()
    assert out == "" and "Loading parameters: 100%" in err and "B/s" in err


@pytest.fixture
def copy(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny_a", directory)
    return directory


def refuse(directory, message):
    with pytest.raises(CheckpointError) as error:
        load_params(directory, load_config(directory), progress=False)
    assert message in str(error.value)


def edit_config(directory, key, value):
    config = json.loads((directory / "config.json").read_text())
    config["text_config"][key] = value
    (directory / "config.json").write_text(json.dumps(config))


def edit_header(shard, change):
    """Changes a shard's header without moving its data."""
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_truncated_shard_is_refused(copy):
    shard = copy / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refuse(copy, "model-00002-of-00002.safetensors is truncated")


def test_missing_shard_is_refused(copy):
    (copy / "model-00001-of-00002.safetensors").unlink()
    refuse(copy, "names model-00001-of-00002.safetensors, which is missing")


def test_other_expert_count_is_refused(copy):
    edit_config(copy, "n_routed_experts", 6)
    refuse(copy, "layers.0.ffn.experts.5.w1.weight is missing; expected I8 [64, 48]")


def test_fewer_experts_leave_tensors_over(copy):
    edit_config(copy, "n_routed_experts", 4)
    refuse(copy, "layers.0.ffn.gate.weight is BF16 [5, 96]; expected BF16 [4, 96]")


def test_other_hidden_size_is_refused(copy):
    edit_config(copy, "hidden_size", 128)
    refuse(copy, "embed.weight is BF16 [512, 96]; expected BF16 [512, 128]")


def test_transposed_tensor_is_refused(copy):
    def change(header):
        header["layers.0.attn.wq_b.weight"]["shape"].reverse()

    edit_header(copy / "model-00001-of-00002.safetensors", change)
    refuse(
        copy,
        "layers.0.attn.wq_b.weight is F8_E4M3 [64, 256]; expected F8_E4M3 [256, 64]",
    )


def test_renamed_tensor_is_missing_and_unexpected(copy):
    def change(header):
        header["model.norm.weight"] = header.pop("norm.weight")

    edit_header(copy / "model-00002-of-00002.safetensors", change)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"].pop("norm.weight")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        load_params(copy, load_config(copy), progress=False)
    assert error.value.faults == (
        "norm.weight is missing; expected BF16 [96]",
        "model.norm.weight (BF16 [96]) is unexpected; config.json describes none",
    )


def test_faults_outside_a_stage_are_refused_too(copy):
    def change(header):
        header["layers.8.attn.wkv.weight"]["dtype"] = "I8"

    edit_header(copy / "model-00002-of-00002.safetensors", change)
    with pytest.raises(CheckpointError, match=r"layers\.8\.attn\.wkv\.weight is I8 \[64, 96\]"):
        load_params(copy, load_config(copy), layers=range(2), progress=False)


MEASURE = """
import sys, threading, time
import jax, jax.numpy as jnp
from dsv41_jax.checkpoint import abstract_params, load_params
from dsv41_jax.hf_config import load_config
from dsv41_jax.model import Stage

def anonymous():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

config = load_config(sys.argv[1])
abstract_params(config)
jnp.zeros(8).block_until_ready()
before = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.0005)

watcher = threading.Thread(target=watch)
watcher.start()
params = load_params(sys.argv[1], config, progress=False)
done.set()
watcher.join()
after = anonymous()
print(peak - before, after - before, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


def test_peak_anonymous_memory_is_the_parameters_and_one_group(wide_checkpoint):
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(wide_checkpoint.directory)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    peak, resident, nbytes = map(int, run.stdout.split())
    config = wide_checkpoint.config
    group = math.prod(
        (config.n_routed_experts, config.hidden_size, config.moe_intermediate_size // 2)
    )
    assert nbytes > 150 << 20
    assert resident >= nbytes
    assert peak <= nbytes + group + (8 << 20)


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory):
    """Some hundred megabytes, most of them experts."""
    config = dataclasses.replace(
        load_config(GOLDEN / "tiny_b"),
        hidden_size=1024,
        moe_intermediate_size=512,
        n_routed_experts=24,
        engram=None,
        draft=None,
        vision=None,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
    )
    directory = tmp_path_factory.mktemp("wide")
    make_checkpoint(directory, config)
    return types.SimpleNamespace(directory=directory, config=config)


def placed(config, layers, tensor, *, expert_parallel=False):
    mesh = Mesh(
        np.array(jax.devices()[:tensor]).reshape(1, 1, tensor), ("data", "expert", "tensor")
    )
    experts = ("expert", "tensor")

    def sharding(path, leaf):
        keys = [key.key for key in path]
        spec = [None] * len(leaf.shape)
        if "experts" in keys and expert_parallel:
            spec[0] = experts
        elif "experts" in keys:
            spec[2 if keys[-2] == "w2" else 1] = "tensor"
        elif keys[-2:] in (["wo_b", "weight"], ["wo_b", "scale"]):
            spec[1] = "tensor"
        elif keys[-2:] == ["wq_b", "weight"] or keys[-1] == "attn_sink" or keys[0] == "embed":
            spec[0] = "tensor"
        if "experts" not in keys and any(
            axis and size % tensor for axis, size in zip(spec, leaf.shape, strict=True)
        ):
            spec = []
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, abstract_params(config, layers))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_devices_get_their_slices(expert_parallel):
    directory = GOLDEN / "tiny_a"
    config = load_config(directory)
    layers = range(0, 3)
    shardings = placed(config, layers, 2, expert_parallel=expert_parallel)
    params = load_params(directory, config, layers=layers, shardings=shardings, progress=False)
    whole = load_params(directory, config, layers=layers, progress=False)
    abstract = abstract_params(config, layers, shardings)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, abstract)
    experts = 6 if expert_parallel else 5
    assert params["layers_0"]["ffn"]["experts"]["w1"]["weight"].shape[0] == experts
    for path, array in flat(params).items():
        assert array.sharding == leaf(shardings, path)
        wanted = np.asarray(leaf(whole, path))
        wanted = np.pad(wanted, [(0, len(array) - len(wanted))] + [(0, 0)] * (wanted.ndim - 1))
        np.testing.assert_array_equal(np.asarray(array).view(np.uint8), wanted.view(np.uint8))
    part = params["layers_1"]["attn"]["wo_b"]["weight"].addressable_shards[1]
    assert part.data.shape == (96, config.o_groups * config.o_lora_rank // 2)


def test_more_devices_than_experts_leave_some_with_padding():
    directory = GOLDEN / "tiny_a"
    config = load_config(directory)
    shardings = placed(config, range(1), 8, expert_parallel=True)
    experts = load_params(directory, config, layers=range(1), shardings=shardings, progress=False)[
        "layers_0"
    ]["ffn"]["experts"]["w2"]["scale"]
    assert experts.shape[0] == 8
    assert not np.asarray(experts)[5:].any() and np.asarray(experts)[:5].any()


def test_progress_counts_what_is_read(capsys):
    directory = GOLDEN / "tiny_a"
    config = load_config(directory)
    shardings = placed(config, range(1), 2, expert_parallel=True)
    load_params(directory, config, layers=range(1), shardings=shardings)
    assert "Loading parameters: 100%" in capsys.readouterr().err
