"""Token counts of an answer."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Usage:
    """Counts that grow while a request is answered.

    Attributes:
      prompt_tokens: of all prompts, each once however many choices it has.
      completion_tokens: of all choices.
      cached_tokens: prompt tokens whose cache rows were reused, of each prompt once.
      reasoning_tokens: completion tokens inside the reasoning; None leaves the field out.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None

    def body(self) -> dict[str, Any]:
        """As OpenAI sends it."""
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return body
