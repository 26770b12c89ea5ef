"""The form that a request asks of its output, as a grammar of the engine."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from serving.api.errors import ApiError, bad_request
from serving.api.protocol import ChatBody, CompletionBody
from serving.api.sampling import Options
from serving.chat import ChatPrompt, tool_grammar
from serving.request import Grammar, RequestError
from serving.tokenizer import Tokenizer

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Settings of how an output is constrained, each with the values that change nothing here.
_SETTINGS = {
    "disable_fallback": (False, True),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}
_ANY_OBJECT = {"type": "object"}
_PLACE = re.compile(
    r"the lark grammar cannot be used: (?:at )?(\d+)\(\d+\): "
    r"(?:failed to compile JSON schema: )?(.*)"
)


def _response_grammar(form: Any) -> Grammar | None:
    """The grammar of `response_format`, whose shape was checked before for chats."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return Grammar(kind="json_object")
    if kind == "json_schema":
        wrapper = form.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
        if not isinstance(schema, Mapping):
            raise bad_request(
                "response_format.json_schema must be an object that holds a schema",
                "response_format",
            )
        return Grammar(kind="json_schema", text=json.dumps(schema))
    if kind == "regex" and isinstance(form.get("regex"), str):
        return Grammar(kind="regex", text=form["regex"])
    raise bad_request(
        f"response_format.type is {json.dumps(kind)}; it must be text, json_object, json_schema "
        "or regex",
        "response_format",
    )


def _structured_grammar(outputs: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of `structured_outputs`."""
    if outputs is None:
        return None
    for name, value in outputs.items():
        if name not in _KINDS and value is not None and value not in _SETTINGS.get(name, ()):
            raise bad_request(
                f"structured_outputs.{name} is not supported by this server; it must have one of "
                f"{', '.join(_KINDS)}",
                "structured_outputs",
            )
    given = {kind: outputs[kind] for kind in _KINDS if outputs.get(kind) is not None}
    if len(given) != 1:
        raise bad_request(
            f"structured_outputs has {len(given)} of {', '.join(_KINDS)}; it must have exactly one",
            "structured_outputs",
        )
    [(kind, value)] = given.items()
    if kind == "json_object" and isinstance(value, bool):
        return Grammar(kind="json_object") if value else None
    if kind == "json" and isinstance(value, Mapping | str):
        text = value if isinstance(value, str) else json.dumps(value)
        return Grammar(kind="json_schema", text=text)
    if kind == "choice" and isinstance(value, list):
        return Grammar(kind="choice", text=json.dumps(value))
    if kind in ("regex", "grammar") and isinstance(value, str):
        return Grammar(kind="lark" if kind == "grammar" else "regex", text=value)
    if kind == "structural_tag":
        raise bad_request(
            "structured_outputs.structural_tag is not supported by this server",
            "structured_outputs",
        )
    raise bad_request(
        f"structured_outputs.{kind} is {json.dumps(value)[:80]}, which is of the wrong type",
        "structured_outputs",
    )


def _of_content(body: ChatBody | CompletionBody) -> tuple[Grammar | None, str]:
    """The grammar of the text, and the field that asks for it."""
    response = _response_grammar(body.response_format)
    structured = _structured_grammar(body.structured_outputs)
    if response is not None and structured is not None:
        raise bad_request(
            "response_format and structured_outputs cannot both be given", "structured_outputs"
        )
    if structured is not None:
        return structured, "structured_outputs"
    return response, "response_format"


def _loose(tool: recipe.ToolDefinition) -> recipe.ToolDefinition:
    """The tool as offered without `strict`: any arguments."""
    return tool if tool.strict else recipe.ToolDefinition(tool.name)


def _of_calls(
    tokenizer: Tokenizer, prompt: ChatPrompt, content: Grammar | None, *, one_call: bool
) -> Grammar | None:
    """The grammar of an answer that must call tools, or may under a schema of theirs."""
    answer = None
    if content is not None and not prompt.must_call:
        if content.kind not in ("json_object", "json_schema"):
            return content
        answer = json.loads(content.text) if content.text else _ANY_OBJECT
    strict = any(tool.strict for tool in prompt.tools)
    if not (prompt.must_call or strict or answer is not None):
        return None
    tools = prompt.tools if prompt.must_call else [_loose(tool) for tool in prompt.tools]
    dsml = tokenizer.token_id(recipe.SpecialToken.Dsml.default_str())
    text = tool_grammar(tools, dsml=dsml, forced=prompt.must_call, one_call=one_call, answer=answer)
    return Grammar(kind="lark", text=text)


def _with_grammar(options: Options, grammar: Grammar | None) -> Options:
    sampling = dataclasses.replace(options.sampling, grammar=grammar)
    return dataclasses.replace(options, sampling=sampling)


def constrain_chat(
    tokenizer: Tokenizer, body: ChatBody, prompt: ChatPrompt, options: Options
) -> tuple[Options, str]:
    """The options with what holds a chat's output to its form, and the field that asks for it.

    The form counts after the end of thinking.

    Raises:
      ApiError: 400, for a form that is wrong or not supported.
    """
    grammar, field = _of_content(body)
    if prompt.parse_tool_calls:
        one_call = body.parallel_tool_calls is False
        calls = _of_calls(tokenizer, prompt, grammar, one_call=one_call)
        field = field if calls is grammar else "tools"
        grammar = calls
    if grammar is not None and prompt.start in ("reasoning", "continued_reasoning"):
        end = tokenizer.token_id(recipe.SpecialToken.ThinkingEnd.default_str())
        grammar = dataclasses.replace(grammar, starts_after=end)
    return _with_grammar(options, grammar), field


def constrain_completion(body: CompletionBody, options: Options) -> tuple[Options, str]:
    """As `constrain_chat`; the form counts from the first token."""
    grammar, field = _of_content(body)
    return _with_grammar(options, grammar), field


def named(error: RequestError, field: str) -> ApiError:
    """The engine's refusal of a grammar, with the field that asks for it."""
    return bad_request(str(error), field if error.param == "grammar" else error.param)


def named_in_chat(
    error: RequestError, field: str, body: ChatBody, prompt: ChatPrompt, options: Options
) -> ApiError:
    """As `named`; a grammar made of tools is not the client's, so the tool at fault is named."""
    if error.param != "grammar" or field != "tools":
        return named(error, field)
    place = _PLACE.match(str(error))
    lines = options.sampling.grammar.text.split("\n")
    rule = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else ""
    if rule.startswith("answer:"):
        form = _of_content(body)[1]
        return bad_request(f"the json_schema grammar cannot be used: {place[2]}", form)
    number = re.match(r"tool(\d+)", rule)
    if number is None:
        reason = str(error).removeprefix("the lark grammar cannot be used: ")
        return bad_request(f"tools cannot be used: {reason}", "tools")
    name = prompt.tools[int(number[1])].name
    index = [tool["function"]["name"] for tool in body.tools].index(name)
    return bad_request(f"tools[{index}].function.parameters cannot be used: {place[2]}", "tools")
