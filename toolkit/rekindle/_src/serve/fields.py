"""The fields of an endpoint, declared once for requests, error messages and the OpenAPI document.

A field has a kind, which checks a JSON value and describes itself as a JSON schema.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from rekindle._src.core.names import MAX_NAME, MAX_PATH, checked_name, checked_path
from rekindle._src.core.version import VERSION
from rekindle._src.serve.errors import ApiError, missing, wrong
from rekindle.errors import ConfigError

log = logging.getLogger("rekindle.server")
FieldStatus = Literal["applied", "refused", "ignored"]
_FLOAT = 24  # characters of a number with a fraction, at most
_MOST_LOGGED = 1_000  # names of unknown fields remembered as logged, at most

_ERRORS = {
    400: "A field is wrong, missing or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full; Retry-After says when to try again.",
    499: "The request was aborted by its id.",
    500: "The request failed in the engine.",
    503: "The model is being loaded, the server is shutting down, or its memory or compilers are busy.",
}


class Kind(Protocol):
    """One kind of JSON value."""

    def check(self, value: Any, path: str) -> Any:
        """Return the normalised value, or raise an `ApiError` that names `path`."""
        ...

    def schema(self) -> dict[str, Any]: ...


def bounded(schema: dict[str, Any], **bounds: float | None) -> dict[str, Any]:
    """Return a schema with those bounds that are not None."""
    return {**schema, **{name: bound for name, bound in bounds.items() if bound is not None}}


@dataclasses.dataclass(frozen=True)
class Anything:
    """Any JSON value; it is checked later, or by the template that reads it."""

    def check(self, value: Any, path: str) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class SmallValue:
    """A JSON value with at most `most` characters in its texts, names and numbers; each value counts as one more."""

    most: int
    kind: Kind = Anything()

    def check(self, value: Any, path: str) -> Any:
        left, values = self.most, [value]
        while values:
            one = values.pop()
            left -= 1
            if isinstance(one, str):
                left -= len(one)
            elif isinstance(one, float):
                left -= _FLOAT
            elif isinstance(one, int):
                left -= one.bit_length() // 3
            elif isinstance(one, Mapping):
                left -= sum(map(len, one))
                values += one.values()
            elif isinstance(one, list):
                values += one
            if left < 0:
                raise wrong(path, value, f"has more than {self.most:,} characters", "Send less")
        return self.kind.check(value, path)

    def schema(self) -> dict[str, Any]:
        return self.kind.schema()


@dataclasses.dataclass(frozen=True)
class Number:
    """A finite number within inclusive bounds."""

    low: float | None = None
    high: float | None = None
    whole: bool = False

    def check(self, value: Any, path: str) -> Any:
        kind = "a whole number" if self.whole else "a number"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(path, value, f"must be {kind}", "Pass a JSON number")
        if isinstance(value, float):
            if not math.isfinite(value):
                raise wrong(path, value, f"must be {kind}", "Pass a finite one")
            if self.whole:
                if not value.is_integer():
                    raise wrong(path, value, f"must be {kind}", "Round it")
                value = int(value)
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise wrong(path, value, f"must be {self._bounds()}", "Change it, or leave it out")
        return value if self.whole else float(value) if abs(value) < 1e300 else value

    def _bounds(self) -> str:
        if self.high is None:
            return f"at least {self.low}"
        return f"at most {self.high}" if self.low is None else f"between {self.low} and {self.high}"

    def schema(self) -> dict[str, Any]:
        return bounded({"type": "integer" if self.whole else "number"}, minimum=self.low, maximum=self.high)


def whole(low: int | None = None, high: int | None = None) -> Number:
    """Return the kind of whole numbers; 3.0 is one."""
    return Number(low, high, whole=True)


INT64 = whole(-(2**63), 2**64 - 1)


@dataclasses.dataclass(frozen=True)
class Boolean:
    def check(self, value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            raise wrong(path, value, "is neither true nor false", "Pass one of them")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclasses.dataclass(frozen=True)
class String:
    """A string of `minimum` to `maximum` characters."""

    maximum: int | None = None
    minimum: int = 0

    def check(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise wrong(path, value, "is not a string", "Pass one")
        if len(value) < self.minimum or (self.maximum is not None and len(value) > self.maximum):
            bounds = f"{self.minimum} to {self.maximum}" if self.maximum is not None else f"at least {self.minimum}"
            raise wrong(path, value, f"has {len(value):,} characters, not {bounds}", "Change it, or leave it out")
        return value

    def schema(self) -> dict[str, Any]:
        return bounded({"type": "string"}, minLength=self.minimum or None, maxLength=self.maximum)


@dataclasses.dataclass(frozen=True)
class Name:
    """The name of an adapter."""

    def check(self, value: Any, path: str) -> str:
        try:
            return checked_name(path, value)
        except ConfigError as error:
            raise wrong(path, value, error.problem, error.fix) from None

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "pattern": r"^[^\s:]+$"}


@dataclasses.dataclass(frozen=True)
class PathText:
    """The path of a file or folder on the server's machine."""

    def check(self, value: Any, path: str) -> str:
        text = String(maximum=MAX_PATH, minimum=1).check(value, path)
        try:
            checked_path(path, text)
        except ConfigError as error:
            raise wrong(path, value, error.problem, error.fix) from None
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": MAX_PATH}


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of several strings."""

    values: tuple[str, ...]

    def check(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise wrong(path, value, "is not known", f"Use one of {', '.join(self.values)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.values)}


@dataclasses.dataclass(frozen=True)
class Items:
    """A list with entries of one kind."""

    kind: Kind
    minimum: int = 0
    maximum: int | None = None

    def check(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong(path, value, "is not a list", "Pass a JSON array")
        if len(value) < self.minimum:
            reason = "is empty" if not value else f"has fewer than {self.minimum} entries"
            raise wrong(path, value, reason, "Add one")
        if self.maximum is not None and len(value) > self.maximum:
            raise wrong(path, f"{len(value):,} entries", f"has more than {self.maximum:,}", "Pass fewer")
        check = self.kind.check
        return [check(entry, f"{path}[{index}]") for index, entry in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        rules = {"type": "array", "items": self.kind.schema()}
        return bounded(rules, minItems=self.minimum or None, maxItems=self.maximum)


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """A list of at least one token id. The session checks later that the model has them."""

    def check(self, value: Any, path: str) -> list[int]:
        if not isinstance(value, list) or not value or not all(type(x) is int and 0 <= x < 2**31 for x in value):
            raise wrong(path, value, "is not a list of token ids", "Pass whole numbers from 0")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": whole(0, 2**31 - 1).schema(), "minItems": 1}


@dataclasses.dataclass(frozen=True)
class Either:
    """A value of the first kind with a matching JSON type; `expected` describes it for the error."""

    expected: str
    kinds: tuple[tuple[type | tuple[type, ...], Kind], ...]

    def check(self, value: Any, path: str) -> Any:
        for types, kind in self.kinds:
            if isinstance(value, types):
                return kind.check(value, path)
        raise wrong(path, value, f"is not {self.expected}", f"Pass {self.expected}")

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [kind.schema() for _, kind in self.kinds]}


@dataclasses.dataclass(frozen=True)
class Table:
    """An object with any keys and with values of one kind."""

    kind: Kind
    maximum: int = 10_000

    def check(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise wrong(path, value, "is not an object", "Pass a JSON object")
        if len(value) > self.maximum:
            raise wrong(path, f"{len(value):,} entries", f"has more than {self.maximum:,}", "Pass fewer")
        return {key: self.kind.check(entry, f"{path}.{key}") for key, entry in value.items()}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.kind.schema()}


@dataclasses.dataclass(frozen=True)
class Shape:
    """An object with known members. Those in `required` must be present; unknown members are not checked."""

    members: tuple[tuple[str, Kind], ...]
    required: tuple[str, ...] = ()

    def check(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise wrong(path, value, "is not an object", "Pass a JSON object")
        for name in self.required:
            if value.get(name) is None:
                raise missing(f"{path}.{name}")
        checked = dict(value)
        for name, kind in self.members:
            if checked.get(name) is not None:
                checked[name] = kind.check(checked[name], f"{path}.{name}")
        return checked

    def schema(self) -> dict[str, Any]:
        kinds = ((name, kind.schema()) for name, kind in self.members)
        members = {name: schema if name in self.required else nullable(schema) for name, schema in kinds}
        return {"type": "object", "properties": members, **({"required": list(self.required)} if self.required else {})}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also permits null."""
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a request's JSON object; null is the same as leaving it out."""

    name: str
    kind: Kind
    doc: str
    status: FieldStatus = "applied"
    option: str | None = None  # the option that it sets, if the names differ
    required: bool = False
    harmless: tuple[Any, ...] = ()  # values of a refused field that change nothing


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The name and the fields of one endpoint."""

    path: str
    summary: str
    fields: tuple[Field, ...]

    @property
    def names(self) -> dict[str, str]:
        """The client's field for each option with another name, for error messages."""
        return {field.option: field.name for field in self.fields if field.option is not None}

    def read(self, body: Any, *, strict: bool, unknown: Callable[[str, str], object]) -> dict[str, Any]:
        """Return the fields of a body with checked values. Raise `ApiError`; call `unknown` with each ignored name."""
        if not isinstance(body, Mapping):
            raise ApiError(400, 'the body is not a JSON object. Send one, such as {"model": …}')
        values: dict[str, Any] = {}
        by_name = self.by_name
        for name, value in body.items():
            field = by_name.get(name)
            if field is None:
                if strict:
                    fix = "Remove it; this server runs with --strict"
                    raise wrong(name[:80], value, f"is not a field of {self.path}", fix)
                unknown(self.path, name)
            elif value is None or field.status == "ignored":
                continue
            elif field.status == "refused":
                if value not in field.harmless:
                    raise wrong(name, value, f"is not supported: {field.doc}", "Remove it", code="unsupported")
            else:
                values[name] = field.kind.check(value, name)
        for field in self.fields:
            if field.required and field.name not in values:
                raise missing(field.name)
        return values

    @functools.cached_property
    def by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.fields}

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a request's body."""
        properties: dict[str, Any] = {}
        for field in self.fields:
            if field.status == "refused":
                properties[field.name] = {"enum": [None, *field.harmless], "description": f"Refused: {field.doc}"}
                continue
            schema = field.kind.schema() if field.required else nullable(field.kind.schema())
            properties[field.name] = {
                **schema,
                "description": f"{'Ignored: ' * (field.status == 'ignored')}{field.doc}",
            }
        required = [field.name for field in self.fields if field.required]
        return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def refused(name: str, doc: str, *harmless: Any) -> Field:
    """Return a field that is refused by name, unless its value is harmless."""
    return Field(name, Anything(), doc, "refused", harmless=harmless)


