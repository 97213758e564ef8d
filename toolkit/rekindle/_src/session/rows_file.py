"""The file that `session.map` writes as it goes: a line of JSON for each row, kept across a kill.

A line begins with the row's number and a digest of prompt, options and model. A row that has a line with the same
digest and without an error is not computed again. Of several lines for one row the last counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from types import TracebackType
from typing import Any, Self

from rekindle._src.core.json_lines import Entry, JsonLines


def row_key(options: str, prompt: Any) -> str:
    """Return a digest of everything that a row's answer depends on."""
    text = json.dumps([options, prompt], ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class RowsFile:
    """The answers of earlier calls, to which new ones are added."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._offsets: dict[int, tuple[str, int]] = {}  # by row: its key, and where its line begins
        self._lines = JsonLines(path, start='{"row": ', writer="session.map", on_entry=self._index)

    def __enter__(self) -> Self:
        self._offsets.clear()
        self._lines.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.__exit__(kind, error, trace)

    def find(self, row: int, key: str) -> Entry | None:
        """Return the line of a row that was answered with this key, or None."""
        stored, offset = self._offsets.get(row, ("", 0))
        return self._lines.entry(offset) if stored == key else None

    def add(self, row: int, key: str, **fields: Any) -> None:
        """Write a row's line."""
        self._lines.add({"row": row, "key": key, **fields})

    def _index(self, entry: Entry, offset: int) -> bool:
        row, key = entry.get("row"), entry.get("key")
        if not isinstance(row, int) or not isinstance(key, str):
            return False
        if "error" in entry:
            self._offsets.pop(row, None)
            return True
        self._offsets[row] = key, offset
        return isinstance(entry.get("text"), str) and isinstance(entry.get("finish_reason"), str)
