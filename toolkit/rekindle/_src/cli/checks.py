"""One line of `rekindle doctor`'s report."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Check(NamedTuple):
    """A check: its result, its subject, the details, and a fix."""

    status: Literal["pass", "warn", "fail"]
    title: str
    detail: str
    fix: str = ""
