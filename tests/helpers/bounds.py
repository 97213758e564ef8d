"""The type of the fixture `within`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

Within = Callable[[float], AbstractContextManager[None]]
