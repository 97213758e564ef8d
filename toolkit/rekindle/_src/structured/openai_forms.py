"""Structured output as OpenAI's and vLLM's clients request it, converted to our options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.errors import InvalidRequest

_FORMATS = ("text", "json_object", "json_schema")
_OUTPUTS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json"}


def from_response_format(value: Any) -> dict[str, Any]:
    """Return options for OpenAI's `response_format`. Raises `InvalidRequest` for a form that can't be followed.

    `strict` is no option of ours: the text always follows the schema. A structural tag is refused.
    """
    if value is None:
        return {}
    form = _object("response_format", value)
    kind = form.get("type")
    if kind not in _FORMATS:
        raise InvalidRequest("response_format", value, f"has the type {kind!r}", f"Use one of {', '.join(_FORMATS)}")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json": True}
    # The chat API nests the schema below `json_schema`; the responses API has it beside the type.
    described = form.get("json_schema", form)
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        fix = 'Use {"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}'
        raise InvalidRequest("response_format", value, "has no schema", fix)
    return {"schema": dict(schema)}


def from_structured_outputs(value: Any) -> dict[str, Any]:
    """Return options for vLLM's `structured_outputs`: exactly one of json, json_object, regex, choice and grammar."""
    if value is None:
        return {}
    form = {name: entry for name, entry in _object("structured_outputs", value).items() if entry is not None}
    flexible = not form.pop("disable_any_whitespace", True)
    form.pop("disable_fallback", None)
    requested = [name for name in form if form[name] is not False]
    unknown = sorted(set(requested) - set(_OUTPUTS))
    if unknown or len(requested) != 1:
        problem = f"has {', '.join(unknown)}" if unknown else f"asks for {len(requested)} structures"
        raise InvalidRequest("structured_outputs", value, problem, f"Use exactly one of {', '.join(_OUTPUTS)}")
    name = requested[0]
    content = form[name]
    if name == "json":
        content = _schema(content)
    options: dict[str, Any] = {_OUTPUTS[name]: content}
    return options | ({"whitespace_flexible": True} if flexible and name.startswith("json") else {})


def from_guided_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for the older fields `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`."""
    names = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
    outputs = {names[field]: value for field, value in fields.items() if field in names and value is not None}
    return from_structured_outputs(outputs) if outputs else {}


def structure_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for the fields of a request that ask for a structure. Raises `InvalidRequest` if two do."""
    options_by_source = {
        "response_format": from_response_format(fields.get("response_format")),
        "structured_outputs": from_structured_outputs(fields.get("structured_outputs")),
        "guided fields": from_guided_fields(fields),
    }
    sources = [name for name, options in options_by_source.items() if options]
    if len(sources) > 1:
        raise InvalidRequest(
            sources[1], fields.get(sources[1]), f"can't be combined with {sources[0]}", "Use one of them"
        )
    return options_by_source[sources[0]] if sources else {}


def _object(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(field, value, "is not an object", 'Use an object such as {"type": "json_object"}')
    return value


def _schema(value: Any) -> dict[str, Any]:
    """Return a schema as a dict; it may have been sent as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequest("structured_outputs", value, "is no JSON", "Send the schema as an object") from None
    if not isinstance(value, Mapping):
        raise InvalidRequest("structured_outputs", value, "is not a JSON schema", "Send the schema as an object")
    return dict(value)
