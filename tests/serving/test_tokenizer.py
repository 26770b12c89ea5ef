import json

import fake_engine
import pytest

from serving.tokenizer import Tokenizer, TokenizerError, tokenizer_info


@pytest.fixture(scope="module")
def tokenizer():
    return fake_engine.make_tokenizer()


@pytest.mark.parametrize("text", ["", "Hello, world!\n", "杭州 🐸 é", "\x00\t"])
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text


def test_plain_encoding_knows_no_added_tokens(tokenizer):
    spelled = "<｜User｜>"
    assert tokenizer.encode(spelled) == [tokenizer.token_id(spelled)]
    plain = tokenizer.encode_plain(spelled)
    assert len(plain) > 1 and tokenizer.decode(plain) == spelled


def test_no_bos_is_added(tokenizer):
    assert tokenizer.token_id("<｜begin▁of▁sentence｜>") not in tokenizer.encode("x")


def test_special_tokens_are_left_out_when_asked(tokenizer):
    ids = tokenizer.encode("a<｜end▁of▁sentence｜>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_half_a_character_is_shown_as_a_replacement(tokenizer):
    first = tokenizer.encode("🐸")[0]
    assert tokenizer.token_text(first) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.token_bytes(first) == "🐸".encode()[: len(tokenizer.token_bytes(first))]


def test_ids_without_a_token_are_empty(tokenizer):
    assert tokenizer.token_bytes(100_000) == b"" and not tokenizer.has(100_000)
    assert tokenizer.decode([100_000]) == ""


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json cannot be read \(No such file"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}', '"x"'])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="tokenizer.json is not a tokenizer: "):
        Tokenizer.open(tmp_path)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    content = json.loads(fake_engine.tiny_tokenizer().to_str())
    content["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="the tokenizer's decoder is NoneType"):
        Tokenizer.open(tmp_path)


def test_tokenizer_info_is_the_models_file_with_its_special_tokens(tmp_path):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer_info(tmp_path, special)["eos_token"] == "</s>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>", "x": 1}')
    info = tokenizer_info(tmp_path, special)
    assert (info["bos_token"], info["eos_token"], info["x"]) == ("<s>", "<end>", 1)
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert tokenizer_info(tmp_path, special)["eos_token"] == "</s>"
