"""A chat request to the prompt's ids, through the recipe's V4.1 encoder."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import deepseek_recipe as recipe

from serving.chat.messages import (
    IMAGE_TOKEN,
    ChatError,
    check_nesting,
    read_messages,
    read_tool_choice,
    read_tools,
)
from serving.tokenizer import Tokenizer

__all__ = ["ChatError", "ChatPrompt", "encode_chat", "template_tokens"]

Start = Literal["reasoning", "content", "continued_reasoning", "continued_content", "tool_calls"]
ForcedCalls = Literal["grammar", "prompt"]

_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
    "ultra": "max",
}
_EFFORT_LINE = "Reasoning Effort: "
_TEMPLATE = (
    recipe.SpecialToken.Bos,
    recipe.SpecialToken.Eos,
    recipe.SpecialToken.System,
    recipe.SpecialToken.User,
    recipe.SpecialToken.Assistant,
    recipe.SpecialToken.ThinkingStart,
    recipe.SpecialToken.ThinkingEnd,
    recipe.SpecialToken.Dsml,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
      text: the prompt as text.
      token_ids: its ids; only template tokens, image placeholders and grounding tokens of the
        assistant are special ids.
      thinking: whether the model is to think.
      parse_tool_calls: whether the tools are in the prompt, so that calls may come back.
      start: what the output begins with.
      image_urls: one per image placeholder, in the prompt's order.
      tools: those in the prompt; they have no equality, and the text tells them apart.
      must_call: whether the answer has to be calls, which the prompt does not bring about.
    """

    text: str
    token_ids: tuple[int, ...]
    thinking: bool
    parse_tool_calls: bool
    start: Start
    image_urls: tuple[str, ...]
    tools: tuple[recipe.ToolDefinition, ...] = dataclasses.field(default=(), compare=False)
    must_call: bool = False


@dataclasses.dataclass(frozen=True)
class _Thinking:
    """Whether to think, and how hard: the recipe's level, and the exact number if one is given."""

    enabled: bool
    level: str | None
    number: int | None


def template_tokens() -> tuple[str, ...]:
    """Spellings of the tokens without which no chat can be rendered."""
    return tuple(token.default_str() for token in _TEMPLATE)


def _read_effort(value: Any, where: str) -> str | int | None:
    """An effort's name or number.

    Raises:
      ChatError: if it is neither a known name nor, in `chat_template_kwargs`, from 1 to 100.
    """
    param = where.split(".")[0]
    if value is None or value == "none" or (isinstance(value, str) and value in _EFFORTS):
        return value
    names = f"none, {', '.join(_EFFORTS)}"
    if param == where:
        raise ChatError(f"{where} is {json.dumps(value)}; it must be one of {names}", param=param)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100:
        raise ChatError(
            f"{where} is {json.dumps(value)}; it must be one of {names} or a whole number from 1 "
            "to 100",
            param=param,
        )
    return value


def _read_thinking(request: Mapping[str, Any]) -> _Thinking:
    kwargs = request.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise ChatError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    effort = _read_effort(request.get("reasoning_effort"), "reasoning_effort")
    if kwargs.get("reasoning_effort") is not None:
        effort = _read_effort(kwargs["reasoning_effort"], "chat_template_kwargs.reasoning_effort")
    enabled: bool | None = None
    for name in ("enable_thinking", "thinking"):
        value = kwargs.get(name)
        if value is not None and not isinstance(value, bool):
            raise ChatError(
                f"chat_template_kwargs.{name} is {json.dumps(value)}; it must be true or false",
                param="chat_template_kwargs",
            )
        enabled = enabled if value is None else value
    thinking = request.get("thinking")
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        if kind not in ("enabled", "disabled", "adaptive"):
            raise ChatError(
                'thinking must be an object whose type is "enabled", "disabled" or "adaptive"',
                param="thinking",
            )
        enabled = kind != "disabled"
    if enabled is None:
        enabled = effort != "none"
    if isinstance(effort, int):
        return _Thinking(enabled, "high", effort)
    return _Thinking(enabled, _EFFORTS.get(effort) if effort else None, None)


def _read_response_format(value: Any) -> dict[str, Any]:
    """Keyword arguments of `recipe.Conversation`."""
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": "json_object"}
    if kind == "json_schema":
        wrapper = value.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ChatError(
                "response_format.json_schema must be an object that holds a schema",
                param="response_format",
            )
        return {"response_schema": schema}
    if kind == "regex":
        regex = value.get("regex")
        if not isinstance(regex, str):
            raise ChatError("response_format.regex must be a string", param="response_format")
        return {"response_regex": regex}
    raise ChatError(
        f"response_format.type is {json.dumps(kind)}; it must be text, json_object, json_schema "
        "or regex",
        param="response_format",
    )


