"""One line of `rekindle doctor`'s report."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Check(NamedTuple):
    """What was looked at, what came out, and how to mend it."""

    status: Literal["pass", "warn", "fail"]
    title: str
    detail: str
    fix: str = ""
