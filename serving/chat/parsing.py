"""Sampled ids to reasoning, content and tool calls, through the recipe's stream parser."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import deepseek_recipe as recipe
import orjson

from serving.chat.encoding import Start
from serving.chat.messages import IMAGE_TOKEN
from serving.detokenizer import StopStrings
from serving.tokenizer import Tokenizer

_STAGES = {
    "reasoning": recipe.ThinkingInitialStage.ReasoningStart,
    "continued_reasoning": recipe.ThinkingInitialStage.ReasoningContinuation,
    "continued_content": recipe.ThinkingInitialStage.ContentContinuation,
}


@dataclasses.dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call; `call_id` and `name` come with its first piece only."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one token adds to the assistant's message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class OutputParser:
    """Turns one output's ids into deltas.

    The ids go to the recipe's parser one at a time: given several that end in half a character it
    drops them all. Stop strings count in the content only.

    Attributes:
      num_tokens: ids taken so far.
      stop_reason: the stop string that was found, after which nothing more is taken.
      reasoning_tokens: ids of the reasoning, without the marker that ends it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: Start,
        parse_tool_calls: bool,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
        json_output: bool = False,
    ) -> None:
        """Start a new output.

        Args:
          tokenizer: the model's.
          start: what the output begins with, see `ChatPrompt`.
          parse_tool_calls: whether calls are looked for; otherwise their markup stays in content.
          stop: strings that end the content.
          keep_stop: keep the stop string that is found.
          min_tokens: ids before which stop strings are not looked for.
          json_output: unwrap JSON in a fence.
        """
        options = recipe.ParsingOptions(
            parse_tool_calls=parse_tool_calls,
            starts_in_tool_calls=start == "tool_calls",
            parse_json_output=json_output,
            thinking_initial_stage=_STAGES.get(start),
            special_tokens=recipe.SpecialTokens(image=IMAGE_TOKEN),
        )
        conversation = recipe.ConversationRequest(
            recipe.Conversation([], thinking_mode=start == "reasoning"),
            recipe.ModelVersion.DeepseekV41Flash,
        )
        generator = recipe.ChatCompletionRequest.chunk_generator(conversation, "", "")
        self._processor = recipe.StreamProcessor(generator, options, tokenizer.recipe)
        self._processor.push(recipe.InferenceChunk.ready())
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop, include=keep_stop) if stop else None
        self._min_tokens = min_tokens
        self._finish_reason: str | None = None
        self._reasoning = start in ("reasoning", "continued_reasoning")
        ends = [recipe.SpecialToken.ThinkingEnd.default_str()]
        if parse_tool_calls:
            ends.append(recipe.SpecialToken.Dsml.default_str())
        self._ends_reasoning = frozenset(tokenizer.token_id(token) for token in ends)
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self.reasoning_tokens = 0

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Take ids; after a stop string was found the rest is not taken."""
        deltas = []
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            self._reasoning = self._reasoning and token_id not in self._ends_reasoning
            self.reasoning_tokens += self._reasoning
            if not self._processor.finished and self._tokenizer.has(token_id):
                chunk = recipe.InferenceChunk.tokens([token_id])
                deltas += self._read(self._processor.push(chunk))
        return deltas

    def finish(self, reason: Literal["stop", "length"]) -> tuple[list[Delta], str]:
        """End the output.

        Returns:
          The last deltas, and the finish reason: tool_calls, stop or length.
        """
        deltas = []
        if not self._processor.finished:
            ends = recipe.InferenceFinishReason
            end = recipe.InferenceChunk.finish(ends.Length if reason == "length" else ends.Stop)
            deltas += self._read(self._processor.push(end))
            deltas += self._read(self._processor.finish())
        if self._stops is not None and self.stop_reason is None:
            held = self._stops.release()
            if held:
                deltas.append(Delta(content=held))
        return deltas, self._finish_reason or reason

    def _content(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        if self.stop_reason is not None:
            return ""
        if self.num_tokens <= self._min_tokens:
            return text
        text, self.stop_reason = self._stops.push(text)
        return text

    def _read(self, chunks: Sequence[recipe.ChatCompletionChunk]) -> list[Delta]:
        deltas = []
        for chunk in chunks:
            body = orjson.loads(chunk.to_json())
            for choice in body["choices"]:
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                raw = choice["delta"]
                delta = Delta(
                    raw.get("reasoning_content") or "",
                    self._content(raw.get("content") or ""),
                    tuple(_tool_call(call) for call in raw.get("tool_calls") or ()),
                )
                if delta:
                    deltas.append(delta)
        return deltas


def _tool_call(raw: dict) -> ToolCallDelta:
    function = raw.get("function") or {}
    return ToolCallDelta(
        raw["index"], function.get("arguments") or "", raw.get("id"), function.get("name")
    )
