"""What a request says about the form of its output."""

from serving.api.context import Context
from serving.api.errors import bad_request
from serving.api.protocol import ChatBody
from serving.api.sampling import Options
from serving.chat import ChatPrompt


def constrain(context: Context, body: ChatBody, prompt: ChatPrompt, options: Options) -> Options:
    """The options with what holds a chat's output to its form.

    Raises:
      ApiError: 400, for a form that is not supported.
    """
    if body.tool_choice == "required" or isinstance(body.tool_choice, dict):
        raise bad_request(
            "tool_choice required or a named function is not supported by this server; use auto "
            "or none",
            "tool_choice",
        )
    kind = body.response_format.get("type") if isinstance(body.response_format, dict) else None
    if kind is not None and kind != "text":
        raise bad_request(
            f"response_format of type {kind} is not supported by this server", "response_format"
        )
    return options
