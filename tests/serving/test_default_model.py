"""The default model: made once, complete, and fit for a chat."""

import hashlib
import multiprocessing
import os
import pathlib

import pytest

from dsv41_jax.checkpoint import load_params
from dsv41_jax.checkpoint.tiny_tokenizer import tiny_tokenizer
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.hf_config import load_config
from dsv41_jax.layer_plan import AttentionMode, layer_plan
from serving.chat.released_tokenizer import released_tokenizer_text
from serving.default_model import VERSION, default_config, default_model
from serving.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return default_model(tmp_path_factory.mktemp("cache"))


def digest(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def test_it_loads_like_any_checkpoint(directory):
    config = load_config(directory)
    assert config == default_config()
    assert config.max_position_embeddings >= 4096
    load_params(directory, config, progress=False)
    assert EngramTables.open(directory, config).layer_ids == config.engram.layer_ids


def test_it_has_every_kind_of_layer():
    plan = layer_plan(default_config())
    assert {spec.mode for spec in plan} == set(AttentionMode)
    assert {(spec.mode, spec.ratio) for spec in plan} >= {
        (AttentionMode.FULL, 2),
        (AttentionMode.REUSE, 2),
        (AttentionMode.FULL, 1),
        (AttentionMode.REUSE, 1),
        (AttentionMode.REINDEX, 1),
    }
    assert any(spec.candidate_source is not None for spec in plan)
    assert any(spec.engram is not None for spec in plan)


def test_it_is_the_same_everywhere_and_made_once(directory, tmp_path):
    again = default_model(tmp_path)
    assert digest(again) == digest(directory)
    before = {path: path.stat().st_mtime_ns for path in again.iterdir()}
    assert default_model(tmp_path) == again
    assert {path: path.stat().st_mtime_ns for path in again.iterdir()} == before
    assert again.name.endswith(str(VERSION))


def test_the_cache_directory_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_model().parent == tmp_path / "dsv41-jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_model().parent == tmp_path / "home" / ".cache" / "dsv41-jax"


def test_processes_that_race_all_find_it(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(default_model, [tmp_path] * 3)
    assert len(set(found)) == 1
    assert os.listdir(tmp_path) == [found[0].name]
    assert load_config(found[0]) == default_config()


def test_template_tokens_have_the_released_flags():
    released = Tokenizer(released_tokenizer_text()).backend
    wanted = {
        token.content: (token.special, token.normalized)
        for token in released.get_added_tokens_decoder().values()
    }
    ours = {
        token.content: (token.special, token.normalized)
        for token in tiny_tokenizer().get_added_tokens_decoder().values()
    }
    named = {content: flags for content, flags in ours.items() if "place▁holder" not in content}
    assert {content: wanted[content] for content in named} == named
    for content in ("｜DSML｜", "<｜User｜>", "<think>", "<｜read_url｜>", "<｜/polygon｜>"):
        assert content in named


def test_the_tokenizer_gives_any_text_back(directory):
    tokenizer = Tokenizer.open(directory)
    text = 'Hello, wörld! 漢字 🙂\n\n  <think>x</think><｜User｜>\t{"a": [1, 2]}'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert sorted(tiny_tokenizer().get_vocab().values()) == list(range(tokenizer.vocab_size))
    assert tokenizer.vocab_size == load_config(pathlib.Path(directory)).vocab_size
    user = tokenizer.backend.token_to_id("<｜User｜>")
    assert user in tokenizer.encode("<｜User｜>hi")
