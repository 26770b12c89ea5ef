"""`python -m sharding.verify`: exit statuses, and vectors that a pipeline meets or misses."""

import json
import shutil

import numpy as np
import pytest

from dsv41_jax.checkpoint import reader
from dsv41_jax.verify.measure import uncompared
from sharding import verify
from sharding.verify import main

LEGAL = ["--pipeline-stages", "1,2,3"]


def test_a_pipeline_meets_the_vectors_of_one_program(tiny, whole, token_ids, tmp_path, capsys):
    directory = shutil.copytree(tiny, tmp_path / "model")
    arrays = {
        "input_ids": token_ids,
        "prefill_len": np.int64(len(token_ids) - 2),
        "prefill.logits_all": whole[:-2],
        "decode.logits": whole[-2:],
    }
    np.savez(directory / "golden_short.npz", **arrays)
    one_part = ["--pipeline-microbatches", "1"]
    assert main([str(directory), *LEGAL, *one_part, "--only", "short", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["phase"] for line in lines] == ["prefill", "decode"]
    assert all(line["equal"] == 1 for line in lines)


def test_a_measure_out_of_tolerance_ends_with_status_1(tiny, monkeypatch):
    missed = [uncompared("short", "logits", "nothing was recorded")]
    monkeypatch.setattr(verify, "_measures", lambda *arguments: missed)
    assert main([str(tiny), *LEGAL, "--only", "short"]) == 1


def test_a_refused_partition_ends_with_status_3_before_weights(tiny, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise AssertionError("a weight file was opened")

    monkeypatch.setattr(reader.Checkpoint, "open", refuse)
    assert main([str(tiny), "--pipeline-stages", "2,4"]) == 3
    assert "kv of layer 1 (stage 0) is read by layer 2 (stage 1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda directory: None, "has no golden_"),
        (lambda directory: (directory / "config.json").unlink(), "config.json"),
    ],
)
def test_a_directory_without_vectors_or_model_ends_with_status_3(
    tiny, tmp_path, capsys, change, message
):
    directory = shutil.copytree(tiny, tmp_path / "model")
    change(directory)
    assert main([str(directory), *LEGAL]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--only", "nothing"], ["--pipeline-stages", "a"], ["--what"]]
)
def test_wrong_usage_ends_with_status_2(tiny, arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(tiny), *arguments])
    assert ended.value.code == 2


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ["--pipeline-parallel-size", "2"],
        ["--pipeline-parallel-size", "3", "--pipeline-relay", "--pipeline-microbatches", "4"],
        ["--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"],
        ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
    ],
    ids=" ".join,
)
def test_the_recorded_vectors_hold_through_a_pipeline(golden, arguments):
    assert main([str(golden), *arguments, "--json"]) == 0
