"""Runs in litellm's environment: completions, chats, streams, tools, schemas and responses."""

import json
import sys

import litellm

URL = f"{sys.argv[1]}/v1"
OFF = {"thinking": {"type": "disabled"}}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "greet",
        "parameters": {
            "type": "object",
            "properties": {"who": {"enum": ["world", "moon"]}},
            "required": ["who"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
options = {"model": "openai/tiny", "api_base": URL, "api_key": "x", "max_tokens": 400}

answer = litellm.completion(messages=MESSAGES, **options)
assert answer.choices[0].message.role == "assistant" and answer.usage.completion_tokens > 0

chunks = list(
    litellm.completion(
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        **options,
    )
)
assert len(chunks) > 2 and any(getattr(chunk, "usage", None) for chunk in chunks)

answer = litellm.completion(
    messages=MESSAGES, tools=[TOOL], tool_choice="required", extra_body=OFF, **options
)
call = answer.choices[0].message.tool_calls[0]
assert json.loads(call.function.arguments)["who"] in ("world", "moon")

form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
answer = litellm.completion(messages=MESSAGES, response_format=form, extra_body=OFF, **options)
assert "ok" in json.loads(answer.choices[0].message.content)

text = litellm.text_completion(
    model="text-completion-openai/tiny", prompt="Hello", api_base=URL, api_key="x", max_tokens=5
)
assert text.usage.completion_tokens <= 5

answer = litellm.responses(
    model="openai/tiny", input="Hi", api_base=URL, api_key="x", max_output_tokens=20
)
assert answer.usage.output_tokens > 0

answer = litellm.completion(
    model="anthropic/tiny",
    messages=MESSAGES,
    api_base=sys.argv[1],
    api_key="x",
    max_tokens=20,
)
assert answer.usage.completion_tokens > 0

try:
    litellm.completion(messages=MESSAGES, temperature=3, **options)
except litellm.BadRequestError as error:
    assert "temperature is 3" in str(error)
else:
    raise AssertionError("a temperature of 3 was taken")
print("litellm is served")
