"""Bodies of POST /v1/responses, turned into those of a chat.

Nothing is stored: what refers to an earlier response, or asks to be answered later, is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from serving.api.errors import bad_request
from serving.api.protocol import ChatBody, GenerationBody

_SAMPLING = set(GenerationBody.model_fields)
# What a chat calls its fields, and what they are here.
NAMES = (
    (r"max_completion_tokens", "max_output_tokens"),
    (r"response_format(\.json_schema)?", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
)
_LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(GenerationBody):
    """Body of POST /v1/responses; sampling options beyond OpenAI's are those of a chat."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    thinking: Any = None
    chat_template_kwargs: Any = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None


def _refuse_state(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise bad_request(
                f"{name} is not supported: responses are not stored; send the whole input", name
            )
    if body.background:
        raise bad_request("background is not supported: responses are not stored", "background")
    if body.truncation not in (None, "disabled"):
        raise bad_request(
            f"truncation is {body.truncation!r}; only disabled is supported", "truncation"
        )
    if body.n not in (None, 1):
        raise bad_request(f"n is {body.n}; a response has one answer", "n")
    if body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not supported by responses", "prompt_logprobs")


def _tools(tools: Any) -> Any:
    """Tools as a chat has them: what describes the function is one level deeper."""
    if not isinstance(tools, list) or not tools:
        return None
    converted = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise bad_request(
                f"tools[{index}] is of type {kind}; only functions are supported", "tools"
            )
        function = tool.get("function") or {k: v for k, v in tool.items() if k != "type"}
        converted.append({"type": "function", "function": function})
    return converted


def _tool_choice(choice: Any, tools: Any) -> Any:
    if choice == "auto" and not tools:
        return None  # clients send it whether or not there is a choice
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(text: Mapping[str, Any] | None) -> Any:
    """`response_format` of a chat, from `text.format`."""
    form = (text or {}).get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {
            "type": "json_schema",
            "json_schema": {k: v for k, v in form.items() if k != "type"},
        }
    return form


class _Messages:
    """Input items gathered into messages: what the assistant did in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._open = False

    def add(self, origin: str, message: dict[str, Any]) -> None:
        """A message of its own."""
        self.messages.append(message)
        self.origins.append(origin)
        self._open = message["role"] == "assistant"

    def _assistant(self, origin: str, taken: Sequence[str]) -> dict[str, Any]:
        """The assistant's message to add to, a new one if it has any of these already."""
        if not self._open or any(name in self.messages[-1] for name in taken):
            self.add(origin, {"role": "assistant"})
        return self.messages[-1]

    def item(self, origin: str, item: Any) -> None:
        """One item of the input.

        Raises:
          ApiError: 400, naming the item and what is wrong with it.
        """
        if not isinstance(item, Mapping):
            raise bad_request(f"{origin} must be an object", "input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [p.get("text") for p in parts if isinstance(p, Mapping)]
            text = "\n\n".join(text for text in texts if isinstance(text, str))
            taken = ("reasoning_content", "content", "tool_calls")
            self._assistant(origin, taken)["reasoning_content"] = text
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            self._assistant(origin, ()).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            message = {"role": "tool", "tool_call_id": item.get("call_id")}
            self.add(origin, message | {"content": item.get("output")})
        elif kind != "message":
            raise bad_request(f"{origin} is of type {kind!r}, which is not supported", "input")
        elif item.get("role") == "assistant":
            message = self._assistant(origin, ("content", "tool_calls"))
            message["content"] = item.get("content")
        else:
            self.add(origin, {"role": item.get("role"), "content": item.get("content")})


def chat_body(body: ResponsesBody) -> tuple[ChatBody, list[str]]:
    """The chat that a response is, and where each of its messages comes from.

    Raises:
      ApiError: 400, naming the field that is wrong or not supported.
    """
    _refuse_state(body)
    gathered = _Messages()
    if body.instructions:
        gathered.add("instructions", {"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        gathered.add("input", {"role": "user", "content": body.input})
    elif isinstance(body.input, list) and body.input:
        for index, item in enumerate(body.input):
            gathered.item(f"input[{index}]", item)
    else:
        raise bad_request("input must be a string or a list of at least one item", "input")
    fields = body.model_dump(include=_SAMPLING, exclude={"stream_options"})
    wanted = _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    tools = _tools(body.tools)
    fields |= {
        "messages": gathered.messages,
        "tools": tools,
        "tool_choice": _tool_choice(body.tool_choice, tools),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text),
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "thinking": body.thinking,
        "chat_template_kwargs": body.chat_template_kwargs,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": wanted,
        "top_logprobs": body.top_logprobs if wanted else None,
    }
    return ChatBody.model_construct(**fields), gathered.origins
