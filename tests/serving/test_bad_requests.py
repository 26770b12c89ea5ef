"""Every row of bad input: its status, the field it names, and its message."""

import fake_engine
import pytest
from fake_engine import FakeEngine, client_of, says

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def client():
    tokenizer = fake_engine.make_tokenizer()
    engine = FakeEngine(tokenizer, says(tokenizer, "x"))
    with client_of(engine, vocab_size=512, max_body_bytes=10_000) as client:
        yield client


def check(response, status, param, message):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert message in error["message"]
    assert error["param"] == param
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    return error


COMPLETIONS = [
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "prompt is empty"),
    ({"prompt": [[]]}, "prompt", "prompt is empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt is empty"),
    ({"prompt": [512]}, "prompt", "token id 512; token ids are from 0 to 511"),
    ({"prompt": [3, -1]}, "prompt", "token id -1"),
    ({"prompt": [[3], [900]]}, "prompt", "token id 900"),
    ({"prompt": [1.5]}, "prompt", "prompt should be"),
    ({"prompt": {"a": 1}}, "prompt", "prompt should be"),
    ({"prompt": ["a", 3]}, "prompt", "prompt should be"),
    ({"prompt": [3] * 128}, "prompt", "This model's maximum context length is 128 tokens. However"),
    ({"prompt": ["a"] * 1025}, "prompt", "holds 1025 prompts; at most 1024"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens is -1; it must be at least 0"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens should be a valid integer"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens should be a valid integer"),
    ({"max_tokens": True}, "max_tokens", "max_tokens should be a valid integer"),
    ({"n": 0}, "n", "n is 0; it must be from 1 to 128"),
    ({"n": 129}, "n", "n is 129"),
    ({"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling"),
    ({"temperature": -0.1}, "temperature", "temperature is -0.1; it must be from 0 to 2"),
    ({"temperature": 2.5}, "temperature", "temperature is 2.5"),
    ({"temperature": "hot"}, "temperature", "temperature should be a valid number"),
    ({"top_p": 0}, "top_p", "top_p is 0.0; it must be above 0 and at most 1"),
    ({"top_p": 1.1}, "top_p", "top_p is 1.1"),
    ({"top_k": -2}, "top_k", "top_k is -2; it must be 0 or -1 (off), or from 1 to"),
    ({"top_k": 2**31}, "top_k", "top_k is 2147483648; it must be 0 or -1 (off), or from 1 to 2147"),
    ({"min_p": -0.5}, "min_p", "min_p is -0.5; it must be from 0 to 1"),
    ({"min_p": 2}, "min_p", "min_p is 2.0"),
    ({"presence_penalty": 3}, "presence_penalty", "it must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "it must be from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "it must be above 0"),
    ({"logprobs": 21}, "logprobs", "logprobs is 21; it must be from 0 to 20"),
    ({"logprobs": -2}, "logprobs", "logprobs is -2"),
    ({"logprobs": -1}, "logprobs", "logprobs is -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    ({"stop": ""}, "stop", "stop holds an empty string"),
    ({"stop": ["a", ""]}, "stop", "stop holds an empty string"),
    ({"stop": 5}, "stop", "stop should be"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "stop_token_ids holds 512"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "has the key 'x'; keys are token ids"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "has the key 512"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "it must be from -100 to 100"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids is empty"),
    ({"allowed_token_ids": [900]}, "allowed_token_ids", "allowed_token_ids holds 900"),
    ({"bad_words": [" "]}, "bad_words", "bad_words holds an empty word"),
    ({"bad_words": "x"}, "bad_words", "bad_words should be a valid list"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "logprob_token_ids needs logprobs"),
    ({"logprob_token_ids": [512], "logprobs": 1}, "logprob_token_ids", "holds 512"),
    ({"logprob_token_ids": [*range(21)], "logprobs": 1}, "logprob_token_ids", "at most 20"),
    ({"stream_options": {}}, "stream_options", "stream_options needs stream to be true"),
    ({"stream": True, "stream_options": 3}, "stream_options", "stream_options should be"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens 5 is above max_tokens 4"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
    ({"suffix": "x"}, "suffix", "suffix is not supported"),
    ({"best_of": 2}, "best_of", "best_of 2 is not supported"),
    ({"best_of": 0}, "best_of", "best_of is 0"),
    ({"best_of": 1, "n": 3}, "best_of", "best_of is 1; it must be at least n, 3"),
    ({"guided_json": {}}, "guided_json", "use structured_outputs.json"),
    ({"guided_regex": "a"}, "guided_regex", "use structured_outputs.regex"),
    ({"guided_choice": ["a"]}, "guided_choice", "use structured_outputs.choice"),
    ({"guided_grammar": "a"}, "guided_grammar", "use structured_outputs.grammar"),
    ({"logits_processors": ["a.b"]}, "logits_processors", "is not supported"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "is not supported"),
    ({"add_special_tokens": True}, "add_special_tokens", "is not supported"),
    ({"add_special_tokens": "no"}, "add_special_tokens", "should be a valid boolean"),
    ({"detokenize": False}, "detokenize", "is not supported"),
    ({"use_beam_search": True}, "use_beam_search", "use_beam_search is not supported"),
    ({"seed": "x"}, "seed", "seed should be a valid integer"),
    ({"seed": 2**63}, "seed", "seed is 9223372036854775808; it must be a 64-bit integer"),
    ({"response_format": {"type": "xml"}}, "response_format", 'response_format.type is "xml"'),
    ({"response_format": {"type": "json_schema"}}, "response_format", "that holds a schema"),
    (
        {
            "response_format": {"type": "json_object"},
            "structured_outputs": {"json": {"type": "object"}},
        },
        "structured_outputs",
        "response_format and structured_outputs cannot both be given",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "nonsense"}},
            }
        },
        "response_format",
        "the json_schema grammar cannot be used",
    ),
    (
        {"structured_outputs": {"json": {}, "regex": "a"}},
        "structured_outputs",
        "structured_outputs has 2 of",
    ),
    (
        {"structured_outputs": {"regex": "a", "bogus": 1}},
        "structured_outputs",
        "structured_outputs.bogus is not supported",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs",
        "structured_outputs.disable_any_whitespace is not supported",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "structured_outputs has 0 of"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "the regex grammar cannot"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs", "the lark grammar cannot"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "the choice grammar cannot"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "of the wrong type"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs", "of the wrong type"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "is not supported"),
    *(
        (
            {"response_format": {"type": "json_object"}, name: value},
            name,
            f"{name} cannot be used where a grammar",
        )
        for name, value in (("allowed_token_ids", [5]), ("bad_words", ["x"]), ("min_tokens", 2))
    ),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "is not supported"),
    ({"priority": 2**31}, "priority", "it must be a 32-bit integer"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt is empty"),
]


