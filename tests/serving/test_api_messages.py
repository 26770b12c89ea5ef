import fake_engine
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fake_engine import FakeEngine, client_of, says
from pydantic import TypeAdapter
from test_api_chat import CALL
from test_api_responses import named_events

TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
EVENT = TypeAdapter(RawMessageStreamEvent)


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


def create(client, **body):
    defaults = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}
    answer = client.post("/v1/messages", json=defaults | body)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_message_has_thinking_and_text(client, engine):
    body = create(client)
    Message.model_validate_json(body.text)
    body = body.json()
    thinking, text = body["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert text == {"type": "text", "text": "The answer"}
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "end_turn")
    assert body["usage"]["input_tokens"] == len(engine.requests[0].prompt_token_ids)


def test_a_stream_names_its_events_in_order(client):
    events = named_events(create(client, stream=True))
    for name, data in events:
        assert data["type"] == name
        EVENT.validate_python(data)
    assert list(dict.fromkeys(name for name, _ in events)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert "".join(delta.get("text", "") for delta in deltas) == "The answer"
    assert events[-2][1]["delta"]["stop_reason"] == "end_turn"


def test_tool_use_comes_back_as_blocks(tokenizer):
    with client_of(FakeEngine(tokenizer, says(tokenizer, CALL)), max_model_len=4096) as client:
        body = create(client, tools=[TOOL]).json()
        events = named_events(create(client, tools=[TOOL], stream=True))
        one = {"type": "auto", "disable_parallel_tool_use": True}
        single = create(client, tools=[TOOL], tool_choice=one).json()
    uses = [block for block in body["content"] if block["type"] == "tool_use"]
    assert [use["input"] for use in uses] == [{"city": "Rome", "days": 3}, {}]
    assert body["stop_reason"] == "tool_use"
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    parts = "".join(delta.get("partial_json", "") for delta in deltas)
    assert parts == '{"city": "Rome", "days": 3}{}'
    assert [block["type"] for block in single["content"]] == ["thinking", "tool_use"]


def test_the_messages_render_as_the_chat_they_stand_for(client, engine):
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    client.post(
        "/v1/chat/completions",
        json={
            "tools": [{"type": "function", "function": function}],
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
                {"role": "user", "content": "And?"},
            ],
        },
    )
    use = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}}
    body = {
        "tools": [TOOL],
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "look up", "signature": "x"},
                    {"type": "text", "text": "Let me see"},
                    use,
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "sunny"}],
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    }
    create(client, **body)
    first, second = engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    counted = client.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(first.prompt_token_ids)}


def test_stop_sequences_and_length_say_so(tokenizer, client):
    assert create(client, max_tokens=3).json()["stop_reason"] == "max_tokens"
    body = create(client, stop_sequences=["ans"]).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "ans")
    assert body["content"][-1]["text"] == "The "


def test_thinking_may_be_disabled(client, engine, tokenizer):
    create(client, thinking={"type": "disabled"})
    assert tokenizer.decode(engine.requests[0].prompt_token_ids).endswith("</think>")


def test_a_last_message_of_the_assistant_is_continued(client, engine, tokenizer):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    create(client, messages=turns, thinking={"type": "disabled"})
    assert tokenizer.decode(engine.requests[0].prompt_token_ids).endswith("</think>I am")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": ["x"]}, "messages[0] must be an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not enabled"),
        ({"system": 5}, "system must be a string"),
        ({"system": [{"type": "sound"}]}, "system[0].type"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences holds an empty string"),
        ({"stop": ""}, "stop holds an empty string"),
        ({"output_config": {"effort": "huge"}}, 'output_config.effort is "huge"'),
        ({"output_config": {"format": {"type": "xml"}}}, 'output_config.format.type is "xml"'),
        ({"tools": [{"name": "a b"}]}, 'tools[0].name is "a b"'),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema must be"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools of the client"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"temperature": 3}, "temperature is 3.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, 'names "x"'),
        ({"thinking": {"type": "x"}}, "thinking must be an object"),
        *(
            ({"thinking": {"type": "enabled", "budget_tokens": budget}}, "thinking.budget_tokens")
            for budget in (0, "5", True, 1.5)
        ),
    ],
)
def test_a_bad_message_is_a_400_in_anthropics_shape(client, engine, change, message):
    defaults = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    answer = client.post("/v1/messages", json=defaults | change)
    assert answer.status_code == 400
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"system": 5}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ""}, "stop"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ],
)
def test_an_error_names_the_clients_own_field(client, change, param):
    defaults = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    answer = client.post("/v1/messages", json=defaults | change)
    assert answer.json()["error"]["param"] == param


def test_a_thinking_budget_is_taken(client, engine):
    create(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert len(engine.requests) == 1


def test_a_failure_ends_the_stream_with_an_error_event(client, engine):
    engine.failure = "error"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "api_error"

    async def later(request):
        async for output in FakeEngine._outputs(engine, request):
            yield output
            engine.failure = "error"

    engine.failure, engine._outputs = None, later
    name, data = named_events(create(client, stream=True))[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")


def test_anthropics_key_header_opens_the_routes(engine):
    with client_of(engine, api_key="secret") as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        wrong = client.post("/v1/messages", json=body, headers={"X-Api-Key": "wrong"})
        right = client.post("/v1/messages", json=body, headers={"X-Api-Key": "secret"})
    assert (wrong.status_code, right.status_code) == (401, 200)
