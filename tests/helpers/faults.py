"""Errors of a disk that pass: files that can't be opened, or written, for a while."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Iterator
from typing import Any

import pytest

PASSING = [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EACCES]
NAMES = [errno.errorcode[number] for number in PASSING]


@contextlib.contextmanager
def unreadable(part: str, number: int) -> Iterator[list[str]]:
    """Make opening a file for reading fail if its path contains `part`; yields the paths that were tried."""
    tried: list[str] = []

    def refuse(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike) and part in os.fsdecode(path):
            tried.append(os.fsdecode(path))
            raise OSError(number, os.strerror(number), os.fsdecode(path))

    def guarded(function: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            mode = args[0] if args else options.get("mode", "r")
            if (isinstance(mode, int) and not mode & (os.O_WRONLY | os.O_RDWR)) or (
                isinstance(mode, str) and "r" in mode
            ):
                refuse(path)
            return function(path, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((os, "open"), (io, "open"), (builtins, "open")):
            patch.setattr(module, name, guarded(getattr(module, name)))
        yield tried


@contextlib.contextmanager
def full_disk(part: str = "") -> Iterator[None]:
    """Make writes to files with `part` in their paths fail half way: no space is left."""

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = {}

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        name = (
            os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else os.readlink(f"/proc/self/fd/{file}")
        )
        if part in name and set(mode) & set("wxa") and "b" in mode:
            return Full(file, mode.replace("b", ""))
        return real["open"](file, mode, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        real["open"] = builtins.open
        patch.setattr(builtins, "open", opened)
        patch.setattr(io, "open", opened)
        yield
