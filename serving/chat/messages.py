"""Checked messages and tools of a chat request, in the form the recipe's encoder takes."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import deepseek_recipe as recipe

IMAGE_TOKEN = "<｜deepseek_image｜>"
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_IMAGE_PARTS = ("image_url", "input_image", "image")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_MAX_NESTING = 100  # the recipe takes 128, and wraps a schema in a few of its own
_MODEL = "DeepSeek-V4.1-Flash"


class ChatError(ValueError):
    """A chat request that cannot be encoded; `param` names the request's field."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True)
class _Content:
    """Text with one placeholder per image, and the images' addresses."""

    pieces: tuple[str | None, ...]  # None stands for an image
    images: tuple[str, ...]


def check_nesting(request: Mapping[str, Any]) -> None:
    """Refuse fields nested deeper than the recipe takes.

    Raises:
      ChatError: naming the field.
    """
    for name, value in request.items():
        layer = [value]
        for _ in range(_MAX_NESTING):
            layer = [
                child
                for node in layer
                if isinstance(node, (dict, list))
                for child in (node.values() if isinstance(node, dict) else node)
            ]
        if layer:
            raise ChatError(f"{name} is nested deeper than {_MAX_NESTING} levels", param=str(name))


def _refuse(where: str, what: str) -> ChatError:
    return ChatError(f"{where} {what}", param=re.split(r"[.\[]", where)[0])


def _string(value: Any, where: str, *, default: str | None = None) -> str:
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise _refuse(where, f"must be a string, not {json.dumps(value)[:80]}")
    return value


def _image_address(part: Mapping[str, Any], where: str) -> str:
    value = part.get("image_url")
    if isinstance(value, Mapping):
        value = value.get("url")
    return _string(value, f"{where}.image_url")


def _content(value: Any, where: str, *, max_images: int) -> _Content:
    if isinstance(value, str):
        return _Content((value,), ())
    if not isinstance(value, list):
        raise _refuse(where, "must be a string or a list of parts")
    pieces: list[str | None] = []
    images: list[str] = []
    for index, part in enumerate(value):
        here = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXT_PARTS:
            pieces.append(_string(part.get(_TEXT_PARTS[kind]), f"{here}.{_TEXT_PARTS[kind]}"))
        elif kind in _IMAGE_PARTS:
            if not max_images:
                raise _refuse(here, "is an image: image input is not enabled")
            images.append(_image_address(part, here))
            pieces.append(None)
        else:
            raise _refuse(f"{here}.type", f"is {json.dumps(kind)}; it must be text or image_url")
    return _Content(tuple(pieces), tuple(images))


def _tool_calls(value: Any, where: str) -> list[recipe.ToolCall]:
    if not isinstance(value, list):
        raise _refuse(where, "must be a list")
    calls = []
    for index, call in enumerate(value):
        here = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise _refuse(f"{here}.function", "must be an object with name and arguments")
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(
            recipe.ToolCall(
                _string(call.get("id"), f"{here}.id", default=""),
                _string(function.get("name"), f"{here}.function.name"),
                _string(arguments, f"{here}.function.arguments", default="{}"),
            )
        )
    return calls


@dataclasses.dataclass(frozen=True)
class Messages:
    """Checked messages.

    Attributes:
      messages: for `recipe.Conversation`.
      image_token: spelling of the placeholders in them, found in no text of the request.
      continued: whether the last message is to be continued.
      last_content: content of the last message, without images.
    """

    messages: tuple[recipe.Message, ...]
    image_token: str
    continued: bool
    last_content: str


