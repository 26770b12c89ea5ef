"""Bodies of POST /v1/messages, turned into those of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from serving.api.errors import bad_request
from serving.api.protocol import ChatBody, GenerationBody

_SAMPLING = set(GenerationBody.model_fields)
# What a chat calls its fields, and what they are here.
_NAMES = (
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
)


class CountBody(GenerationBody):
    """Body of POST /v1/messages/count_tokens: what makes the prompt.

    Sampling options beyond Anthropic's are those of a chat. `thinking.budget_tokens` is checked
    and not enforced: clients send it whenever they enable thinking.
    """

    messages: Any = None
    system: Any = None
    tools: Any = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: Any = None


class MessagesBody(CountBody):
    """Body of POST /v1/messages."""

    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None


class _Messages:
    """Messages of a chat, and where each comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []

    def add(self, origin: str, **message: Any) -> None:
        """One message."""
        self.messages.append(message)
        self.origins.append(origin)

    def assistant(self, origin: str, blocks: Sequence[Any]) -> None:
        """The blocks of an assistant's message.

        Raises:
          ApiError: 400, naming a block that an assistant cannot have.
        """
        message: dict[str, Any] = {"role": "assistant"}
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(blocks):
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "text":
                texts.append(block)
            elif kind == "thinking":
                thoughts.append(_string(block, "thinking", f"{origin}.content[{index}]"))
            elif kind == "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind != "redacted_thinking":
                raise _unknown(f"{origin}.content[{index}]", kind)
        message["content"] = texts
        if thoughts:
            message["reasoning_content"] = "\n\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.add(origin, **message)

    def user(self, origin: str, role: Any, blocks: Sequence[Any]) -> None:
        """The blocks of a user's message; tool results become messages of their own, in place.

        Raises:
          ApiError: 400, naming a block that a user cannot have.
        """
        parts: list[Any] = []
        for index, block in enumerate(blocks):
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "tool_result":
                if parts:
                    self.add(origin, role=role, content=parts)
                    parts = []
                content = block.get("content")
                content = "" if content is None else content
                self.add(
                    origin, role="tool", tool_call_id=block.get("tool_use_id"), content=content
                )
            elif kind in ("text", "image"):
                parts.append(block)
            else:
                raise _unknown(f"{origin}.content[{index}]", kind)
        if parts or not blocks:
            self.add(origin, role=role, content=parts)


def _unknown(where: str, kind: Any) -> Exception:
    return bad_request(f"{where} is of type {kind!r}, which is not supported", "messages")


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", "messages")
    return value


def _tools(tools: Any) -> Any:
    if not isinstance(tools, list) or not tools:
        return None
    converted = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            raise bad_request(
                f"tools[{index}] is of type {kind!r}; only tools of the client are supported",
                "tools",
            )
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
            "strict": tool.get("strict"),
        }
        converted.append({"type": "function", "function": function})
    return converted


def _tool_choice(choice: Mapping[str, Any] | None, tools: Any) -> Any:
    kind = None if choice is None else choice.get("type")
    if kind == "auto" and not tools:
        return None  # clients send it whether or not there is a choice
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in (None, "auto", "any", "none"):
        raise bad_request(
            f"tool_choice.type is {kind!r}; it must be auto, any, tool or none", "tool_choice"
        )
    return "required" if kind == "any" else kind


def _check_budget(thinking: Mapping[str, Any] | None) -> None:
    budget = (thinking or {}).get("budget_tokens")
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise bad_request(
            f"thinking.budget_tokens is {budget!r}; it must be a whole number of at least 1",
            "thinking",
        )


def _response_format(config: Mapping[str, Any]) -> Any:
    form = config.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return form


def names(body: CountBody) -> tuple[tuple[str, str], ...]:
    """What a chat calls the fields of this body, as `relabel` takes it."""
    stops = isinstance(body, MessagesBody) and body.stop_sequences is not None
    return (*_NAMES, ("stop", "stop_sequences")) if stops else _NAMES


def chat_body(body: CountBody) -> tuple[ChatBody, list[str]]:
    """The chat that a request is, and where each of its messages comes from.

    Raises:
      ApiError: 400, naming the field that is wrong or not supported.
    """
    if body.n not in (None, 1):
        raise bad_request(f"n is {body.n}; a message has one answer", "n")
    if body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not supported by messages", "prompt_logprobs")
    _check_budget(body.thinking)
    gathered = _Messages()
    if body.system:
        gathered.add("system", role="system", content=body.system)
    if not isinstance(body.messages, list) or not body.messages:
        raise bad_request("messages must be a list of at least one message", "messages")
    for index, message in enumerate(body.messages):
        origin = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise bad_request(f"{origin} must be an object with role and content", "messages")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(
                f"{origin}.role is {role!r}; it must be user or assistant", "messages"
            )
        if not isinstance(content, list):
            gathered.add(origin, role=role, content=content)
        elif role == "assistant":
            gathered.assistant(origin, content)
        else:
            gathered.user(origin, role, content)
    fields = body.model_dump(include=_SAMPLING)
    tools = _tools(body.tools)
    choice = body.tool_choice or {}
    config = body.output_config or {}
    fields |= {
        "messages": gathered.messages,
        "tools": tools,
        "tool_choice": _tool_choice(body.tool_choice, tools),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        "thinking": body.thinking,
        "reasoning_effort": config.get("effort"),
        "response_format": _response_format(config),
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    if gathered.messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    return ChatBody.model_construct(**fields), gathered.origins
