"""What checking the options of a request and of a session has in common."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle._src.core import foreign_names


def defaults_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """The fields for which `None` is no value of its own, with what it stands for."""
    found = []
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not None:
            found.append((field.name, default))
    return tuple(found)


def advice(name: str, known: Iterable[str], foreign: Mapping[str, foreign_names.Hint], elsewhere: str) -> str:
    """What to write instead of an option that is not known; `elsewhere` says where it belongs, if it is one of ours."""
    if name in foreign:
        return foreign[name].fix
    if elsewhere:
        return elsewhere
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(sorted(known))}"
