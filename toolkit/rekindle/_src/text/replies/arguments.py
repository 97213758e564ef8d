"""Collects the arguments of a call that are not written as JSON, one by one, and passes them on as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle._src.text.replies.call import Call, as_json
from rekindle._src.text.replies.source import Malformed


class Arguments:
    """Takes arguments in their order; `tell` receives each of them as a part of one JSON object."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._values: dict[str, Any] = {}
        if tell is not None:
            tell("{")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, value: Any) -> None:
        """Add an argument; raises `Malformed` for a name that is there already."""
        if name in self._values:
            raise Malformed
        if self._tell is not None:
            self._tell(f"{', ' if self._values else ''}{as_json(name)}: {as_json(value)}")
        self._values[name] = value

    def call(self, name: str) -> Call:
        """Return the call of `name`, once all arguments are there."""
        call = Call.of(name, self._values)
        if self._tell is not None:
            self._tell("}")
        return call
