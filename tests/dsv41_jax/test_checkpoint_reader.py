"""Safetensors directories: what is read, and what each fault is called."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from dsv41_jax.checkpoint import Checkpoint, CheckpointError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shard(path, header, data):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def directory(tmp_path):
    """Two shards: x float32[2, 2] and y uint8[3] in the first, z bfloat16[2] in the second."""
    write_shard(
        tmp_path / A,
        {"x": entry("F32", [2, 2], 0, 16), "y": entry("U8", [3], 16, 19)},
        np.arange(4, dtype=np.float32).tobytes() + b"\x05\x06\x07",
    )
    write_shard(
        tmp_path / B,
        {"__metadata__": {"format": "pt"}, "z": entry("BF16", [2], 0, 4)},
        np.array([1.5, -2.0], ml_dtypes.bfloat16).tobytes(),
    )
    write_index(tmp_path, {"x": A, "y": A, "z": B})
    return tmp_path


def faults(directory):
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(directory)
    assert str(directory) in str(error.value)
    return error.value.faults


def test_tensors_are_read_in_place(directory):
    checkpoint = Checkpoint.open(directory)
    assert list(checkpoint.tensors) == ["x", "y", "z"]
    np.testing.assert_array_equal(checkpoint.read("x"), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(checkpoint.read("y"), [5, 6, 7])
    z = checkpoint.read("z")
    assert z.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(z.astype(np.float32), [1.5, -2.0])
    assert checkpoint.read_bytes("x").shape == (2, 8)
    assert not z.flags.writeable and not z.flags.owndata


def test_a_single_file_needs_no_index(tmp_path):
    header = {"x": entry("U8", [2], 0, 2), "empty": entry("F32", [0, 4], 2, 2)}
    write_shard(tmp_path / "model.safetensors", header, b"\1\2")
    checkpoint = Checkpoint.open(tmp_path)
    np.testing.assert_array_equal(checkpoint.read("x"), [1, 2])
    assert checkpoint.read("empty").shape == (0, 4)


def test_every_tensor_of_the_vectors_is_found():
    assert len(Checkpoint.open(GOLDEN / "tiny_a").tensors) == 722
    assert len(Checkpoint.open(GOLDEN / "tiny_b").tensors) == 804


def break_missing_shard(d):
    (d / B).unlink()
    return f"{INDEX} names {B}, which is missing"


def break_truncated_data(d):
    data = (d / A).read_bytes()
    (d / A).write_bytes(data[:-2])
    return (
        f"{A} is truncated: its header describes {len(data)} bytes (up to y), "
        f"the file has {len(data) - 2}"
    )


def break_truncated_header(d):
    data = (d / A).read_bytes()
    length = int.from_bytes(data[:8], "little")
    (d / A).write_bytes(data[:40])
    return (
        f"{A} gives a header length of {length} bytes but has only 32 after it; "
        "it is truncated or no safetensors file"
    )


def break_empty_file(d):
    (d / A).write_bytes(b"")
    return f"{A} is truncated: 0 bytes are too few for a safetensors file"


def break_other_format(d):
    (d / A).write_bytes(b"PK\3\4" + b"\0" * 4 + b"\1" * 60)
    return (
        f"{A} gives a header length of 67324752 bytes but has only 60 after it; "
        "it is truncated or no safetensors file"
    )


def break_header_json(d):
    write_shard(d / A, b'{"x": ', b"")
    return f"{A} has a bad header: Expecting value: line 1 column 7 (char 6)"


def break_header_utf8(d):
    write_shard(d / A, b"\xff{}", b"")
    return (
        f"{A} has a bad header: 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte"
    )


def break_header_list(d):
    write_shard(d / A, b"[1]", b"")
    return f"{A} has a bad header: it is not a JSON object"


def break_header_repeats(d):
    x = json.dumps(entry("U8", [1], 0, 1))
    write_shard(d / A, f'{{"x": {x}, "x": {x}}}'.encode(), b"\0")
    return f"{A} has a bad header: it names x twice"


def break_entry(d):
    write_shard(d / A, {"x": {"dtype": "U8", "shape": [1]}}, b"\0")
    return f"{A}: x has a header entry without dtype, shape and data_offsets"


def break_dtype(d):
    write_shard(d / A, {"x": entry("F4", [2], 0, 1)}, b"\0")
    return f"{A}: x has the unknown dtype 'F4'; known are F8_E4M3, F8_E5M2, F8_E8M0, BF16, F16,"


def break_shape(d):
    write_shard(d / A, {"x": entry("U8", [-1], 0, 1)}, b"\0")
    return f"{A}: x has the shape [-1], which is no list of sizes"


def break_offsets(d):
    write_shard(d / A, {"x": entry("U8", [1], 0.5, 1)}, b"\0")
    return f"{A}: x has data_offsets [0.5, 1], which is no pair of byte offsets"


def break_size(d):
    write_shard(d / A, {"x": entry("BF16", [3], 0, 4)}, b"\0" * 4)
    return f"{A}: x spans bytes 0 to 4, but BF16 [3] takes 6 bytes"


def break_reversed_offsets(d):
    write_shard(d / A, {"x": entry("U8", [1], 2, 1)}, b"\0\0")
    return f"{A}: x spans bytes 2 to 1, but U8 [1] takes 1 bytes"


def break_overlap(d):
    write_shard(d / A, {"x": entry("U8", [3], 0, 3), "y": entry("U8", [3], 2, 5)}, b"\0" * 5)
    return f"{A}: the bytes of y overlap those of x"


def break_hole(d):
    write_shard(d / A, {"x": entry("U8", [3], 0, 3), "y": entry("U8", [3], 5, 8)}, b"\0" * 8)
    return f"{A}: 2 bytes between x and y belong to no tensor"


def break_out_of_range(d):
    header = {"x": entry("U8", [3], 0, 3), "y": entry("U8", [1 << 20], 3, 3 + (1 << 20))}
    write_shard(d / A, header, b"\0" * 8)
    size = (d / A).stat().st_size
    return (
        f"{A} is truncated: its header describes {size - 5 + (1 << 20)} bytes (up to y), "
        f"the file has {size}"
    )


def break_trailing(d):
    (d / A).write_bytes((d / A).read_bytes() + b"\0" * 7)
    return f"{A} has 7 bytes after its last tensor, y"


def break_not_in_shard(d):
    write_index(d, {"x": A, "y": A, "z": B, "w": B})
    return f"{INDEX} places w in {B}, which does not hold it"


def break_not_in_index(d):
    write_index(d, {"x": A, "z": B})
    return f"{A} holds y, which {INDEX} does not name"


def break_duplicate(d):
    header = {"z": entry("BF16", [2], 0, 4), "y": entry("U8", [3], 4, 7)}
    write_shard(d / B, header, b"\0" * 7)
    return f"y is in two shards, {A} and {B}"


def break_index_json(d):
    (d / INDEX).write_text("{")
    return f"{INDEX} is no valid JSON: Expecting property name enclosed in double quotes"


def break_index_map(d):
    (d / INDEX).write_text('{"metadata": {}}')
    return f'{INDEX} has no "weight_map" of tensor names to shard files'


def break_index_path(d):
    write_index(d, {"x": "../other.safetensors"})
    return f"{INDEX} places x in '../other.safetensors'; expected a file name in the directory"


def break_index_repeats(d):
    (d / INDEX).write_text(f'{{"weight_map": {{"x": "{A}", "x": "{B}"}}}}')
    return f"{INDEX} is no valid JSON: it names x twice"


def break_index_gone(d):
    (d / INDEX).unlink()
    return f"it has 2 shards but no {INDEX} that says what is in them"


def break_everything_gone(d):
    for path in d.iterdir():
        path.unlink()
    return f"it is no checkpoint directory: it has neither {INDEX} nor model.safetensors"


def break_mixed_revision(d):
    other = "model-00001-of-00003.safetensors"
    (d / other).write_bytes((d / A).read_bytes())
    return f"{other} is not named by {INDEX}; it belongs to another revision"


BREAKS = [value for name, value in list(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__.removeprefix("break_"))
def test_fault_is_named(directory, break_it):
    expected = break_it(directory)
    (found,) = faults(directory)
    assert found.startswith(expected)


def test_missing_directory_is_named(tmp_path):
    assert faults(tmp_path / "none") == ("it does not exist; expected a checkpoint directory",)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    assert faults(tmp_path / "file") == ("it is no directory; expected a checkpoint directory",)


def test_all_faults_are_counted_and_the_first_shown(directory):
    header = {f"t{i}": entry("F4", [2], i, i + 1) for i in range(7)}
    write_shard(directory / A, header, b"\0" * 7)
    (directory / B).unlink()
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(directory)
    message = str(error.value)
    assert len(error.value.faults) == 8
    assert message.startswith(f"{directory}: 8 faults: {A}: t0 has the unknown dtype 'F4'")
    assert message.endswith("; and 3 more") and "t5" not in message
