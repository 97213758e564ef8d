"""A session's record of a ready program."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rekindle._src.core import html


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ProgramRecord(html.Record):
    """The origin of a ready program, and the seconds that it took."""

    name: str
    origin: Literal["loaded", "compiled"]
    seconds: float  # to load it, or to trace, lower and compile it
    why: str = ""  # the reason why it was compiled and not loaded
