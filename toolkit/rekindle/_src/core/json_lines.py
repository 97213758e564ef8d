"""A file of JSON objects, one on each line, to which lines are only added.

A kill costs at most the last line. A power cut costs the lines of the last half minute: until they are on disk, a file
may have zeros in their place, which no line has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self

from rekindle.errors import InvalidRequest
from rekindle_kernels import private_files

Entry = dict[str, Any]


class JsonLines:
    """A JSON-lines file, opened with `with`: reads the existing lines, and removes a partial line left by a kill or a
    power cut, with everything after it. At the end of the block all lines are on disk.

    Every line begins with `start`, and `on_entry` is called with each entry and the place of its line. It returns True
    if `writer` wrote such an entry: a file with any other content is refused and stays as it is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        start: str,
        writer: str,
        on_entry: Callable[[Entry, int], bool],
        field: str = "out",
    ) -> None:
        self.path = Path(path)
        self._start, self._writer, self._on_entry, self._field = start.encode(), writer, on_entry, field
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        folder = self.path.parent
        if not folder.exists():  # made here, a misspelt folder would go unnoticed
            problem, fix = f"can't be written: the folder {folder} does not exist", "Create it, or choose another file"
            raise InvalidRequest(self._field, str(self.path), problem, fix)
        try:
            self._file = open(self.path, "a+b")
        except OSError as error:
            raise InvalidRequest(
                self._field, str(self.path), f"can't be written: {error}", "Choose another file"
            ) from None
        try:
            self._read(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            private_files.sync(self.path)
            private_files.sync(self.path.parent)

    def entry(self, at: int) -> Entry:
        """Return the entry of the line at this place."""
        assert self._file is not None, "the file is open"
        self._file.seek(at)
        entry: Entry = json.loads(self._file.readline())
        return entry

    def add(self, entry: Entry) -> None:
        """Write a line. Once this returns, the operating system has it."""
        assert self._file is not None, "the file is open"
        # A lone surrogate, which has no UTF-8, becomes a question mark.
        self._file.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()

    def _read(self, file: BinaryIO) -> None:
        file.seek(0)
        at, complete = 0, True
        for number, line in enumerate(file, start=1):
            complete = line.endswith(b"\n")
            if not self._takes(line, at):
                zeros = b"\0" in line and (at > 0 or line.startswith(self._start) or not line.strip(b"\0"))
                partial = line.startswith(self._start) or self._start.startswith(line)
                if zeros or (partial and not complete):
                    file.truncate(at)
                    return
                raise InvalidRequest(
                    self._field,
                    str(self.path),
                    f"line {number} is not one that {self._writer} wrote",
                    "Choose another file",
                )
            at += len(line)
        if not complete:  # only its line break is missing
            file.write(b"\n")
            file.flush()

    def _takes(self, line: bytes, at: int) -> bool:
        if not line.startswith(self._start):
            return False
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return False
        return self._on_entry(entry, at)
