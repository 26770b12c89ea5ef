"""A small byte-level BPE tokenizer with every token of the chat template, defined in code."""

import json
import pathlib
from typing import Any

import tokenizers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
VOCAB_SIZE = 832

# Spellings and flags are the released tokenizer's: template tokens are part of the text.
_TEXT_TOKENS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
_SPECIAL_TOKENS = (
    "<｜end_of_query｜>",
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
)

# Each word becomes one token, built up letter by letter.
_WORDS = """
 the of and to in is that it for as was with be by on not he his but at are this have from or
 had an they which one you were all her she there would their we him been has when who will no
 more if out so up said what its about than into them can only other time new some could these
 two may first then do any like my now over such our man me even most made after also did many
 must before through back years where much your way well down should because long each just
 state people those too good little world very year still see men work life being under know
 get think same last while never against right great place house another came come here take
 system user assistant tool call name content message prompt answer question reason number
 value string true false null function return class import print list table index token model
 layer state data file code test type key text user's it's don't
 hello world
the a The A I In It This We You def if for = == -> { } ( ) [ ] 0 1 2 3 4 5 6 7 8 9 10 100 and
ing ed er ly tion ment ness able est ity
""".split("\n")


def _words() -> list[str]:
    """Words in order; a line that starts with a space holds words that follow one."""
    words = []
    for line in _WORDS:
        words += [(" " if line.startswith(" ") else "") + word for word in line.split()]
    return [*words, "  ", "    ", "\n\n", ">\n", '="', '":', '", "', " ="]


def _byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(other)}


def _added(token_id: int, content: str, *, special: bool, normalized: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
    }


def _model(room: int) -> tuple[dict[str, int], list[list[str]]]:
    """Vocabulary of at most `room` tokens and its merges, in order."""
    letters = _byte_letters()
    tokens = dict.fromkeys([BOS, EOS, PAD, *sorted(letters.values(), key=ord)])
    merges = []
    for word in _words():
        spelled = [letters[byte] for byte in word.encode()]
        for end in range(2, len(spelled) + 1):
            token = "".join(spelled[:end])
            if token not in tokens and len(tokens) < room:
                tokens[token] = None
                merges.append(["".join(spelled[: end - 1]), spelled[end - 1]])
    return {token: i for i, token in enumerate(tokens)}, merges


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer: `VOCAB_SIZE` ids without a gap; BOS 0, EOS 1, padding 2 as released."""
    named = [*_TEXT_TOKENS, *_SPECIAL_TOKENS, IMAGE]
    vocab, merges = _model(VOCAB_SIZE - len(named))
    unused = VOCAB_SIZE - len(named) - len(vocab)
    added = [_added(vocab[t], t, special=True, normalized=False) for t in (BOS, EOS, PAD)]
    for i in range(unused):
        name = f"<｜place▁holder▁no▁{i}｜>"
        added.append(_added(len(vocab) + i, name, special=True, normalized=False))
    for i, token in enumerate(named, VOCAB_SIZE - len(named)):
        text = token in _TEXT_TOKENS
        special = token in _SPECIAL_TOKENS
        added.append(_added(i, token, special=special, normalized=text))
    byte_level = {"type": "ByteLevel", "trim_offsets": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return tokenizers.Tokenizer.from_str(json.dumps(content, ensure_ascii=False))


def write_tiny_tokenizer(directory: pathlib.Path, context: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` of a model with `context` tokens."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config, ensure_ascii=False, indent=1), encoding="utf-8"
    )
