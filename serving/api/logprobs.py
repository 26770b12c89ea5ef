"""Log-probabilities in the shapes of completions and chats."""

from collections.abc import Sequence
from typing import Any

from serving.detokenizer import Detokenizer, Vocabulary
from serving.request import TokenLogprob
from serving.tokenizer import Tokenizer

_LEAST = -9999.0  # stands for minus infinity, which JSON cannot carry


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _name(tokenizer: Tokenizer, token_id: int, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


class TextOffsets:
    """Where tokens begin in a choice's text; what is left out of the text takes no room."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._prompt = Detokenizer(vocabulary, skip_special_tokens=False)
        self._output = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
        self._length = 0

    def of_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Offsets of a prompt that the text begins with, special tokens and all."""
        offsets = self._advance(self._prompt, token_ids)
        self._length += len(self._prompt.finish())
        return offsets

    def of_output(self, token_ids: Sequence[int]) -> list[int]:
        """Offsets of the next generated tokens."""
        return self._advance(self._output, token_ids)

    def _advance(self, detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token in token_ids:
            offsets.append(self._length)
            self._length += len(detokenizer.push(token))
        return offsets


def completion_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    *,
    offsets: Sequence[int],
    as_ids: bool,
) -> dict[str, Any]:
    """`logprobs` of a completion's choice.

    Args:
      tokenizer: the model's.
      entries: one per token; None for a prompt's first token.
      token_ids: the tokens.
      offsets: characters of the choice before each of these tokens.
      as_ids: name tokens by their ids.
    """
    tokens = [_name(tokenizer, token, as_ids=as_ids) for token in token_ids]
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        own = (entry.token_id, entry.logprob)
        for token, logprob in (*entry.top, own, *entry.watched):
            top.setdefault(_name(tokenizer, token, as_ids=as_ids), _finite(logprob))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], *, as_ids: bool
) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": _name(tokenizer, token_id, as_ids=as_ids),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {
            **one(entry.token_id, entry.logprob),
            "top_logprobs": [one(*pair) for pair in dict.fromkeys((*entry.top, *entry.watched))],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None] | None
) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` as vLLM sends them: per token, a table by token id."""
    if entries is None:
        return None
    tables: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            tables.append(None)
            continue
        table = {
            str(token): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token),
            }
            for rank, (token, logprob) in enumerate(entry.top, 1)
        }
        table[str(entry.token_id)] = {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": tokenizer.token_text(entry.token_id),
        }
        tables.append(table)
    return tables
