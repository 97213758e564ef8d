"""The grammar of the calls that a model must make, from the form of a family's syntax and the schemas of the tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.text.replies.call import KEYWORDS, OBJECT, CallSyntax, Token

Schema = Mapping[str, Any]
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_grammar(syntax: CallSyntax, tools: Sequence[Schema], token: Token, *, several: bool) -> str:
    """Return the grammar of one call of these tools, or of `several`, in the syntax of a family."""
    form = syntax.form(token)
    rules = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        call = form.call(function["name"])
        schema = _closed(function.get("parameters") or function.get("input_schema") or {})
        names = {OBJECT: f"args_{index}", KEYWORDS: f"keywords_{index}"}
        rules.append(f"call_{index}: " + " ".join(names.get(part, part) for part in call))
        rules += _keywords(index, schema) if KEYWORDS in call else [f"args_{index}: {_json(schema)}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    more = f"({form.between} call)*" if several and syntax.several else ""
    return "\n".join([f"start: {form.begins} call {more} {form.ends}".rstrip(), *rules])


def literal(text: str) -> str:
    """Return a text as a part of a rule."""
    return json.dumps(text)


def mark(marker: str, token: Token) -> str:
    """Return a marker as a part of a rule: its token, or its text where it is none."""
    number = token(marker)
    return literal(marker) if number is None else f"<[{number}]>"


def object_call(key: str, name: str) -> tuple[str, ...]:
    """Return the parts of `{"name": "f", "arguments": {…}}`, with this key for the arguments."""
    return (literal(f'{{"name": {json.dumps(name)}, "{key}": '), OBJECT, literal("}"))


def _keywords(index: int, schema: Schema) -> list[str]:
    """Return rules for `a=1, b="x"`: the required arguments in their order, then any of the others."""
    properties: Schema = schema.get("properties") or {}
    required = [name for name in properties if name in schema.get("required", ())]
    optional = [name for name in properties if name not in required]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = []
    for place, name in enumerate([*required, *optional]):
        inner = properties[name]
        value = _json({**(inner if isinstance(inner, Mapping) else {}), **shared})
        rules.append(f"value_{index}_{place}: {value}")
        rules.append(f"item_{index}_{place}: {literal(name + '=')} value_{index}_{place}")
    comma = literal(", ")
    parts = [f"item_{index}_{place}" for place in range(len(required))]
    places = range(len(required), len(required) + len(optional))
    if required:
        parts = [f" {comma} ".join(parts), *(f"({comma} item_{index}_{place})?" for place in places)]
        return [*rules, f"keywords_{index}: " + " ".join(parts)]
    choices = [
        " ".join([f"item_{index}_{first}", *(f"({comma} item_{index}_{place})?" for place in places if place > first)])
        for first in places
    ]
    return [*rules, f"keywords_{index}: " + " | ".join([*choices, '""'])]


def _closed(schema: Schema) -> Schema:
    """Return the schema of an object, closed to properties that it does not name unless it allows them."""
    closed = {"type": "object", **schema}
    if "additionalProperties" not in closed and not {"anyOf", "oneOf", "allOf", "$ref"} & closed.keys():
        closed["additionalProperties"] = False
    return closed


def _json(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT})
