"""Log-probabilities in the shapes of completions and chats."""

from collections.abc import Sequence
from typing import Any

from serving.request import TokenLogprob
from serving.tokenizer import Tokenizer

_LEAST = -9999.0  # stands for minus infinity, which JSON cannot carry


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _name(tokenizer: Tokenizer, token_id: int, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


def completion_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    *,
    offset: int,
    as_ids: bool,
) -> dict[str, Any]:
    """`logprobs` of a completion's choice.

    Args:
      tokenizer: the model's.
      entries: one per token; None for a prompt's first token.
      token_ids: the tokens.
      offset: characters of the choice before the first of these tokens.
      as_ids: name tokens by their ids.
    """
    tokens = [_name(tokenizer, token, as_ids=as_ids) for token in token_ids]
    offsets = []
    for token in token_ids:
        offsets.append(offset)
        offset += len(tokenizer.token_text(token))
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
        "text_offset": offsets,
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
