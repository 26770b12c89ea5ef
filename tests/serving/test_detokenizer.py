"""Incremental text: equal to one-shot decoding, stop strings found wherever tokens are cut."""

import pathlib
import random

import pytest
import tokenizers

from serving.detokenizer import Detokenizer, StopStrings, TextStream, vocabulary

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(GOLDEN / "tiny_b" / "tokenizer.json"))


@pytest.fixture(scope="module")
def words(tokenizer):
    return vocabulary(tokenizer)


def pieces_of(words, ids, skip):
    detokenizer = Detokenizer(words, skip_special_tokens=skip)
    return [detokenizer.push(i) for i in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_the_one_shot_decoding_of_random_tokens(tokenizer, words, skip):
    generator = random.Random(7)
    for _ in range(200):
        length = generator.randrange(1, 40)
        ids = [generator.randrange(tokenizer.get_vocab_size() + 9) for _ in range(length)]
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces_of(words, ids, skip)) == expected


def test_pieces_join_to_the_text_with_many_byte_characters(tokenizer, words):
    text = "naïve 漢字 \U0001f600 e\u0301 <｜User｜> ｜ ▁"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces_of(words, ids, False)) == tokenizer.decode(ids, False) == text


def test_an_unfinished_character_is_held_back_until_it_is_whole(tokenizer, words):
    ids = tokenizer.encode("\U0001f600", add_special_tokens=False).ids
    pieces = pieces_of(words, ids, True)
    assert len(ids) > 1 and pieces[: len(ids) - 1] == [""] * (len(ids) - 1)
    assert pieces[len(ids) - 1] == "\U0001f600"
    assert pieces_of(words, ids[:-1], True)[-1] == "\ufffd"


def test_a_tokenizer_without_byte_level_decoder_is_refused():
    with pytest.raises(ValueError, match="decoder is NoneType; .* ByteLevel"):
        vocabulary(tokenizers.Tokenizer(tokenizers.models.BPE()))


def run_stops(text, sizes, stops, include=False):
    matcher = StopStrings(stops, include=include)
    out, place = "", 0
    while place < len(text):
        size = next(sizes)
        piece, stop = matcher.push(text[place : place + size])
        place += size
        out += piece
        if stop is not None:
            return out, stop
    return out + matcher.release(), None


def expected_stop(text, stops, include):
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_do_not_depend_on_where_the_text_is_cut(include):
    generator = random.Random(3)
    for _ in range(500):
        text = "".join(generator.choices("ab\n", k=generator.randrange(1, 30)))
        stops = [
            "".join(generator.choices("ab\n", k=generator.randrange(1, 5)))
            for _ in range(generator.randrange(1, 4))
        ]
        sizes = iter(lambda: generator.randrange(1, 6), None)
        assert run_stops(text, sizes, stops, include) == expected_stop(text, stops, include)


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopStrings(["END"], include=False)
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("x") == ("ENx", None)
    assert matcher.push("EN") == ("", None)
    assert matcher.release() == "EN"


def stream_of(words, **options):
    defaults = {"skip_special_tokens": True, "stop": (), "include_stop": False, "min_tokens": 0}
    return TextStream(words, **(defaults | options))


def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizer, words):
    ids = [tokenizer.token_to_id(letter) for letter in "abab"]
    stream = stream_of(words, stop=("a",), min_tokens=2)
    pushed = [stream.push(i) for i in ids[:3]]
    assert pushed == [("a", None), ("b", None), ("", "a")]


def test_finishing_releases_what_was_held_back(tokenizer, words):
    stream = stream_of(words, stop=("abc",))
    assert [stream.push(tokenizer.token_to_id(letter)) for letter in "ab"] == [("", None)] * 2
    assert stream.finish() == ("ab", None)
