"""Where the project decides for itself what the vectors leave open."""

import json

import pytest

from serving.chat import ChatError, OutputParser, encode_chat
from serving.chat.released_tokenizer import released_tokenizer_text
from serving.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(released_tokenizer_text())


@pytest.fixture
def render(tokenizer):
    def render(messages=(USER,), **request):
        options = {k: request.pop(k) for k in ("forced_calls", "max_images") if k in request}
        return encode_chat(tokenizer, {"messages": list(messages), **request}, **options)

    return render


def test_developer_messages_are_system_messages(render):
    developer = render([{"role": "developer", "content": "rules"}, USER])
    assert developer == render([{"role": "system", "content": "rules"}, USER])


def test_reasoning_is_a_synonym_of_reasoning_content(render):
    turns = [
        {"role": "assistant", "content": "x", name: "why"}
        for name in ("reasoning", "reasoning_content")
    ]
    one, other = (render([USER, turn, USER], tools=TOOLS) for turn in turns)
    assert one == other and "<think>why</think>x" in one.text


def test_an_empty_system_message_is_dropped(render):
    empty = {"role": "system", "content": ""}
    assert render([empty, USER, empty]) == render([USER])


def test_tool_results_without_calls_and_unknown_ids_are_rendered(render):
    result = {"role": "tool", "content": "r", "tool_call_id": "zz"}
    assert "<tool_result>r</tool_result>" in render([USER, result]).text


def test_arguments_may_be_an_object(render):
    def turn(arguments):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    arguments = {"city": "杭州", "n": 1}
    text = json.dumps(arguments)
    assert render([USER, turn(arguments)], tools=TOOLS) == render([USER, turn(text)], tools=TOOLS)


def test_a_strict_tools_schema_is_normalized(render):
    function = {
        "name": "f",
        "strict": True,
        "parameters": {"properties": {"a": {"type": "string"}}},
    }
    function["parameters"] |= {"type": "object"}
    text = render(tools=[{"type": "function", "function": function}]).text
    assert '"additionalProperties": false, "required": ["a"]' in text


def test_a_named_tool_choice_lists_only_that_tool_and_works_while_thinking(render):
    prompt = render(tools=TOOLS, tool_choice=NAMED)
    assert '{"name": "g"' in prompt.text and '{"name": "f"' not in prompt.text
    assert prompt.text.endswith("<｜Assistant｜><think>") and prompt.start == "reasoning"


def test_required_calls_leave_the_prompt_alone_unless_it_is_to_bring_them_about(render):
    off = {"type": "disabled"}
    auto = render(tools=TOOLS, thinking=off)
    required = render(tools=TOOLS, thinking=off, tool_choice="required")
    assert required.token_ids == auto.token_ids
    assert (required.must_call, auto.must_call) == (True, False)
    opened = render(tools=TOOLS, thinking=off, tool_choice="required", forced_calls="prompt")
    assert opened.text == auto.text + "\n\n<｜DSML｜ calls>\n" and opened.start == "tool_calls"
    assert not opened.must_call


def test_thinking_decides_before_kwargs_and_effort(render):
    kwargs = {"thinking": True}
    prompt = render(thinking={"type": "disabled"}, chat_template_kwargs=kwargs)
    assert not prompt.thinking
    assert render(reasoning_effort="none", chat_template_kwargs=kwargs).thinking
    assert render(reasoning_effort="none", thinking={"type": "adaptive"}).thinking


@pytest.mark.parametrize(
    ("effort", "number"), [("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("max", 100)]
)
def test_every_effort_has_its_number(render, effort, number):
    assert f"Reasoning Effort: {number} (" in render(reasoning_effort=effort).text


def test_prefixes_start_where_they_leave_off(render):
    def start(**message):
        last = {"role": "assistant", "content": "", "prefix": True, **message}
        return render([USER, last]).start

    assert start(reasoning_content="because") == "continued_reasoning"
    assert start(content="x", reasoning_content="because") == "continued_content"
    assert start(content="x") == "continued_content"


def test_an_image_placeholder_in_text_does_not_stand_for_an_image(render, tokenizer):
    spelled = "<｜deepseek_image｜>"
    content = [
        {"type": "text", "text": f"{spelled} {spelled}+"},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
    ]
    prompt = render([{"role": "user", "content": content}], max_images=9)
    assert prompt.token_ids.count(tokenizer.token_id(spelled)) == 1
    assert prompt.text.count(spelled) == 3 and prompt.image_urls == ("http://x/y.png",)


def test_images_are_refused_unless_enabled(render):
    image = {"type": "image_url", "image_url": "http://x/y.png"}
    with pytest.raises(ChatError, match="image input is not enabled"):
        render([{"role": "user", "content": [image]}])


def test_more_images_than_the_limit_are_refused(render):
    image = {"type": "image_url", "image_url": "http://x/y.png"}
    messages = [{"role": "user", "content": [image, image]}, {"role": "user", "content": [image]}]
    assert len(render(messages, max_images=3).image_urls) == 3
    with pytest.raises(ChatError, match=r"messages\[1\].content brings the images over the limit"):
        render(messages, max_images=2)


def test_text_before_half_a_character_at_the_end_is_kept(tokenizer):
    ids = tokenizer.encode("r</think>hello 𓀀")[:-1]
    for size in (1, 2, 3, len(ids)):
        parser = OutputParser(tokenizer, start="reasoning", parse_tool_calls=True)
        deltas = [d for i in range(0, len(ids), size) for d in parser.push(ids[i : i + size])]
        deltas += parser.finish("length")[0]
        assert "".join(delta.content for delta in deltas) == "hello"


def test_ids_without_a_token_are_counted_and_add_nothing(tokenizer):
    parser = OutputParser(tokenizer, start="content", parse_tool_calls=False)
    assert parser.push([tokenizer.vocab_size + 5]) == [] and parser.num_tokens == 1


def test_a_stop_string_held_back_at_the_end_is_released(tokenizer):
    parser = OutputParser(tokenizer, start="content", parse_tool_calls=False, stop=["abcd"])
    deltas = parser.push(tokenizer.encode("xabc"))
    deltas += parser.finish("stop")[0]
    assert "".join(delta.content for delta in deltas) == "xabc"
    assert parser.stop_reason is None


def test_reasoning_tokens_are_counted_up_to_the_marker_that_ends_them(tokenizer):
    for text, tools in (("🐸 why</think>x", True), ("🐸 why", False)):
        parser = OutputParser(tokenizer, start="reasoning", parse_tool_calls=tools)
        parser.push(tokenizer.encode(text))
        assert parser.reasoning_tokens == len(tokenizer.encode("🐸 why"))
    parser = OutputParser(tokenizer, start="content", parse_tool_calls=True)
    parser.push(tokenizer.encode("x"))
    assert parser.reasoning_tokens == 0
