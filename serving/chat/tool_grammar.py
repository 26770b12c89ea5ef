"""Grammars of tool calls in the template's markup, as llguidance's Lark.

A parameter that is any string, or one of several, is raw text; every other value is JSON under
its schema, which the markup takes for strings as well. Parameters stand in their schema's order.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import deepseek_recipe as recipe

_ANY_OBJECT = {"type": "object"}
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIMITS = ("enum", "const", "pattern", "format", "minLength", "maxLength", "$ref", "allOf", "not")
_BRANCHES = ("anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
_GAP = "\n\n<"
_TEXT, _JSON, _END = 'true">', 'false">', " parameter>\n"


def _quoted(content: Any) -> str:
    # Lark takes what JSON does, but for DEL, which it takes escaped only.
    return json.dumps(content, ensure_ascii=False).replace("\x7f", "\\u007f")


def _json(schema: Any, root: Mapping[str, Any], *, strict: bool) -> str:
    """A JSON value under a schema, with the definitions that it may refer to.

    What cannot be enforced is an error if `strict`, and otherwise left to the model.
    """
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    content = {**shared, **schema} if isinstance(schema, Mapping) else {}
    options = _JSON_OPTIONS | {"lenient": not strict}
    return f"%json {_quoted({**content, 'x-guidance': options})}"


def _split_choices(schema: Any) -> tuple[list[str], Any]:
    """The strings of an enumeration, and the schema of its other values; None for none."""
    if not isinstance(schema, Mapping) or not {"enum", "const"} & schema.keys():
        return [], schema
    values = schema.get("enum") if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or any(name in schema for name in _LIMITS[2:]):
        return [], schema
    others = [value for value in values if not isinstance(value, str)]
    texts = [value for value in values if isinstance(value, str)]
    return texts, {"enum": others} if others else None


def _kinds(schema: Any) -> tuple[bool, bool]:
    """Whether raw text, and whether JSON, is a value of the schema."""
    if not isinstance(schema, Mapping):
        return True, True
    if any(name in schema for name in (*_LIMITS, *_BRANCHES)):
        return False, True
    kind = schema.get("type")
    if kind is None:
        return True, True
    kinds = kind if isinstance(kind, list) else [kind]
    return "string" in kinds, kinds != ["string"]


class _Rules:
    """The rules of one grammar; every name is used once."""

    def __init__(self, dsml: int) -> None:
        self._mark = f"<[{dsml}]>"
        self._lines: list[str] = []

    def rule(self, name: str, body: str) -> str:
        """Adds a rule and returns its name."""
        self._lines.append(f"{name}: {body}")
        return name

    def text(self) -> str:
        """The grammar; `start` is among its rules."""
        return "\n".join([*self._lines, r"TEXT: /(?s:.*)<\//", 'KEY: /[^"]+/', ""])

    def opening(self, rest: str) -> str:
        """`<｜DSML｜` and what follows it."""
        return f'"<" {self._mark} {_quoted(rest)}'

    def closing(self, rest: str) -> str:
        """`</｜DSML｜` and what follows it."""
        return f'"</" {self._mark} {_quoted(rest)}'

    def _value(self, name: str, schema: Any, root: Mapping[str, Any], *, strict: bool) -> str:
        choices, schema = _split_choices(schema)
        text, as_json = (False, False) if choices and schema is None else _kinds(schema)
        end = f"{self._mark} {_quoted(_END)}"
        forms = []
        if choices:
            texts = " | ".join(_quoted(choice) for choice in choices)
            forms.append(f'{_quoted(_TEXT)} ({texts}) "</" {end}')
        if text:
            # The mark is no text, so that the longest text before it ends in what precedes it.
            forms.append(f"{_quoted(_TEXT)} TEXT {end}")
        if as_json:
            value = self.rule(f"{name}_json", _json(schema, root, strict=strict))
            forms.append(f'{_quoted(_JSON)} {value} "</" {end}')
        return self.rule(f"{name}_value", " | ".join(forms))

    def call(self, name: str, tool: recipe.ToolDefinition) -> str:
        """One invocation of a tool."""
        schema = tool.parameters if isinstance(tool.parameters, Mapping) else {}
        properties, strict = schema.get("properties"), bool(tool.strict)
        parts = []
        if isinstance(properties, Mapping) and properties:
            required = schema.get("required") or ()
            for index, (key, of_key) in enumerate(properties.items()):
                part = f"{name}_{index}"
                value = self._value(part, of_key, schema, strict=strict)
                begin = self.opening(f' parameter name="{key}" string="')
                parameter = self.rule(part, f"{begin} {value}")
                parts.append(parameter if key in required else f"{parameter}?")
        elif schema.get("additionalProperties") is not False:
            value = self._value(f"{name}_any", {}, {}, strict=strict)
            begin, middle = self.opening(' parameter name="'), _quoted('" string="')
            parts.append(self.rule(f"{name}_more", f"{begin} KEY {middle} {value}") + "*")
        parameters = " ".join(parts) if parts else '"\\n"'
        begin, end = self.opening(f' invoke name="{tool.name}">\n'), self.closing(" invoke>\n")
        return self.rule(name, f"{begin} {parameters} {end}")


def tool_grammar(
    tools: Sequence[recipe.ToolDefinition],
    *,
    dsml: int,
    forced: bool,
    one_call: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer that calls tools.

    Args:
      tools: that may be called.
      dsml: id of the token that marks the markup's tags.
      forced: whether the answer is calls and nothing else; otherwise text may come first, and
        calls may be left out.
      one_call: whether there is one call at most.
      answer: schema of an answer without calls; None for any text.
    """
    rules = _Rules(dsml)
    call = rules.rule("call", " | ".join(rules.call(f"tool{i}", t) for i, t in enumerate(tools)))
    block = f"{call}{'' if one_call else '+'} {rules.closing(' calls>')}"
    begin = _quoted(" calls>\n")
    opened = f"<[{dsml}]> {begin} {rules.rule('block', block)}"
    alone = f"{_quoted(_GAP)} {opened}"
    if forced:
        rules.rule("start", alone)
    elif answer is not None:
        rules.rule("start", f"{rules.rule('answer', _json(answer, {}, strict=True))} | {alone}")
    else:
        rules.rule("start", f"FREE | BEFORE {opened}")
        rules.rule("FREE", "/(?s:.*)/")
        rules.rule("BEFORE", "/(?s:.*)</")
    return rules.text()
