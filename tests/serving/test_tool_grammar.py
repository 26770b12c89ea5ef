"""Grammars of tool calls, over the released tokenizer's ids."""

import deepseek_recipe as recipe
import numpy as np
import pytest

from serving.chat import tool_grammar
from serving.chat.released_tokenizer import released_tokenizer_text
from serving.grammar import GrammarCompiler
from serving.request import Grammar, RequestError
from serving.tokenizer import Tokenizer

D = "｜DSML｜"
EOS = 1
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(released_tokenizer_text())


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer.vocabulary, vocab_size=tokenizer.vocab_size, eos_token_id=EOS)


@pytest.fixture
def accepts(tokenizer, compiler):
    """Whether the grammar allows every token of a text and then EOS."""

    def accepts(text, tools, **options):
        defaults = {"dsml": tokenizer.token_id(D), "forced": True, "one_call": False}
        lark = tool_grammar(tools, **(defaults | options))
        state = compiler.compile(Grammar(kind="lark", text=lark))
        words = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        for token in [*tokenizer.encode(text), EOS]:
            state.write(words)
            if not words[token // 32] >> (token % 32) & 1:
                return False
            state.push(token)
        return True

    return accepts


def tool(name="f", schema=WEATHER, strict=None):
    return recipe.ToolDefinition(name, None, schema, strict)


def text_value(key, value):
    return f'<{D} parameter name="{key}" string="true">{value}</{D} parameter>\n'


def json_value(key, value):
    return f'<{D} parameter name="{key}" string="false">{value}</{D} parameter>\n'


def call(*parameters, name="f"):
    return f'<{D} invoke name="{name}">\n' + "".join(parameters or "\n") + f"</{D} invoke>\n"


def block(*calls):
    return f"\n\n<{D} calls>\n" + "".join(calls) + f"</{D} calls>"


ROME = text_value("city", "Rome")


@pytest.mark.parametrize(
    "answer",
    [
        block(call(ROME)),
        block(call(text_value("city", "a <b>bold</b> </city>\n\n杭州"))),
        block(call(ROME, json_value("days", 3), text_value("unit", "C"))),
        block(call(ROME), call(ROME, text_value("unit", "F"))),
    ],
)
def test_calls_that_fit_the_schema_are_allowed(accepts, answer):
    assert accepts(answer, [tool()])


@pytest.mark.parametrize(
    "answer",
    [
        "Hello",
        "",
        block(),
        block(call()),
        block(call(ROME, name="g")),
        block(call(json_value("days", 3), ROME)),
        block(call(ROME, json_value("days", "x"))),
        block(call(ROME, text_value("unit", "K"))),
        block(call(ROME, text_value("other", "x"))),
        block(call(ROME)) + "more",
    ],
)
def test_everything_else_is_not(accepts, answer):
    assert not accepts(answer, [tool()])


def test_an_enumeration_may_hold_control_characters(accepts):
    odd = "a\n\x01\x7f\u2028é"
    tools = [tool(schema={"properties": {"a": {"enum": [odd, 1]}, "b": {"const": {odd: odd}}}})]
    assert accepts(block(call(text_value("a", odd))), tools)
    assert not accepts(block(call(text_value("a", "a"))), tools)


def test_one_call_only_if_calls_are_not_parallel(accepts):
    assert accepts(block(call(ROME)), [tool()], one_call=True)
    assert not accepts(block(call(ROME), call(ROME)), [tool()], one_call=True)


def test_any_of_several_tools_may_be_called(accepts):
    tools = [tool(), tool("g", {})]
    assert accepts(block(call(ROME), call(text_value("k", "v"), name="g")), tools)
    assert accepts(block(call(json_value("k", '{"a": [1, 2]}'), name="g")), tools)


def test_a_tool_without_parameters_is_called_with_none(accepts):
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    assert accepts(block(call()), [tool(schema=schema)])
    assert not accepts(block(call(ROME)), [tool(schema=schema)])


def test_strings_with_a_pattern_and_shared_definitions_are_json(accepts):
    schema = {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "at": {"$ref": "#/$defs/point"},
        },
        "required": ["code", "at"],
    }
    good = call(json_value("code", '"ABC"'), json_value("at", '{"x": 1.5}'))
    assert accepts(block(good), [tool(schema=schema)])
    assert not accepts(block(good.replace("ABC", "abc")), [tool(schema=schema)])
    assert not accepts(block(good.replace("1.5", '"a"')), [tool(schema=schema)])


def test_what_cannot_be_enforced_is_an_error_for_strict_tools_only(accepts):
    schema = {"properties": {"a": {"type": "string", "format": "colour"}}, "required": ["a"]}
    assert accepts(block(call(json_value("a", '"red"'))), [tool(schema=schema)])
    with pytest.raises(RequestError, match="colour"):
        accepts("", [tool(schema=schema, strict=True)])


def test_an_enumeration_of_several_types_takes_each_in_its_form(accepts):
    tools = [tool(schema={"properties": {"a": {"enum": ["x", "", 5, None]}}, "required": ["a"]})]
    for value in (
        text_value("a", "x"),
        text_value("a", ""),
        json_value("a", "5"),
        json_value("a", "null"),
    ):
        assert accepts(block(call(value)), tools)
    for value in (text_value("a", "5"), json_value("a", '"x"'), json_value("a", "6")):
        assert not accepts(block(call(value)), tools)


def test_calls_may_be_left_out_or_follow_text_if_they_are_not_forced(accepts):
    for answer in ("Hello <b>", "Let me see." + block(call(ROME)), block(call(ROME))):
        assert accepts(answer, [tool()], forced=False)
    assert not accepts("Hm" + block(call(ROME, name="g")), [tool()], forced=False)


def test_an_answer_of_a_schema_is_that_or_calls(accepts):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    options = {"forced": False, "answer": schema}
    assert accepts('{"a": 5}', [tool()], **options)
    assert accepts(block(call(ROME)), [tool()], **options)
    assert not accepts("Hello", [tool()], **options)


def test_forced_text_has_the_tokenizers_own_ids(tokenizer, compiler):
    lark = tool_grammar([tool()], dsml=tokenizer.token_id(D), forced=True, one_call=True)
    state = compiler.compile(Grammar(kind="lark", text=lark))
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    expected = tokenizer.encode(f'\n\n<{D} calls>\n<{D} invoke name="f">\n')
    for token in expected:
        state.write(words)
        assert words[token // 32] >> (token % 32) & 1
        state.push(token)
