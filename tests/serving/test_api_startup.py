"""What stops the server from starting: one line, status 2 for usage and 3 for the rest."""

import json
import pathlib
import shutil

import pytest

from serving.config import parse_options
from serving.main import main

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_a"


@pytest.fixture
def model(tmp_path):
    """A copy of a small checkpoint to break."""
    target = tmp_path / "model"
    target.mkdir()
    for file in TINY.iterdir():
        if not file.name.startswith("golden_"):
            shutil.copy(file, target / file.name)
            (target / file.name).chmod(0o644)
    return target


def refuse(capsys, *arguments, status=3):
    """The one line a refused start prints."""
    assert main(["--port", "0", *map(str, arguments)]) == status
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("serving.main: ")]
    assert len(lines) == 1 and "Traceback" not in error
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "argument --port: '70000' is not a whole number from 0 to 65535"),
        (["--port", "http"], "argument --port: 'http' is not a whole number"),
        (["--max-model-len", "1"], "'1' is not a whole number at least 2"),
        (["--max-num-seqs", "0"], "'0' is not a whole number at least 1"),
        (["--max-num-batched-tokens", "-4"], "is not a whole number at least 1"),
        (["--max-num-seqs", "32", "--max-num-batched-tokens", "16"], "16 is below --max-num-seqs"),
        (["--kv-cache-memory-bytes", "lots"], "'lots' is not a size; give bytes"),
        (["--kv-cache-memory-bytes", "0"], "'0' is not a size"),
        (["--api-key", ""], "argument --api-key: it must not be empty"),
        (["--shutdown-timeout", "-1"], "'-1' is not a number of seconds"),
        (["--what"], "unrecognized arguments: --what"),
        (["--max-model"], "unrecognized arguments: --max-model"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error and error.count("\n") == 1


def test_sizes_take_units():
    options = parse_options(["--kv-cache-memory-bytes", "1.5G", "--max-body-bytes", "10K"])
    assert options.engine.kv_cache_memory_bytes == 3 * 2**29
    assert options.server.max_body_bytes == 10 * 1024


def test_a_missing_directory_is_named(capsys, tmp_path):
    line = refuse(capsys, "--model", tmp_path / "none")
    assert line.endswith("none does not exist; give the directory of a checkpoint")


def test_a_file_is_not_a_model(capsys, tmp_path):
    (tmp_path / "x").write_text("")
    assert "is not a directory" in refuse(capsys, "--model", tmp_path / "x")


def test_the_released_configuration_has_no_weights(capsys):
    assert "without weights" in refuse(capsys, "--model", "released")


def test_a_directory_without_a_configuration_is_refused(capsys, tmp_path):
    assert "has no config.json" in refuse(capsys, "--model", tmp_path)


def test_a_bad_configuration_names_the_key(capsys, model):
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["hidden_size"] = "wide"
    (model / "config.json").write_text(json.dumps(config))
    assert "hidden_size" in refuse(capsys, "--model", model)


def test_a_missing_tokenizer_is_named(capsys, model):
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json cannot be read" in refuse(capsys, "--model", model)


def test_a_truncated_shard_is_named(capsys, model):
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert shard.name in refuse(capsys, "--model", model)


def test_a_context_beyond_the_models_is_refused(capsys, model):
    line = refuse(capsys, "--model", model, "--max-model-len", 10**9)
    assert "max_model_len 1000000000 is above the model's max_position_embeddings" in line


def test_too_little_cache_memory_is_refused(capsys, model):
    line = refuse(capsys, "--model", model, "--kv-cache-memory-bytes", 1000, status=4)
    assert "kv_cache_memory_bytes 1000 is too small" in line


def test_a_device_that_runs_out_of_memory_is_said_in_one_line(capsys, model):
    sizes = ["--max-num-seqs", 8 * 10**7, "--max-num-batched-tokens", 8 * 10**7]
    line = refuse(capsys, "--model", model, *sizes, status=4)
    assert "the device ran out of memory" in line and "lower --max-num-seqs" in line


def test_an_unknown_host_is_refused(capsys):
    line = refuse(capsys, "--host", "no.such.host.invalid")
    assert "cannot listen on no.such.host.invalid:0" in line


def test_draft_and_vision_tensors_are_said_to_be_left_alone(capsys, model):
    arguments = ["--port", "0", "--model", str(model), "--kv-cache-memory-bytes", "1000"]
    assert main(arguments) == 4
    out = capsys.readouterr().out
    assert "115 draft tensors (0.5 MB), which are left alone" in out
    assert "26 vision tensors (0.2 MB), which are left alone" in out


def test_caching_and_replay_are_options():
    assert parse_options([]).engine.prefix_cache and not parse_options([]).engine.decoder_replay
    given = parse_options(["--no-enable-prefix-caching", "--decoder-replay"]).engine
    assert given.decoder_replay and not given.prefix_cache and not given.prefix_replay
    assert parse_options(["--prefix-replay"]).engine.prefix_replay