@pytest.mark.parametrize(("change", "param", "message"), COMPLETIONS)
def test_a_bad_completion_is_a_400_that_names_the_field(client, change, param, message):
    response = client.post("/v1/completions", json=COMPLETION | change)
    assert check(response, 400, param, message)["type"] == "BadRequestError"


def image(kind):
    return {"role": "user", "content": [{"type": kind, "image_url": {"url": "http://x/y.png"}}]}


CHATS = [
    ({"messages": None}, "messages", "messages must be a list of at least one message"),
    ({"messages": []}, "messages", "messages must be a list of at least one message"),
    ({"messages": "hi"}, "messages", "messages must be a list"),
    ({"messages": ["hi"]}, "messages", "messages[0] must be an object"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages", 'messages[0].role is "boss"'),
    ({"messages": [{"content": "x"}]}, "messages", "messages[0].role is null"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "messages[0].content must be"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content must be a string or"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content must be"),
    ({"messages": [image("image_url")]}, "messages", "image input is not enabled"),
    ({"messages": [image("input_image")]}, "messages", "image input is not enabled"),
    ({"messages": [image("sound")]}, "messages", 'content[0].type is "sound"'),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages",
        "messages[0].content[0].text must be a string",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "prefix": True}, CHAT["messages"][0]]},
        "messages",
        "messages[0].prefix is only possible on a last message",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages",
        "messages[0].tool_calls[0].function must be an object",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "it must be at least 1"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
    ({"n": 0}, "n", "n is 0"),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
    ({"logprobs": 5}, "logprobs", "logprobs should be a valid boolean"),
    ({"tool_choice": "auto"}, "tool_choice", "tool_choice needs tools"),
    ({"tools": []}, "tools", "tools must be a list of at least one tool"),
    ({"tools": [TOOL, TOOL]}, "tools", 'tools has two functions named "f"'),
    ({"tools": [{"type": "custom"}]}, "tools", "tools[0].type must be function"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools",
        'tools[0].function.name is "a b"',
    ),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", 'tool_choice is "maybe"'),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        'tool_choice names "g", which is not among the tools',
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice", "tool_choice must be none"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "response_format.json_schema must be an object that holds a schema",
    ),
    ({"response_format": {"type": "xml"}}, "response_format", 'response_format.type is "xml"'),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "cannot both be true",
    ),
    (
        {"continue_final_message": True},
        "continue_final_message",
        "needs a last message of the assistant, not of the user",
    ),
    ({"add_generation_prompt": False}, "add_generation_prompt", "can only be false together"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", 'reasoning_effort is "huge"'),
    ({"thinking": {"type": "on"}}, "thinking", "thinking must be an object whose type is"),
    ({"thinking": True}, "thinking", "thinking must be an object whose type is"),
    *(
        (
            {"chat_template_kwargs": {"reasoning_effort": effort}},
            "chat_template_kwargs",
            "a whole number from 1 to 100",
        )
        for effort in (0, 101, True, 4.5, "huge")
    ),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs", "must be true or false"),
    ({"chat_template": "x"}, "chat_template", "chat_template is not supported"),
    ({"echo": True}, "echo", "echo is not supported for chats"),
    ({"functions": [{"name": "f"}]}, "functions", "functions is not supported"),
    ({"web_search_options": {}}, "web_search_options", "web_search_options is not supported"),
    ({"guided_json": {}}, "guided_json", "use structured_outputs.json"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "is not supported"),
    (
        {"tools": [TOOL], "tool_choice": "required", "min_tokens": 2},
        "min_tokens",
        "min_tokens cannot be used where a grammar",
    ),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, "prompt", "maximum context length"),
]


