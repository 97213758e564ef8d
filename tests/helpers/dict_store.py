"""A store of programs in memory."""

from __future__ import annotations

from typing import Any

from rekindle.errors import StoreError


class DictStore:
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def load(self, name: str) -> Any:
        if name not in self.kept:
            raise StoreError("not stored yet")
        return self.kept[name]

    def holds(self, name: str) -> bool:
        return name in self.kept

    def save(self, name: str, compiled: Any, compile_seconds: float) -> bool:
        self.kept[name] = compiled
        return compile_seconds > 0
