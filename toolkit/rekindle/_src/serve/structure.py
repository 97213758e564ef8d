"""The structure of a request's text as our options: `response_format`, `structured_outputs` and the like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle._src.serve.errors import missing, wrong

_KINDS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json"}
_WITHOUT_MEANING = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def structure_options(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options for `response_format` and `structured_outputs`, and their names in the request."""
    format = fields.get("response_format")
    members = {name: value for name, value in (fields.get("structured_outputs") or {}).items() if value is not None}
    if format is not None and format.get("type") != "text":
        if members:
            raise wrong("structured_outputs", members, "is given beside response_format", "Send one of the two")
        return format_options(format, "response_format")
    options: dict[str, Any] = {}
    for name, value in members.items():
        path = f"structured_outputs.{name}"
        if name in _WITHOUT_MEANING or (name == "json_object" and value is False):
            continue
        if name not in _KINDS:
            raise wrong(path, value, "is not supported", f"Use one of {', '.join(_KINDS)}", code="unsupported")
        options[_KINDS[name]] = _schema(value, path) if name == "json" else value
    if len(options) > 1:
        raise wrong("structured_outputs", list(members), "asks for several structures", "Send one of them")
    return options, {_KINDS[name]: f"structured_outputs.{name}" for name in members if name in _KINDS}


def format_options(format: Mapping[str, Any], path: str, schema: Any = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of a format object. Its schema is in it, in its `json_schema`, or in `schema`."""
    match format.get("type"):
        case "text":
            return {}, {}
        case "json_object":
            return {"json": True}, {"json": path}
        case "json_schema":
            holder = format.get("json_schema") if schema is None and "json_schema" in format else format
            if not isinstance(holder, Mapping) or holder.get("schema") is None:
                raise missing(f"{path}.json_schema.schema", "Add the schema")
            # Without strict, a schema may have rules that a grammar can't check.
            options: dict[str, Any] = {"schema": _schema(holder["schema"], f"{path}.json_schema.schema")}
            if holder.get("strict") is not True:
                options["lenient"] = True
            return options, {"schema": f"{path}.json_schema.schema"}
        case kind:
            fix = "Use text, json_object or json_schema"
            raise wrong(f"{path}.type", kind, "is not supported", fix, code="unsupported")


def _schema(value: Any, path: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise wrong(path, value, f"can't be read as JSON: {str(error)[:100]}", "Pass a JSON schema") from None
    if not isinstance(value, Mapping):
        raise wrong(path, value, "is not a JSON schema", "Pass an object")
    return value
