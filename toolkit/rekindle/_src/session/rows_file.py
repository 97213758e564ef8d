"""The file that `session.map` writes as it goes: a line of JSON for each row, kept across a kill.

A line begins with the row's number and a digest of prompt, options and model. A row whose line is there, with the same
digest and without an error, is not computed again. Lines are only ever added; of several for one row the last counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from rekindle.errors import InvalidRequest

_START = b'{"row": '


def row_key(options: str, prompt: Any) -> str:
    """A digest that names what a row's answer depends on."""
    text = json.dumps([options, prompt], ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class RowsFile:
    """Reads what an earlier call left, and adds lines; a line that was cut off by a kill is removed first."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._kept: dict[int, tuple[str, int]] = {}  # by row: its key, and where its line begins
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        try:
            self._read(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def find(self, row: int, key: str) -> dict[str, Any] | None:
        """The line of a row that was answered with this key."""
        known, at = self._kept.get(row, ("", 0))
        if known != key or self._file is None:
            return None
        self._file.seek(at)
        found: dict[str, Any] = json.loads(self._file.readline())
        return found

    def add(self, row: int, key: str, **fields: Any) -> None:
        """Write a line; it is the system's to keep once this returns."""
        assert self._file is not None, "the file is open"
        line = json.dumps({"row": row, "key": key, **fields}, ensure_ascii=False)
        self._file.write(line.encode("utf-8", "replace") + b"\n")
        self._file.flush()

    def _read(self, file: BinaryIO) -> None:
        file.seek(0)
        at = 0
        for number, line in enumerate(file, start=1):
            entry = _entry(line)
            if entry is None:
                # A line that was cut off by a kill has no end, and begins like ours.
                cut = not line.endswith(b"\n") and (line.startswith(_START) or _START.startswith(line))
                if not cut:
                    raise InvalidRequest(
                        "out", str(self.path), f"line {number} is not one that session.map wrote", "Choose another file"
                    )
                file.truncate(at)
                return
            if "error" in entry:
                self._kept.pop(entry["row"], None)
            else:
                self._kept[entry["row"]] = entry["key"], at
            at += len(line)
        if at:
            file.seek(at - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
                file.flush()


def _entry(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(_START):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(entry.get("row"), int) and isinstance(entry.get("key"), str)
    return entry if whole and ("error" in entry or isinstance(entry.get("text"), str)) else None
