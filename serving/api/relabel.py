"""Errors of a chat in the words of the request that the chat was made from."""

import re
from collections.abc import Sequence

from serving.api.errors import ApiError

Names = Sequence[tuple[str, str]]


def relabel(error: ApiError, origins: Sequence[str], field: str, names: Names) -> ApiError:
    """The error with its text and `param` naming what the client sent.

    Args:
      error: of the chat.
      origins: where each of the chat's messages comes from, as the client wrote it.
      field: the client's field of the conversation.
      names: regular expressions of the chat's fields, and the client's names for them.
    """
    fields = [field]

    def origin(match: re.Match[str]) -> str:
        where = origins[int(match[1])]
        fields.append(where.partition("[")[0])
        # A field that is a whole message has its content as its value.
        return where + (match[2] or "") if where.endswith("]") else where

    def own(text: str) -> str:
        for name, theirs in names:
            text = re.sub(rf"(?<![\w.]){name}(?!\w)", theirs, text)
        return text

    text = own(re.sub(r"messages\[(\d+)\](\.content)?", origin, str(error)))
    param = error.param
    if param == "messages":
        param = fields[-1]
    elif param == "prompt":
        param = field
    elif param is not None:
        param = own(param)
    return ApiError(error.status, text, param=param, kind=error.kind)
