"""The checkpoint's byte-level tokenizer: text to ids and back, with or without added tokens."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepseek_recipe
import tokenizers

from serving.detokenizer import Vocabulary, vocabulary


class TokenizerError(ValueError):
    """A tokenizer file that is missing or cannot be used."""


def tokenizer_info(path: Path, special: Mapping[str, str | None]) -> dict[str, Any]:
    """The directory's tokenizer_config.json, if there is one that can be read.

    Args:
      path: the model directory.
      special: tokens by name, such as eos_token, for what the file leaves out.
    """
    try:
        content = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = {}
    info = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": None, **special}
    return info | (content if isinstance(content, dict) else {})


class Tokenizer:
    """A `tokenizer.json`, read once; nothing in it changes afterwards.

    Attributes:
      backend: the tokenizer with its added tokens.
      recipe: the same file for the chat parser.
      vocabulary: the bytes of every token, and which tokens are special.
    """

    def __init__(self, text: str) -> None:
        """Read the text of a `tokenizer.json`.

        Raises:
          TokenizerError: if it is not a tokenizer.
        """
        try:
            content = json.loads(text)
            self.backend = tokenizers.Tokenizer.from_str(text)
            self._plain = tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))
            self.recipe = deepseek_recipe.Tokenizer.from_str(text)
            self.vocabulary: Vocabulary = dataclasses.replace(
                vocabulary(self.backend), encode=self.encode_plain
            )
        except Exception as error:  # the bindings raise bare Exception for a bad file
            raise TokenizerError(f"not a tokenizer: {error}") from error

    @classmethod
    def open(cls, path: Path) -> "Tokenizer":
        """Read `path` (a directory or a file).

        Raises:
          TokenizerError: naming the file, if it is missing or not a tokenizer.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise TokenizerError(
                f"{file} cannot be read ({error.strerror or error}); a model directory needs the "
                "tokenizer.json of its checkpoint"
            ) from error
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{file} is not UTF-8 text: {error}") from error
        except TokenizerError as error:
            raise TokenizerError(f"{file} is {error}") from error

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; spellings of added tokens become those tokens, and no BOS is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` without the added vocabulary, so that it cannot forge a special token."""
        return self._plain.encode(text, add_special_tokens=False).ids if text else []

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; ids without a token add nothing."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of the token spelled `token`, or None."""
        return self.backend.token_to_id(token)

    def has(self, token_id: int) -> bool:
        """Whether the id has a token."""
        return self.backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for ids without a token."""
        return self.vocabulary.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no character by themselves become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def missing(self, tokens: Iterable[str]) -> str | None:
        """The first of `tokens` that is not in the vocabulary, or None."""
        return next((token for token in tokens if self.token_id(token) is None), None)