def ignored(name: str, doc: str) -> Field:
    """Return a field that has no effect here."""
    return Field(name, Anything(), doc, "ignored")


class UnknownFields:
    """Logs each unknown field once. Names are cut, since one may be as long as a body."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def __call__(self, path: str, name: str) -> None:
        name = name[:80]
        if (path, name) not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add((path, name))
            log.warning("%s: the unknown field %r is ignored, from now on silently", path, name)


def document(posts: Sequence[Endpoint], gets: Sequence[tuple[str, str]], *, keys: bool) -> dict[str, Any]:
    """Return the document for endpoints that take a JSON object, and for GET paths."""
    paths: dict[str, Any] = {}
    for endpoint in posts:
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if "stream" in endpoint.by_name:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        body = {"required": True, "content": {"application/json": {"schema": endpoint.schema()}}}
        answers = {"200": {"description": "The answer.", "content": content}, **_errors()}
        operation = {"operationId": _name(endpoint.path), "summary": endpoint.summary, "requestBody": body}
        paths[endpoint.path] = {"post": {**operation, "responses": answers}}
    for path, summary in gets:
        operation = {"operationId": _name(path), "summary": summary}
        kind = "text/plain" if path == "/metrics" else "application/json"
        answers = {"200": {"description": "The answer.", "content": {kind: {}}}, **_errors(401, 404, 503)}
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        parameters = [parameter] if "{name}" in path else []
        paths[path] = {"get": {**operation, "parameters": parameters, "responses": answers}}
    members: dict[str, Any] = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    error = {"type": "object", "properties": members, "required": list(members)}
    anthropic = {"type": "object", "properties": {"type": {"const": "error"}, "error": {"type": "object"}}}
    schemas = {
        "Error": {"type": "object", "properties": {"error": error}, "required": ["error"]},
        "AnthropicError": {**anthropic, "required": ["type", "error"]},
    }
    root: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "rekindle", "version": VERSION, "description": "OpenAI's API over sessions of rekindle."},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        root["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        root["security"] = [{"bearer": []}]
    return root


def _errors(*statuses: int) -> dict[str, Any]:
    reference = [{"$ref": "#/components/schemas/Error"}, {"$ref": "#/components/schemas/AnthropicError"}]
    content = {"application/json": {"schema": {"anyOf": reference}}}
    listed = statuses or tuple(_ERRORS)
    return {str(status): {"description": _ERRORS[status], "content": content} for status in listed}


def _name(path: str) -> str:
    return path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
