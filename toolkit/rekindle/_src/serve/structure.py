"""What requests ask of their text's structure, as our options: `response_format`, `structured_outputs` and the like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle._src.serve.errors import missing, wrong

_KINDS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json"}
_WITHOUT_MEANING = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def structure_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The options that `response_format` and `structured_outputs` ask for, and their names in the request."""
    format = given.get("response_format")
    asked = {name: value for name, value in (given.get("structured_outputs") or {}).items() if value is not None}
    if format is not None and format.get("type") != "text":
        if asked:
            raise wrong("structured_outputs", asked, "is given beside response_format", "Send one of the two")
        return format_options(format, "response_format")
    options: dict[str, Any] = {}
    for name, value in asked.items():
        path = f"structured_outputs.{name}"
        if name in _WITHOUT_MEANING or (name == "json_object" and value is False):
            continue
        if name not in _KINDS:
            raise wrong(path, value, "is not supported", f"Use one of {', '.join(_KINDS)}", code="unsupported")
        options[_KINDS[name]] = _schema(value, path) if name == "json" else value
    if len(options) > 1:
        raise wrong("structured_outputs", list(asked), "asks for several structures", "Send one of them")
    return options, {_KINDS[name]: f"structured_outputs.{name}" for name in asked if name in _KINDS}


def format_options(format: Mapping[str, Any], path: str, schema: Any = None) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of one format object, whose schema lies in it, in its `json_schema`, or is given."""
    match format.get("type"):
        case "text":
            return {}, {}
        case "json_object":
            return {"json": True}, {"json": path}
        case "json_schema":
            holder = format.get("json_schema") if schema is None and "json_schema" in format else format
            if not isinstance(holder, Mapping) or holder.get("schema") is None:
                raise missing(f"{path}.json_schema.schema", "Add the schema")
            # A schema that need not be kept to strictly may ask for what a grammar can't check.
            options: dict[str, Any] = {"schema": _schema(holder["schema"], f"{path}.json_schema.schema")}
            if holder.get("strict") is not True:
                options["lenient"] = True
            return options, {"schema": f"{path}.json_schema.schema"}
        case other:
            fix = "Use text, json_object or json_schema"
            raise wrong(f"{path}.type", other, "is not supported", fix, code="unsupported")


def _schema(value: Any, path: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise wrong(path, value, f"can't be read as JSON: {str(error)[:100]}", "Pass a JSON schema") from None
    if not isinstance(value, Mapping):
        raise wrong(path, value, "is not a JSON schema", "Pass an object")
    return value
