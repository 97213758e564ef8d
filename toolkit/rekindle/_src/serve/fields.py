"""The fields of an endpoint, declared once for requests, error messages and the OpenAPI document."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rekindle._src.serve.errors import Refused, missing, wrong
from rekindle._src.serve.kinds import Anything, Kind, nullable

log = logging.getLogger("rekindle.server")

FieldStatus = Literal["applied", "refused", "ignored"]
_MOST_LOGGED = 1_000  # names of unknown fields remembered as logged, at most


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
        """Return the fields of a body with checked values. Raise `Refused`; call `unknown` with each ignored name."""
        if not isinstance(body, Mapping):
            raise Refused(400, 'the body is not a JSON object. Send one, such as {"model": …}')
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
        """The fields by their names."""
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
