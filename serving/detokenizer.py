"""Tokens to text, one token at a time: whole characters only, ended by stop strings."""

import codecs
import dataclasses
from collections.abc import Callable, Iterable

import tokenizers


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What each token adds to the text.

    Attributes:
      token_bytes: by token id; empty for ids that the tokenizer does not have.
      special: ids that `skip_special_tokens` leaves out.
      added: ids of the added vocabulary, which no text is encoded to by its spelling alone.
      encode: the tokenizer's own ids of plain text; None for one token per byte.
    """

    token_bytes: tuple[bytes, ...]
    special: frozenset[int]
    added: frozenset[int] = frozenset()
    encode: Callable[[str], list[int]] | None = dataclasses.field(default=None, compare=False)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; empty past the tokenizer's last id."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""


def vocabulary(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    """Reads the bytes of every token of a byte-level tokenizer.

    Raises:
      ValueError: the tokenizer does not decode byte by byte.
    """
    if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
        raise ValueError(
            f"the tokenizer's decoder is {type(tokenizer.decoder).__name__}; "
            "a checkpoint of this model has a ByteLevel one"
        )
    alphabet = _byte_alphabet()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        if all(letter in alphabet for letter in token):
            table[token_id] = bytes(alphabet[letter] for letter in token)
        else:  # an added token that is not spelled in the alphabet stands for itself
            table[token_id] = token.encode()
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    return Vocabulary(tuple(table), special, frozenset(added))


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


class Detokenizer:
    """Text of a growing token list; the pieces joined equal decoding all of it at once."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters this token completes; bytes of an unfinished one are held back."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def finish(self) -> str:
        """What stands for bytes that never became a character."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text at the first stop string, wherever the pieces of the text are cut.

    The first is the one whose last character comes first; of several that end together, the
    longest.
    """

    def __init__(self, stops: Iterable[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that is decided now, and the stop string if one was found."""
        text = self._held + piece
        found = self._find(text)
        if found is not None:
            end, stop = found
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        held = self._undecided(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def release(self) -> str:
        """Gives up what is held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        ends = [
            (start + len(stop), -len(stop), stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stops), default=0))
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The text of one request: detokenized, and ended by its stop strings."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool,
        stop: Iterable[str],
        include_stop: bool,
        min_tokens: int,
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop, include=include_stop)
        self._uninspected = min_tokens

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Returns the new text that is decided, and the stop string if one was found."""
        piece = self._detokenizer.push(token_id)
        if self._uninspected:
            self._uninspected -= 1
            return piece, None
        return self._stops.push(piece)

    def finish(self) -> tuple[str, str | None]:
        """Returns the text held back so far, and the stop string if its end makes one."""
        piece, stop = self._stops.push(self._detokenizer.finish())
        return piece + self._stops.release(), stop
