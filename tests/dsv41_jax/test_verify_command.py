"""`python -m dsv41_jax.verify`: what it prints and how it ends."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from dsv41_jax.verify.__main__ import main

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "tiny_a"


def copy(tmp_path, *names):
    for name in ("config.json", "tokenizer.json", *names):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


def rewrite(path, change):
    arrays = dict(np.load(path))
    change(arrays)
    np.savez(path, **arrays)


def test_case_within_its_tolerances_ends_with_zero(capsys):
    assert main([str(TINY), "--only", "engram"]) == 0
    out = capsys.readouterr().out
    assert "engram hash.ids" in out
    assert "NO" not in out


def test_json_prints_an_object_per_line(capsys):
    assert main([str(TINY), "--only", "engram", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["quantity"] for line in lines} >= {"token_map", "primes", "hash.ids"}
    assert all(line["ok"] and line["equal"] == 1 and line["mean_rel"] is None for line in lines)


def test_difference_ends_with_one(tmp_path, capsys):
    directory = copy(tmp_path, "golden_engram.npz")

    def change(arrays):
        arrays["hash.ids"][0, 3] += 1

    rewrite(directory / "golden_engram.npz", change)
    assert main([str(directory)]) == 1
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.endswith("NO")] == ["hash.ids"]


@pytest.mark.parametrize("case", ["image", "draft"])
def test_case_that_cannot_run_yet_is_listed_and_falls_short(case, capsys):
    assert main([str(TINY), "--only", f"engram,{case}"]) == 1
    assert f"{case} case" in capsys.readouterr().out


def test_file_without_anything_to_compare_falls_short(tmp_path, capsys):
    directory = copy(tmp_path, "golden_engram.npz")
    rewrite(directory / "golden_engram.npz", lambda arrays: arrays.clear())
    assert main([str(directory), "--only", "engram"]) == 1
    assert "nothing to compare" in capsys.readouterr().out


def test_real_engram_takes_its_own_directory(capsys):
    assert main([str(GOLDEN), "--only", "real_engram"]) == 0
    assert "real_engram num_embeddings" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "layer"], "no such case: layer; cases are ops, engram"),
        (["--only", ","], "no case named"),
        (["--tier", "tight"], "invalid choice: 'tight'"),
        (["--implementation", "cuda"], "invalid choice: 'cuda'"),
    ],
)
def test_wrong_usage_ends_with_two(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main([str(TINY), *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels run on it")
def test_compiled_kernels_need_a_gpu(capsys):
    assert main([str(TINY), "--implementation", "pallas"]) == 3
    assert "use pallas_interpret to run the kernels here" in capsys.readouterr().err


def test_implementation_that_does_not_exist_is_wrong_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(TINY), "--implementation", "triton"])
    assert "invalid choice: 'triton'" in capsys.readouterr().err


def test_directory_that_is_none_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "absent")]) == 3
    assert "absent is not a directory" in capsys.readouterr().err


def test_directory_without_vectors_is_refused(tmp_path, capsys):
    assert main([str(copy(tmp_path))]) == 3
    assert "has no golden_*.npz" in capsys.readouterr().err


def test_missing_file_of_a_case_is_named(tmp_path, capsys):
    assert main([str(copy(tmp_path, "golden_engram.npz")), "--only", "engram,text"]) == 3
    assert "has no golden_text.npz" in capsys.readouterr().err


def test_missing_recorded_engram_is_named(tmp_path, capsys):
    assert main([str(tmp_path), "--only", "real_engram"]) == 3
    assert "has no real_engram.npz" in capsys.readouterr().err


def test_file_that_is_no_npz_is_named(tmp_path, capsys):
    directory = copy(tmp_path)
    (directory / "golden_engram.npz").write_text("not an archive")
    assert main([str(directory)]) == 3
    assert "golden_engram.npz cannot be read as npz" in capsys.readouterr().err


def test_missing_array_is_named_with_its_file(tmp_path, capsys):
    directory = copy(tmp_path, "golden_engram.npz")
    rewrite(directory / "golden_engram.npz", lambda arrays: arrays.pop("hash.input_ids"))
    assert main([str(directory)]) == 3
    assert "golden_engram.npz has no array hash.input_ids" in capsys.readouterr().err


def test_id_outside_the_vocabulary_is_named(tmp_path, capsys):
    directory = copy(tmp_path, "golden_engram.npz")

    def change(arrays):
        arrays["hash.input_ids"][0, 0] = 512

    rewrite(directory / "golden_engram.npz", change)
    assert main([str(directory)]) == 3
    assert "hash.input_ids holds id 512; the vocabulary is 0..511" in capsys.readouterr().err


def test_broken_configuration_is_refused(tmp_path, capsys):
    directory = copy(tmp_path, "golden_engram.npz")
    (directory / "config.json").write_text("{}")
    assert main([str(directory)]) == 3
    assert "config.json: " in capsys.readouterr().err


def test_missing_checkpoint_is_refused(tmp_path, capsys):
    directory = copy(tmp_path, "golden_layers.npz")
    assert main([str(directory)]) == 3
    assert "model.safetensors.index.json" in capsys.readouterr().err


def test_misshapen_array_is_named(tmp_path, capsys):
    directory = copy(tmp_path, "golden_engram.npz")

    def change(arrays):
        arrays["primes"] = arrays["primes"][:, :2]

    rewrite(directory / "golden_engram.npz", change)
    assert main([str(directory)]) == 3
    assert "primes is recorded with shape" in capsys.readouterr().err


@pytest.mark.parametrize("length", [0, 47])
def test_prompt_length_outside_the_ids_is_named(length, tmp_path, capsys):
    directory = copy(tmp_path)
    for file in TINY.glob("model*"):
        shutil.copy(file, directory / file.name)
    ids = np.arange(46)
    np.savez(directory / "golden_layers.npz", input_ids=ids, prefill_len=length)
    assert main([str(directory)]) == 3
    assert f"prefill_len is {length}; there are 46 input_ids" in capsys.readouterr().err