@pytest.mark.parametrize(("change", "param", "message"), CHATS)
def test_a_bad_chat_is_a_400_that_names_the_field(client, change, param, message):
    response = client.post("/v1/chat/completions", json=CHAT | change)
    assert check(response, 400, param, message)["type"] == "BadRequestError"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_malformed_bodies_are_400(client, path):
    json = {"content-type": "application/json"}
    check(client.post(path, content=b"{", headers=json), 400, None, "is not valid JSON")
    check(client.post(path, content=b"", headers=json), 400, None, "is not valid JSON")
    check(client.post(path, content=b"[1]", headers=json), 400, None, "must be a JSON object")
    check(client.post(path, content=b'{"a": NaN}', headers=json), 400, None, "not valid JSON")
    check(client.post(path, content=b'"\xff"', headers=json), 400, None, "not valid JSON")
    plain = client.post(path, content=b"{}", headers={"content-type": "text/plain"})
    check(plain, 400, None, "the content type is text/plain; it must be application/json")
    check(client.post(path, content=b"{}"), 400, None, "the content type is missing")


def test_a_body_over_the_limit_is_413(client):
    response = client.post("/v1/completions", json={"prompt": "x" * 20_000})
    check(response, 413, None, "the body is larger than 10000 bytes")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_another_model_is_404(client, path):
    response = client.post(path, json={**CHAT, **COMPLETION, "model": "gpt"})
    error = check(response, 404, "model", "The model `gpt` does not exist; served here: fake")
    assert error["type"] == "NotFoundError"


