"""Grammars that an output has to follow, as sets of allowed tokens (llguidance)."""

import json
import logging
import re
import threading
from collections import OrderedDict

import llguidance
import numpy as np

from serving.detokenizer import Vocabulary
from serving.request import Grammar, RequestError

_LOG = logging.getLogger(__name__)
_REMEMBERED = 64  # compiled grammars kept for the next request that brings them
_FUEL = 100_000  # work spent on a grammar at first; much more holds a thread up for seconds
_EXCERPT = re.compile(r"\s*(\d+ \| |\^\s*$)")  # lines of a message that show the grammar
_BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"  # between JSON tokens: bounded, so that an output ends


class GrammarState:
    """How far one output has come in its grammar."""

    def __init__(
        self, matcher: llguidance.LLMatcher, *, starts_after: int | None, eos_token_id: int
    ) -> None:
        self._matcher = matcher
        self._starts_after = starts_after
        self._eos = eos_token_id
        self._is_over = False

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained: begun, and not past its end token."""
        return self._starts_after is None and not self._is_over

    @property
    def awaited(self) -> int | None:
        """The token that the grammar begins after; None once it has begun."""
        return self._starts_after

    def push(self, token: int) -> None:
        """Takes note of a sampled token."""
        if self._starts_after is not None:
            if token == self._starts_after:
                self._starts_after = None
        elif token == self._eos or not self._matcher.consume_token(token):
            self._is_over = True

    def write(self, words: np.ndarray) -> None:
        """Sets uint32[W] words to the tokens that may come next; EOS alone once it is complete."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            _LOG.warning("a grammar became too complex; its output ends early")


class GrammarCompiler:
    """Turns grammars into states over one vocabulary; safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, *, vocab_size: int, eos_token_id: int) -> None:
        """
        Args:
          vocabulary: the tokens' bytes; its added tokens never stand for their spelling.
          vocab_size: V.
          eos_token_id: what an output ends with.
        """
        self._eos = eos_token_id
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary, vocab_size, eos_token_id)),
            n_vocab=vocab_size,
            eos_token=eos_token_id,
        )
        self._compiled: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> GrammarState:
        """The grammar at its beginning.

        Raises:
          RequestError: it is no grammar, or one that is too large.
        """
        key = (grammar.kind, grammar.text)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                matcher = matcher.deep_copy()
        if matcher is None:
            matcher = self._compile(grammar)
            with self._lock:
                self._compiled[key] = matcher.deep_copy()
                if len(self._compiled) > _REMEMBERED:
                    self._compiled.popitem(last=False)
        return GrammarState(matcher, starts_after=grammar.starts_after, eos_token_id=self._eos)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(initial_lexer_fuel=_FUEL)
        matcher = llguidance.LLMatcher(
            self._tokenizer, _source(grammar), log_level=0, limits=limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too large to be used shows here
        if matcher.is_error():
            raise _bad(grammar, matcher.get_error())
        return matcher


class _Tokens:
    """The vocabulary as llguidance wants it."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [vocabulary.bytes_of(token) for token in range(vocab_size)]
        self.special_token_ids = sorted({eos_token_id, *vocabulary.special, *vocabulary.added})
        special = frozenset(self.special_token_ids)
        self._of_byte = {
            piece[0]: token
            for token, piece in enumerate(self.tokens)
            if len(piece) == 1 and token not in special
        }

        self._encode = vocabulary.encode

    def __call__(self, text: bytes) -> list[int]:
        """Ids of text that a grammar forces: the mask lets only these through, so they are the
        tokenizer's own; what is no whole text is taken byte by byte.
        """
        if self._encode is not None:
            try:
                return self._encode(text.decode())
            except UnicodeDecodeError:
                pass
        return [self._of_byte[byte] for byte in text if byte in self._of_byte]


def _source(grammar: Grammar) -> str:
    matcher, text = llguidance.LLMatcher, grammar.text
    options = {"whitespace_flexible": True, "whitespace_pattern": _BLANKS}
    match grammar.kind:
        case "json_object":
            return matcher.grammar_from_json_schema('{"type": "object"}', overrides=options)
        case "json_schema":
            if not isinstance(_json(grammar), dict | bool):
                raise _bad(grammar, "a schema is a JSON object")
            return matcher.grammar_from_json_schema(text, overrides=options)
        case "regex":
            return matcher.grammar_from_regex(text)
        case "choice":
            choices = _json(grammar)
            is_list = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
            if not is_list or not choices:
                raise _bad(grammar, "choices are a JSON list of texts that are not empty")
            quoted = " | ".join(_quoted(choice) for choice in choices)
            return matcher.grammar_from_lark(f"start: {quoted}")
        case "lark":
            return matcher.grammar_from_lark(text)


def _quoted(text: str) -> str:
    # A string of Lark is one of JSON, but for DEL, which it takes escaped only.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _json(grammar: Grammar) -> object:
    try:
        return json.loads(grammar.text)
    except ValueError as error:
        raise _bad(grammar, str(error)) from None


def _bad(grammar: Grammar, reason: str) -> RequestError:
    lines = reason.split("\n<state>")[0].splitlines()
    said = [line for line in lines if not _EXCERPT.match(line)]
    first = " ".join(" ".join(said).split())
    return RequestError(f"the {grammar.kind} grammar cannot be used: {first}", param="grammar")
