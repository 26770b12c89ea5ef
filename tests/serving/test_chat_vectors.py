"""The published chat encoding: every vector, its ids fed whole and in chunks."""

import json
import pathlib

import pytest

from serving.chat.__main__ import main
from serving.chat.released_tokenizer import released_tokenizer_text
from serving.chat.verify import check_encoding, check_parsing, check_tokenizer
from serving.tokenizer import Tokenizer

DIRECTORY = pathlib.Path(__file__).parents[1] / "golden" / "chat"


def vectors(name):
    entries = json.loads((DIRECTORY / name).read_text(encoding="utf-8"))
    return [pytest.param(entry, id=entry["id"]) for entry in entries]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(released_tokenizer_text())


@pytest.mark.parametrize("vector", vectors("encode.json"))
def test_a_request_becomes_the_published_prompt_and_ids(tokenizer, vector):
    assert check_encoding(tokenizer, vector) == []


@pytest.mark.parametrize("vector", vectors("parse.json"))
def test_an_output_becomes_the_published_message_however_it_is_cut(tokenizer, vector):
    assert check_parsing(tokenizer, vector) == []


@pytest.mark.parametrize("vector", vectors("tokenizer.json"))
def test_texts_and_ids_agree(tokenizer, vector):
    assert check_tokenizer(tokenizer, vector) == []


def test_the_command_passes_the_published_vectors(capsys):
    assert main(["verify", str(DIRECTORY)]) == 0
    assert "encode.json: 38 of 38 pass" in capsys.readouterr().out


def test_the_command_says_what_differs_and_fails(tmp_path, capsys):
    for name in ("encode.json", "parse.json", "tokenizer.json"):
        entries = json.loads((DIRECTORY / name).read_text(encoding="utf-8"))[:1]
        if name == "encode.json":
            entries[0]["prompt"] += "x"
        if name == "parse.json":
            entries[0]["expected"]["content"] = "other"
        (tmp_path / name).write_text(json.dumps(entries), encoding="utf-8")
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "encode.json enc-001: prompt differs from position" in out
    assert "parse.json parse-001: content, fed in chunks of 1, differs" in out
    assert "tokenizer.json: 1 of 1 pass" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "encode.json cannot be read"),
        ("{", "encode.json is not JSON"),
        ("[]", "must hold a list of at least one vector"),
        ("[{}]", "entry 0 is not a vector"),
        ("[3]", "entry 0 is not a vector"),
    ],
)
def test_the_command_refuses_a_directory_that_holds_no_vectors(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "encode.json").write_text(content)
    assert main(["verify", str(tmp_path)]) == 3
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err


def test_the_command_takes_another_tokenizer(tmp_path, capsys):
    assert main(["verify", str(DIRECTORY), "--tokenizer", str(tmp_path)]) == 3
    assert "tokenizer.json cannot be read" in capsys.readouterr().err