def _read_continue(request: Mapping[str, Any]) -> bool:
    values = {}
    for name in ("continue_final_message", "add_generation_prompt"):
        values[name] = request.get(name)
        if values[name] is not None and not isinstance(values[name], bool):
            raise ChatError(f"{name} must be true or false", param=name)
    continued = bool(values["continue_final_message"])
    if continued and values["add_generation_prompt"]:
        raise ChatError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    if values["add_generation_prompt"] is False and not continued:
        raise ChatError(
            "add_generation_prompt can only be false together with continue_final_message",
            param="add_generation_prompt",
        )
    return continued


def _pieces(rendered: recipe.RenderedPrompt) -> list[tuple[str, bool]]:
    """The prompt cut into plain text and special tokens."""
    pieces: list[tuple[str, bool]] = []
    end = 0
    for begin, stop in rendered.special_ranges:
        pieces += [(rendered.prompt[end:begin], False), (rendered.prompt[begin:stop], True)]
        end = stop
    pieces.append((rendered.prompt[end:], False))
    return [piece for piece in pieces if piece[0]]


def _with_effort(pieces: list[tuple[str, bool]], number: int) -> list[tuple[str, bool]]:
    """Put an exact effort into the effort line, the first plain text of a thinking prompt."""
    index = next(i for i, (_, special) in enumerate(pieces) if not special)
    text = pieces[index][0].removeprefix(_EFFORT_LINE)
    line = _EFFORT_LINE + str(number) + text[text.index(" ") :]
    return [*pieces[:index], (line, False), *pieces[index + 1 :]]


def _token_ids(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> tuple[int, ...]:
    ids: list[int] = []
    for text, special in pieces:
        if not special:
            ids += tokenizer.encode_plain(text)
            continue
        token = tokenizer.token_id(text)
        if token is None:
            raise ChatError(
                f"this model's tokenizer has no token {text}, which the chat template needs",
                param="messages",
            )
        ids.append(token)
    return tuple(ids)


def encode_chat(
    tokenizer: Tokenizer,
    request: Mapping[str, Any],
    *,
    max_images: int = 0,
    forced_calls: ForcedCalls = "grammar",
) -> ChatPrompt:
    """Render and encode a chat request.

    Args:
      tokenizer: the model's.
      request: the body of a chat request: messages, tools, tool_choice, response_format, thinking,
        reasoning_effort, chat_template_kwargs, continue_final_message, add_generation_prompt.
      max_images: most image parts; 0 if image input is not enabled.
      forced_calls: how a required or named tool is brought about: "grammar" leaves the prompt as
        for auto, "prompt" opens the block of calls in it (without thinking only).

    Raises:
      ChatError: naming the field and what is wrong, or the token the tokenizer lacks.
    """
    check_nesting(request)
    missing = tokenizer.missing(template_tokens())
    if missing is not None:
        raise ChatError(
            f"this model's tokenizer has no token {missing}, which the chat template needs",
            param="messages",
        )
    messages = read_messages(
        request.get("messages"), continue_final=_read_continue(request), max_images=max_images
    )
    thinking = _read_thinking(request)
    tools = read_tools(request.get("tools"))
    choice = read_tool_choice(request.get("tool_choice"), tools)
    if choice is not None and choice.startswith("="):
        tools = tuple(tool for tool in tools if tool.name == choice[1:])
    if choice in (None, "none"):
        tools = ()
    forced = bool(tools) and choice != "auto"
    opened = forced and forced_calls == "prompt" and not thinking.enabled
    conversation = recipe.Conversation(
        messages.messages,
        thinking_mode=thinking.enabled,
        tools=tools,
        tool_choice="required" if opened else "auto",
        reasoning_effort=thinking.level if thinking.enabled else None,
        **_read_response_format(request.get("response_format")),
    )
    special = recipe.SpecialTokens(image=messages.image_token)
    encoder = recipe.DeepseekV41Encoding().with_special_tokens(special)
    rendered = encoder.render_conversation(conversation)
    pieces = _pieces(rendered)
    if thinking.enabled and thinking.number is not None:
        pieces = _with_effort(pieces, thinking.number)
    pieces = [(IMAGE_TOKEN if p == (messages.image_token, True) else p[0], p[1]) for p in pieces]
    start: Start = "reasoning" if thinking.enabled else "content"
    if opened:
        start = "tool_calls"
    elif messages.continued:
        in_reasoning = thinking.enabled and not messages.last_content
        start = "continued_reasoning" if in_reasoning else "continued_content"
    return ChatPrompt(
        text="".join(text for text, _ in pieces),
        token_ids=_token_ids(tokenizer, pieces),
        thinking=thinking.enabled,
        parse_tool_calls=bool(tools),
        start=start,
        image_urls=tuple(source.url or "" for source in rendered.image_sources),
        tools=tools,
        must_call=forced and not opened,
    )
