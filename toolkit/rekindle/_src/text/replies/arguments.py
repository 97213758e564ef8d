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
        self._given: dict[str, Any] = {}
        if tell is not None:
            tell("{")

    def __len__(self) -> int:
        return len(self._given)

    def add(self, name: str, value: Any) -> None:
        """Add an argument; raises `Malformed` for a name that is there already."""
        if name in self._given:
            raise Malformed
        if self._tell is not None:
            self._tell(f"{', ' if self._given else ''}{as_json(name)}: {as_json(value)}")
        self._given[name] = value

    def call(self, name: str) -> Call:
        """Return the call of `name`, once all arguments are there."""
        call = Call.of(name, self._given)
        if self._tell is not None:
            self._tell("}")
        return call
