"""Checks that the options of a request and of a session share."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle._src.core import foreign_names


def defaults_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the fields in which `None` means the default, with their defaults."""
    defaults = []
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not None:
            defaults.append((field.name, default))
    return tuple(defaults)


def advice(name: str, known: Iterable[str], foreign: Mapping[str, foreign_names.Hint], elsewhere: str) -> str:
    """Return the advice for an unknown option; `elsewhere` says where it belongs if it is one of ours."""
    if name in foreign:
        return foreign[name].fix
    if elsewhere:
        return elsewhere
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(sorted(known))}"
