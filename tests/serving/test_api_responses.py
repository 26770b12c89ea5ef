import json

import fake_engine
import pytest
from fake_engine import FakeEngine, client_of, says
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_api_chat import CALL

TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def tokenizer():
    return fake_engine.make_tokenizer()


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer, says(tokenizer, "\nhm\n</think>\n\nThe answer"))


@pytest.fixture
def client(engine):
    with client_of(engine, max_model_len=4096) as client:
        yield client


def respond(client, **body):
    answer = client.post("/v1/responses", json={"input": "hi"} | body)
    assert answer.status_code == 200, answer.text
    return answer


def named_events(answer):
    """Events of a stream, each with its name, without a last [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def test_a_response_has_a_reasoning_item_and_a_message(client, engine):
    body = respond(client, instructions="Be brief.", max_output_tokens=50, metadata={"a": "b"})
    Response.model_validate_json(body.text)
    body = body.json()
    reasoning, message = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "The answer"
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert (body["status"], body["store"], body["metadata"]) == ("completed", False, {"a": "b"})
    usage = body["usage"]
    assert usage["input_tokens"] == len(engine.requests[0].prompt_token_ids)
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert engine.requests[0].sampling.max_tokens == 50


def test_the_input_renders_as_the_chat_it_stands_for(client, engine):
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    client.post(
        "/v1/chat/completions",
        json={
            "tools": [
                {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
            ],
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": "Let me see",
                    "reasoning_content": "look up",
                    "tool_calls": [{"id": "c1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ],
        },
    )
    respond(
        client,
        tools=[TOOL],
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "look up"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me see"}],
            },
            {"type": "function_call", "call_id": "c1", **call},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
    )
    first, second = engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


def test_a_stream_names_its_events_in_order(client):
    events = named_events(respond(client, stream=True))
    names = [name for name, _ in events]
    for number, (name, data) in enumerate(events):
        assert (data["type"], data["sequence_number"]) == (name, number)
        EVENT.validate_python(data)
    kinds = list(dict.fromkeys(names))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.completed",
    ]
    text = "".join(d["delta"] for n, d in events if n == "response.output_text.delta")
    assert text == "The answer"
    last = events[-1][1]["response"]
    assert last["output"][1]["content"][0]["text"] == "The answer"
    assert last["usage"]["output_tokens"] > 0


def test_tool_calls_are_items(tokenizer):
    with client_of(FakeEngine(tokenizer, says(tokenizer, CALL)), max_model_len=4096) as client:
        whole = respond(client, tools=[TOOL], reasoning={"effort": "low"})
        events = named_events(respond(client, tools=[TOOL], stream=True))
    Response.model_validate_json(whole.text)
    for _, data in events:
        EVENT.validate_python(data)
    calls = [item for item in whole.json()["output"] if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == ['{"city": "Rome", "days": 3}', "{}"]
    assert calls[0]["name"] == "get_weather" and calls[0]["call_id"] != calls[1]["call_id"]
    done = [d for n, d in events if n == "response.function_call_arguments.done"]
    assert [d["arguments"] for d in done] == [call["arguments"] for call in calls]


def test_a_cut_response_is_incomplete(client):
    body = respond(client, max_output_tokens=3).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    last = named_events(respond(client, max_output_tokens=3, stream=True))[-1]
    assert last[0] == "response.incomplete"


def test_logprobs_come_with_the_message_when_asked(client):
    body = respond(client, include=["message.output_text.logprobs"], top_logprobs=2).json()
    entries = body["output"][1]["content"][0]["logprobs"]
    assert entries and all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_a_failure_ends_the_stream_with_an_error_event(client, engine):
    engine.failure = "error"
    answer = client.post("/v1/responses", json={"input": "hi", "stream": True})
    assert answer.status_code == 500

    async def later(request):
        async for output in FakeEngine._outputs(engine, request):
            yield output
            engine.failure = "error"

    engine.failure, engine._outputs = None, later
    name, data = named_events(respond(client, stream=True))[-1]
    assert (name, data["type"], data["message"]) == ("error", "error", "Internal server error")


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"input": None}, "input", "input must be a string or a list"),
        ({"input": []}, "input", "input must be a string or a list"),
        ({"input": ["x"]}, "input", "input[0] must be an object"),
        ({"input": [{"type": "computer_call"}]}, "input", "input[0] is of type 'computer_call'"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "input[0].content must be a string"),
        ({"input": [{"role": "x", "content": "a"}]}, "input", "input[0].role is"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input", "input[0].tool_calls[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not stored"),
        ({"conversation": "c"}, "conversation", "responses are not stored"),
        ({"background": True}, "background", "responses are not stored"),
        ({"truncation": "auto"}, "truncation", "only disabled is supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "only functions are supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", 'text.format.type is "xml"'),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format must be an"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "objec"}}}},
            "text.format",
            "the json_schema grammar cannot be used",
        ),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; it must be"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        (
            {"max_output_tokens": 2, "min_tokens": 3},
            "min_tokens",
            "min_tokens 3 is above max_output_tokens 2",
        ),
        ({"input": "x" * 5000}, "input", "maximum context length"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name is"),
        ({"n": 2}, "n", "one answer"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}},
            "tool_choice",
            'names "other"',
        ),
        (
            {"reasoning": {"effort": "huge"}},
            "reasoning.effort",
            'reasoning.effort is "huge"; it must be one of',
        ),
        (
            {"chat_template_kwargs": {"reasoning_effort": 0}},
            "chat_template_kwargs",
            "chat_template_kwargs.reasoning_effort is 0",
        ),
    ],
)
def test_a_bad_response_is_a_400_that_names_the_field(client, engine, change, param, message):
    answer = client.post("/v1/responses", json={"input": "hi"} | change)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]
    assert engine.requests == []
