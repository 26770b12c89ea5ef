"""Grammars: what they allow, when they begin and end, and what is no grammar."""

import json
import re

import numpy as np
import pytest
from test_engine import make_engine, merged, serve
from toy_runner import LETTERS, VOCAB_SIZE, run_all, text_of, tokens_of, toy_request

from serving import bitmask
from serving.detokenizer import Vocabulary
from serving.grammar import GrammarCompiler
from serving.request import Grammar, RequestError

LETTER = {LETTERS.bytes_of(token): token for token in range(3, VOCAB_SIZE)}


def compiler(vocabulary=LETTERS):
    return GrammarCompiler(vocabulary, vocab_size=VOCAB_SIZE, eos_token_id=1)


def allowed(state):
    words = bitmask.full(VOCAB_SIZE)
    state.write(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return {LETTERS.bytes_of(token).decode() or token for token in np.flatnonzero(bits).tolist()}


def test_a_grammar_allows_what_may_follow_and_ends_with_eos_alone():
    state = compiler().compile(Grammar(kind="regex", text="a(b|c)+d"))
    for letter, after in (("a", {"b", "c"}), ("c", {"b", "c", "d"}), ("d", {1})):
        assert state.is_active and letter in allowed(state)
        state.push(LETTER[letter.encode()])
        assert allowed(state) == after
    state.push(1)
    assert not state.is_active


def test_it_begins_after_its_token():
    state = compiler().compile(Grammar(kind="choice", text='["xy", "xz"]', starts_after=2))
    assert not state.is_active
    for token in (9, 1, 2):
        assert not state.is_active
        state.push(token)
    assert state.is_active and allowed(state) == {"x"}


@pytest.mark.parametrize("seed", range(3))
def test_an_output_does_not_end_before_its_grammar_has_begun(seed):
    grammar = Grammar(kind="choice", text='["xy"]', starts_after=40)
    stop = (20, 21)
    options = {"stop_token_ids": stop, "ignore_eos": False, "temperature": 1.0, "seed": seed}
    likely = {"logit_bias": tuple((token, 12.0) for token in (1, *stop, 40))}
    tokens = tokens_of(serve(toy_request("a", [5], grammar=grammar, **likely, **options)))
    begun = tokens.index(40)
    assert not {1, *stop} & set(tokens[:begun])
    assert tokens[begun + 1 :] == [LETTER[b"x"], LETTER[b"y"], 1]


def test_a_stop_token_that_the_grammar_waits_for_still_ends_the_output():
    grammar = Grammar(kind="choice", text='["xy"]', starts_after=40)
    request = toy_request(
        "a", [5], grammar=grammar, stop_token_ids=(40,), logit_bias=((40, 100.0),)
    )
    outputs = serve(request)
    assert (tokens_of(outputs), outputs[-1].stop_reason) == ([40], 40)


def test_added_tokens_do_not_stand_for_their_spelling():
    state = compiler(Vocabulary(LETTERS.token_bytes, LETTERS.special, frozenset({LETTER[b"x"]})))
    assert allowed(state.compile(Grammar(kind="regex", text="[xy]"))) == {"y"}


def test_states_of_one_grammar_are_independent():
    grammars = compiler()
    first, second = (grammars.compile(Grammar(kind="regex", text="ab")) for _ in range(2))
    first.push(LETTER[b"a"])
    assert (allowed(first), allowed(second)) == ({"b"}, {"a"})


@pytest.mark.parametrize("character", [chr(code) for code in (0, 1, 10, 31, 127)])
def test_a_choice_may_hold_control_characters(character):
    letters = {character: 3, "a": 4}
    bytes_of = [b""] * 3 + [letter.encode() for letter in letters]
    vocabulary = Vocabulary(tuple(bytes_of), frozenset(), frozenset())
    grammars = GrammarCompiler(vocabulary, vocab_size=5, eos_token_id=1)
    state = grammars.compile(Grammar(kind="choice", text=json.dumps([f"a{character}"])))
    words = bitmask.full(5)
    state.push(4)
    state.write(words)
    assert words[0] == 1 << 3


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "[", "regex grammar cannot be used: .*unclosed character class"),
        ("json_schema", '{"type": "objec"}', "json_schema grammar cannot be used: .*objec"),
        ("json_schema", "{", "json_schema grammar cannot be used"),
        ("json_schema", "[]", "a schema is a JSON object"),
        ("choice", "[]", "choices are a JSON list of texts that are not empty"),
        ("choice", '["a", 1]', "choices are a JSON list"),
        ("lark", "start: nothing", "lark grammar cannot be used"),
        ("yaml", "", "grammar is yaml; it must be one of json_object"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(kind, text, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message) as caught:
        engine.check(toy_request("a", [5], grammar=Grammar(kind=kind, text=text)))
    assert caught.value.param == "grammar" and "\n" not in str(caught.value)


def test_a_start_token_out_of_the_vocabulary_is_refused():
    grammar = Grammar(kind="regex", text="a", starts_after=97)
    with pytest.raises(RequestError, match="grammar has token id 97"):
        make_engine().check(toy_request("a", [5], grammar=grammar))


def grammar_requests(count):
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}
    grammars = [
        Grammar(kind="regex", text="[a-f]{3}(-[0-9]{2}){2}"),
        None,
        Grammar(kind="json_schema", text=json.dumps(schema)),
        Grammar(kind="choice", text='["yes", "no", "may/be"]'),
        Grammar(kind="lark", text='start: "<" /[p-t]+/ ">"', starts_after=40),
    ]
    return [
        toy_request(
            str(i),
            [5 + i, 6],
            grammar=grammars[i % 5],
            temperature=1.0,
            seed=i,
            max_tokens=24,
            ignore_eos=False,
            logit_bias=((40, 5.0),) if i % 5 == 4 else (),
            logprobs=0,
        )
        for i in range(count)
    ]


def test_outputs_follow_their_grammars_beside_each_other_and_through_preemption():
    requests = grammar_requests(25)
    engine = make_engine(16)
    together = run_all(engine, requests)
    assert engine.stats().num_preemptions > 0
    for request in requests:
        assert merged(together[request.request_id]) == merged(serve(request))
    for i, check in ((0, r"[a-f]{3}(-\d{2}){2}"), (3, "yes|no|may/be")):
        for k in range(i, 25, 5):
            assert re.fullmatch(check, text_of(together[str(k)]))
            assert together[str(k)][-1].finish_reason == "stop"
    for k in range(2, 25, 5):
        if together[str(k)][-1].finish_reason == "stop":
            assert 1 <= len(json.loads(text_of(together[str(k)]))) <= 3
    for k in range(4, 25, 5):
        tokens = tokens_of(together[str(k)])
        if 40 in tokens[:-1]:
            assert tokens[tokens.index(40) + 1] == LETTER[b"<"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_tokens", 1), ("allowed_token_ids", (1, 5)), ("bad_words", ((5, 6),))],
)
def test_what_could_leave_a_grammar_no_token_is_refused_beside_one(name, value):
    grammar = Grammar(kind="regex", text="ab")
    with pytest.raises(RequestError, match=f"{name} cannot be used where a grammar") as caught:
        toy_request("a", [5], grammar=grammar, **{name: value})
    assert caught.value.param == name


def test_a_grammar_that_is_complete_ends_the_output():
    grammar = Grammar(kind="regex", text="ab")
    outputs = serve(toy_request("a", [5], grammar=grammar, ignore_eos=False))
    assert tokens_of(outputs) == [LETTER[b"a"], LETTER[b"b"], 1]
