"""Chat vectors of a directory against the encoder, the parser and the tokenizer."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from serving.chat.encoding import ChatError, Start, encode_chat
from serving.chat.parsing import OutputParser
from serving.tokenizer import Tokenizer

CHUNKS = (1, 2, 3, 5, 7, 16, None)
_MANY = 1000  # images: more than any vector has
_STARTS: Mapping[str, Start] = {
    "ReasoningStart": "reasoning",
    "ReasoningContinuation": "continued_reasoning",
    "ContentContinuation": "continued_content",
}


class VectorError(ValueError):
    """A directory or file that holds no chat vectors."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One vector: its file, its id and what differs; nothing differs if it passed."""

    file: str
    vector: str
    differences: tuple[str, ...]


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"


def _first_difference(name: str, expected: Any, found: Any) -> list[str]:
    if expected == found:
        return []
    where = ""
    if isinstance(expected, (str, list)) and isinstance(found, type(expected)):
        same = next(
            (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
            min(len(expected), len(found)),
        )
        begin = max(0, same - 20)
        where = f" from position {same}"
        expected, found = expected[begin : same + 80], found[begin : same + 80]
    return [f"{name} differs{where}: expected {_shorten(expected)}, found {_shorten(found)}"]


def check_encoding(tokenizer: Tokenizer, vector: Mapping[str, Any]) -> list[str]:
    """What differs for one vector of encode.json."""
    try:
        prompt = encode_chat(tokenizer, vector["request"], max_images=_MANY, forced_calls="prompt")
    except ChatError as error:
        return [f"refused: {error}"]
    differences = _first_difference("prompt", vector["prompt"], prompt.text)
    differences += _first_difference(
        "prompt_token_ids", list(vector["prompt_token_ids"]), list(prompt.token_ids)
    )
    urls = vector.get("image_urls") or []
    return differences + _first_difference("image_urls", urls, list(prompt.image_urls))


def parse_output(
    tokenizer: Tokenizer, vector: Mapping[str, Any], chunk: int | None
) -> dict[str, Any]:
    """The message of one vector of parse.json, its ids given `chunk` at a time (None: at once)."""
    options = vector["options"]
    start: Start = "reasoning" if options.get("thinking", True) else "content"
    if options.get("stage"):
        start = _STARTS[options["stage"]]
    if options.get("starts_in_tool_calls"):
        start = "tool_calls"
    parser = OutputParser(
        tokenizer,
        start=start,
        parse_tool_calls=options.get("parse_tool_calls", True),
        stop=options.get("stop") or (),
        json_output=options.get("json_output", False),
    )
    ids = vector["output_token_ids"]
    step = chunk or max(1, len(ids))
    deltas = []
    for begin in range(0, len(ids), step):
        deltas += parser.push(ids[begin : begin + step])
    last, finish_reason = parser.finish(options.get("finish", "stop"))
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    for delta in [*deltas, *last]:
        message["reasoning_content"] += delta.reasoning
        message["content"] += delta.content
        for call in delta.tool_calls:
            if call.name is not None:
                message["tool_calls"].append({"name": call.name, "arguments": ""})
            message["tool_calls"][call.index]["arguments"] += call.arguments
    return {**message, "finish_reason": finish_reason}


def check_parsing(tokenizer: Tokenizer, vector: Mapping[str, Any]) -> list[str]:
    """What differs for one vector of parse.json, over all chunk sizes."""
    expected = {
        **vector["expected"],
        "tool_calls": [
            {"name": call["name"], "arguments": call["arguments"]}
            for call in vector["expected"]["tool_calls"]
        ],
    }
    differences = []
    for chunk in CHUNKS:
        found = parse_output(tokenizer, vector, chunk)
        fed = "all at once" if chunk is None else f"in chunks of {chunk}"
        for name, value in found.items():
            differences += _first_difference(f"{name}, fed {fed},", expected[name], value)
    return differences


def check_tokenizer(tokenizer: Tokenizer, vector: Mapping[str, Any]) -> list[str]:
    """What differs for one vector of tokenizer.json."""
    ids = list(vector["ids"])
    differences = []
    if "text" in vector:
        differences += _first_difference("ids", ids, tokenizer.encode(vector["text"]))
    for name, skip in (("decoded", False), ("decoded_skip_special", True)):
        if name in vector:
            found = tokenizer.decode(ids, skip_special_tokens=skip)
            differences += _first_difference(name, vector[name], found)
    return differences


_FILES: Mapping[str, Callable[[Tokenizer, Mapping[str, Any]], list[str]]] = {
    "encode.json": check_encoding,
    "parse.json": check_parsing,
    "tokenizer.json": check_tokenizer,
}


def verify_directory(directory: Path, tokenizer: Tokenizer) -> Iterator[Outcome]:
    """Check every vector of a directory.

    Raises:
      VectorError: naming what is missing or broken.
    """
    for name, check in _FILES.items():
        file = directory / name
        try:
            vectors = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise VectorError(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise VectorError(f"{file} is not JSON: {error}") from error
        if not isinstance(vectors, list) or not vectors:
            raise VectorError(f"{file} must hold a list of at least one vector")
        for index, vector in enumerate(vectors):
            try:
                label = str(vector.get("id", index))
                differences = check(tokenizer, vector)
            except (AttributeError, KeyError, TypeError) as error:
                raise VectorError(f"{file}: entry {index} is not a vector: {error!r}") from error
            yield Outcome(name, label, tuple(differences))