def read_messages(value: Any, *, continue_final: bool, max_images: int) -> Messages:
    """Check the request's messages and convert them.

    Args:
      value: the request's `messages`.
      continue_final: continue the last message, which must be the assistant's.
      max_images: most image parts of all messages; 0 if image input is not enabled.

    Raises:
      ChatError: naming the message and what is wrong with it.
    """
    if not isinstance(value, list) or not value:
        raise ChatError("messages must be a list of at least one message", param="messages")
    image_token = IMAGE_TOKEN
    if max_images:
        everything = json.dumps(value, ensure_ascii=False)
        while image_token in everything:
            image_token += "+"
    messages: list[recipe.Message] = []
    last_content = ""
    continued = False
    num_images = 0
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _refuse(where, "must be an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            raise _refuse(
                f"{where}.role", f"is {json.dumps(role)}; it must be one of {', '.join(ROLES)}"
            )
        raw = message.get("content")
        if raw is None and role == "assistant":
            raw = ""
        content = _content(raw, f"{where}.content", max_images=max_images)
        last_content = "\n\n".join(image_token if p is None else p for p in content.pieces)
        num_images += len(content.images)
        if num_images > max_images:
            raise _refuse(f"{where}.content", f"brings the images over the limit of {max_images}")
        sources = [recipe.UrlImageSource(url) for url in content.images]
        prefix = message.get("prefix") or False
        last = index == len(value) - 1
        if prefix and (role != "assistant" or not last):
            raise _refuse(f"{where}.prefix", "is only possible on a last message of the assistant")
        if continue_final and last and role != "assistant":
            raise ChatError(
                f"continue_final_message needs a last message of the assistant, not of the {role}",
                param="continue_final_message",
            )
        if role in ("system", "developer"):
            if last_content:
                messages.append(
                    recipe.SystemMessage(last_content, sources, image_token=image_token)
                )
        elif role == "user":
            messages.append(recipe.UserMessage(last_content, sources, image_token=image_token))
        elif role == "tool":
            call_id = message.get("tool_call_id")
            if call_id is not None:
                call_id = _string(call_id, f"{where}.tool_call_id")
            messages.append(
                recipe.ToolMessage(last_content, call_id, sources, image_token=image_token)
            )
        elif role == "latest_reminder":
            messages.append(recipe.LatestReminderMessage(last_content))
        else:
            reasoning = message.get("reasoning_content", message.get("reasoning"))
            if reasoning is not None:
                reasoning = _string(reasoning, f"{where}.reasoning_content")
            calls = message.get("tool_calls")
            calls = None if calls is None else _tool_calls(calls, f"{where}.tool_calls")
            continued = bool(prefix) or (continue_final and last)
            if continued and calls:
                raise _refuse(f"{where}.tool_calls", "cannot stand in a message to be continued")
            if content.images:
                raise _refuse(f"{where}.content", "of the assistant cannot hold an image")
            messages.append(
                recipe.AssistantMessage(last_content, reasoning, calls or None, continued)
            )
    return Messages(tuple(messages), image_token, continued, last_content)


def _strict_parameters(function: Mapping[str, Any], where: str) -> Any:
    """The schema as the recipe normalizes it for a strict tool."""
    body = {
        "model": _MODEL,
        "messages": [{"role": "user", "content": ""}],
        "tools": [{"type": "function", "function": {**function, "name": "strict"}}],
    }
    try:
        converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    except (recipe.ConversionError, ValueError) as error:
        raise _refuse(f"{where}.function.parameters", f"cannot be used: {error}") from error
    return converted.conversation.tools[0].parameters


def _check_object_schema(schema: Mapping[str, Any], where: str) -> None:
    if not isinstance(schema.get("properties") or {}, Mapping):
        raise _refuse(f"{where}.properties", "must be an object of schemas")
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refuse(f"{where}.required", "must be a list of names")


def read_tools(value: Any) -> tuple[recipe.ToolDefinition, ...]:
    """Check the request's tools and convert them; none given is an empty tuple.

    Raises:
      ChatError: naming the tool and what is wrong with it.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not value:
        raise ChatError("tools must be a list of at least one tool, or left out", param="tools")
    tools = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise _refuse(f"{where}.type", "must be function")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _refuse(f"{where}.function", "must be an object with a name")
        name = _string(function.get("name"), f"{where}.function.name")
        if not _TOOL_NAME.fullmatch(name):
            raise _refuse(
                f"{where}.function.name",
                f"is {json.dumps(name)}; it must be 1 to 128 letters, digits, _, -, . or :",
            )
        description = function.get("description")
        if description is not None:
            description = _string(description, f"{where}.function.description")
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {}
        if not isinstance(parameters, Mapping):
            raise _refuse(f"{where}.function.parameters", "must be a JSON schema object")
        _check_object_schema(parameters, f"{where}.function.parameters")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise _refuse(f"{where}.function.strict", "must be true or false")
        if strict:
            parameters = _strict_parameters({**function, "parameters": parameters}, where)
        tools.append(recipe.ToolDefinition(name, description, parameters, strict))
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ChatError(f"tools has two functions named {json.dumps(twice)}", param="tools")
    return tuple(tools)


def read_tool_choice(value: Any, tools: Sequence[recipe.ToolDefinition]) -> str | None:
    """Check `tool_choice` against the tools.

    Returns:
      "none", "auto", "required", or "=NAME" for a named tool; None if there are no tools.

    Raises:
      ChatError: if it is unknown, or names a tool that is not offered.
    """
    if value is None:
        return "auto" if tools else None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ChatError(
                f"tool_choice is {json.dumps(value)}; it must be none, auto, required or a named "
                "function",
                param="tool_choice",
            )
        if not tools and value != "none":
            raise ChatError("tool_choice needs tools", param="tool_choice")
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if value.get("type") != "function" if isinstance(value, Mapping) else True:
        raise ChatError(
            "tool_choice must be none, auto, required or an object of type function",
            param="tool_choice",
        )
    if not isinstance(name, str):
        raise ChatError("tool_choice.function.name must be a string", param="tool_choice")
    if not tools:
        raise ChatError("tool_choice needs tools", param="tool_choice")
    if name not in {tool.name for tool in tools}:
        raise ChatError(
            f"tool_choice names {json.dumps(name)}, which is not among the tools",
            param="tool_choice",
        )
    return f"={name}"