def test_unknown_routes_and_methods_have_the_same_shape(client):
    assert check(client.get("/v1/nothing"), 404, None, "no route /v1/nothing")["type"] == (
        "Not Found"
    )
    assert check(client.get("/v1/completions"), 405, None, "does not take GET")["type"] == (
        "Method Not Allowed"
    )


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "give either prompt or messages"),
        ({"prompt": "x", **CHAT}, "prompt", "give either prompt or messages"),
        ({"prompt": 5}, "prompt", "prompt should be a valid string"),
        ({"messages": []}, "messages", "messages must be a list of at least one"),
    ],
)
def test_bad_tokenize_bodies_are_400(client, body, param, message):
    check(client.post("/tokenize", json=body), 400, param, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "tokens is missing"),
        ({"tokens": "x"}, "tokens should be a valid list"),
        ({"tokens": [1, 512]}, "tokens holds 512"),
        ({"tokens": [-1]}, "tokens holds -1"),
    ],
)
def test_bad_detokenize_bodies_are_400(client, body, message):
    check(client.post("/detokenize", json=body), 400, "tokens", message)


def nested(levels):
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("levels", [100, 500, 1500])
@pytest.mark.parametrize("strict", ["true", "false"])
def test_deep_nesting_is_a_400(client, levels, strict):
    function = f'{{"name":"f","strict":{strict},"parameters":{nested(levels)}}}'
    tools = f'[{{"type":"function","function":{function}}}]'
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"tools":{tools}}}'
    response = client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "tools is nested deeper than 100" in message or "not valid JSON" in message


def function(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a": {"type": "strng"}}}, " cannot be used: Invalid type: strng"),
        ({"properties": {"a": {"$ref": "#/x"}}}, " cannot be used: Pointer '/x' does not exist"),
        ({"properties": {"a": {"pattern": "("}}}, " cannot be used: regex parse error: ( error"),
        ({"properties": [1]}, ".properties must be an object of schemas"),
        ({"properties": {"a": {}}, "required": 5}, ".required must be a list of names"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_schema_that_cannot_be_used_is_named_without_the_grammar(parameters, message, named):
    tokenizer = fake_engine.make_tokenizer()
    engine = FakeEngine(tokenizer, says(tokenizer, "x"))
    choice = {"type": "function", "function": {"name": "g"}} if named else "required"
    tools = [function("f"), function("g", **parameters)]
    with client_of(engine, max_model_len=4096) as client:
        response = client.post(
            "/v1/chat/completions", json=CHAT | {"tools": tools, "tool_choice": choice}
        )
    error = check(response, 400, "tools", f"tools[1].function.parameters{message}")
    assert "DSML" not in error["message"] and "::" not in error["message"]
    assert "tool1" not in error["message"] and "x-guidance" not in error["message"]


def test_an_answers_schema_is_named_beside_tools():
    tokenizer = fake_engine.make_tokenizer()
    engine = FakeEngine(tokenizer, says(tokenizer, "x"))
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}
    with client_of(engine, max_model_len=4096) as client:
        response = client.post(
            "/v1/chat/completions", json=CHAT | {"tools": [TOOL], "response_format": form}
        )
    check(response, 400, "response_format", "the json_schema grammar cannot be used: Invalid type")


def test_too_many_choices_are_a_400(client):
    response = client.post("/v1/completions", json={"prompt": ["a"] * 100, "n": 11})
    check(response, 400, "n", "100 prompts with n 11 make 1100 choices; at most 1024")


def test_nothing_bad_ever_reached_the_engine(client):
    assert client.context.engine.requests == []
