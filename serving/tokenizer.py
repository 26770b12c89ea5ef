"""The checkpoint's byte-level tokenizer: text to ids and back, with or without added tokens."""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import deepseek_recipe
import tokenizers


class TokenizerError(ValueError):
    """A tokenizer file that is missing or cannot be used."""


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """A `tokenizer.json`, read once; nothing in it changes afterwards.

    Attributes:
      backend: the tokenizer with its added tokens.
      recipe: the same file for the chat parser.
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
        except Exception as error:  # the bindings raise bare Exception for a bad file
            raise TokenizerError(f"not a tokenizer: {error}") from error
        added = content.get("added_tokens") or []
        self._added = {token["id"]: token["content"] for token in added}
        self._special_ids = frozenset(token["id"] for token in added if token.get("special"))
        self._alphabet = _byte_alphabet()
        self.token_bytes = functools.lru_cache(maxsize=65536)(self._token_bytes)

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

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of the text."""
        return self._special_ids

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

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if any(letter not in self._alphabet for letter in token):
            return token.encode()
        return bytes(self._alphabet[letter] for letter in token)

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no character by themselves become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def missing(self, tokens: Iterable[str]) -> str | None:
        """The first of `tokens` that is not in the vocabulary, or None."""
        return next((token for token in tokens if self.token_id(token) is None), None)
