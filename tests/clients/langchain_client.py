"""Runs in langchain-openai's environment: chats, streams, tools and structured output."""

import sys

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL = f"{sys.argv[1]}/v1"
OFF = {"thinking": {"type": "disabled"}}


class Answer(BaseModel):
    """An answer."""

    ok: bool


@tool
def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def chat(**options: object) -> ChatOpenAI:
    """A chat model of the server; without thinking unless it is asked for."""
    settings = {"extra_body": OFF, "max_tokens": 400} | options
    return ChatOpenAI(model="tiny", base_url=URL, api_key="x", max_retries=0, **settings)


answer = chat(temperature=0).invoke("Hi")
assert answer.usage_metadata["output_tokens"] > 0
streamed = "".join(chunk.content for chunk in chat(temperature=0).stream("Hi"))
assert streamed == answer.content
assert len(chat().batch(["a", "b", "c"])) == 3

for method in ("json_schema", "function_calling"):
    parsed = chat().with_structured_output(Answer, method=method).invoke("Hi")
    assert isinstance(parsed, Answer), (method, parsed)

bound = chat().bind_tools([double], tool_choice="double").invoke("Hi")
assert [call["name"] for call in bound.tool_calls][0] == "double"
assert isinstance(bound.tool_calls[0]["args"]["number"], int)

# A named choice with thinking on is taken; what the model thinks is its own affair.
chat(extra_body={}).bind_tools([double], tool_choice="double").invoke("Hi")

responses = chat(use_responses_api=True).invoke("Hi")
assert responses.usage_metadata["output_tokens"] > 0

completion = OpenAI(model="tiny", base_url=URL, api_key="x", max_tokens=5).invoke("Hello")
assert isinstance(completion, str)

try:
    chat(temperature=3).invoke("Hi")
except openai.BadRequestError as error:
    assert "temperature is 3" in str(error)
else:
    raise AssertionError("a temperature of 3 was taken")
print("langchain is served")
