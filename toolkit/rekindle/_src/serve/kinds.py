"""Kinds of values for the fields of a request. A kind checks a JSON value and describes itself as a JSON schema."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

from rekindle._src.serve.errors import missing, wrong


class Kind(Protocol):
    """One kind of JSON value."""

    def check(self, value: Any, path: str) -> Any:
        """Return the normalised value, or raise a `Refused` that names `path`."""
        ...

    def schema(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Anything:
    """Any JSON value; it is checked later, or by the template that reads it."""

    def check(self, value: Any, path: str) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}


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
        bounds = {"minimum": self.low, "maximum": self.high}
        return {"type": "integer" if self.whole else "number", **{k: v for k, v in bounds.items() if v is not None}}


def whole(low: int | None = None, high: int | None = None) -> Number:
    """Return the kind of whole numbers; 3.0 is one."""
    return Number(low, high, whole=True)


INT64 = whole(-(2**63), 2**64 - 1)


@dataclasses.dataclass(frozen=True)
class Flag:
    """true or false."""

    def check(self, value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            raise wrong(path, value, "is neither true nor false", "Pass one of them")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclasses.dataclass(frozen=True)
class Text:
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
        rules: dict[str, Any] = {"type": "string"}
        if self.minimum:
            rules["minLength"] = self.minimum
        if self.maximum is not None:
            rules["maxLength"] = self.maximum
        return rules


@dataclasses.dataclass(frozen=True)
class Choice:
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
        rules: dict[str, Any] = {"type": "array", "items": self.kind.schema()}
        if self.minimum:
            rules["minItems"] = self.minimum
        if self.maximum is not None:
            rules["maxItems"] = self.maximum
        return rules


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """A list of at least one token id. The session checks later that the model has them."""

    def check(self, value: Any, path: str) -> list[int]:
        if not isinstance(value, list) or not value or not all(type(x) is int and 0 <= x < 2**31 for x in value):
            raise wrong(path, value, "is not a list of token ids", "Pass whole numbers from 0")
        return value

    def schema(self) -> dict[str, Any]:
        return {
            "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Either:
    """A value of the first kind whose JSON type matches; `expected` describes it for the error."""

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
        members = {
            name: kind.schema() if name in self.required else nullable(kind.schema()) for name, kind in self.members
        }
        return {"type": "object", "properties": members, **({"required": list(self.required)} if self.required else {})}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also permits null."""
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}
