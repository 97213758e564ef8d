"""Places of blobs: a folder that machines share, or an object store by its URL, through fsspec."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from rekindle.errors import ConfigError, MissingExtra

_UNFINISHED = ".unfinished-"
_STALE_SECONDS = 24 * 3600.0
# Protocols whose stores show an object only once it is complete. Elsewhere it is sent under another name and renamed.
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory"})
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "timeCreated", "created", "creation_time")


class Blob(NamedTuple):
    """The description of one blob."""

    kind: str
    name: str
    size: int
    written: float  # seconds since the epoch; the present time if the store does not tell


class Place(Protocol):
    """Blobs by kind and name. Methods raise OSError, or any exception of the store's library."""

    def open(self, kind: str, name: str) -> IO[bytes]:
        """Open a blob for reading. Raises FileNotFoundError if it does not exist."""
        ...

    def age(self, kind: str, name: str) -> float | None:
        """Return the seconds since a blob was written; None if it does not exist."""
        ...

    def put(self, kind: str, name: str, file: Path) -> None:
        """Store a file as a blob: complete, or not at all. The file may be moved."""

    def remove(self, kind: str, name: str) -> None:
        """Remove a blob, if it exists."""

    def list_blobs(self, kind: str) -> list[Blob]:
        """Return the blobs of a kind."""
        ...


def place_of(where: str) -> Place:
    """Return the place of this path or URL. Raises ConfigError and MissingExtra."""
    protocol, separator, rest = where.partition("://")
    if not separator or protocol in ("file", "local"):
        return FolderPlace(Path(rest if separator else where).expanduser().absolute())
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra("fsspec", "shared") from error
    try:
        files, root = fsspec.core.url_to_fs(where)
    except ImportError as error:
        raise ConfigError("shared_cache", where, f"can't be reached: {error}", "Install what it names") from error
    except Exception as error:
        raise ConfigError("shared_cache", where, f"can't be reached: {error}", "Check the URL") from error
    return RemotePlace(files, str(root).rstrip("/"), whole=protocol in _WHOLE)


class FolderPlace:
    """A folder, such as one of a file server. A blob is renamed to its name when it is complete."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, kind: str, name: str) -> IO[bytes]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return open(os.open(self.root / kind / name, flags), "rb")

    def age(self, kind: str, name: str) -> float | None:
        try:
            return time.time() - (self.root / kind / name).lstat().st_mtime
        except FileNotFoundError:
            return None

    def put(self, kind: str, name: str, file: Path) -> None:
        folder = self.root / kind
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
        try:
            shutil.copyfile(file, temporary)
            os.replace(temporary, folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self, kind: str, name: str) -> None:
        (self.root / kind / name).unlink(missing_ok=True)

    def list_blobs(self, kind: str) -> list[Blob]:
        blobs = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root / kind) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith("."):
                        if time.time() - status.st_mtime > _STALE_SECONDS:
                            os.unlink(entry.path)  # its writer is gone
                    elif entry.is_file(follow_symlinks=False):
                        blobs.append(Blob(kind, entry.name, status.st_size, status.st_mtime))
        return blobs


class RemotePlace:
    """A store that fsspec reaches."""

    def __init__(self, files: Any, root: str, *, whole: bool) -> None:
        self._files, self._root, self._whole = files, root, whole

    def open(self, kind: str, name: str) -> IO[bytes]:
        blob: IO[bytes] = self._files.open(self._path(kind, name), "rb")
        return blob

    def age(self, kind: str, name: str) -> float | None:
        self._files.invalidate_cache()
        try:
            return max(0.0, time.time() - _write_time(self._files.info(self._path(kind, name))))
        except FileNotFoundError:
            return None

    def put(self, kind: str, name: str, file: Path) -> None:
        self._files.makedirs(f"{self._root}/{kind}", exist_ok=True)
        target = self._path(kind, name)
        if self._whole:
            self._files.put_file(str(file), target)
            return
        temporary = self._path(kind, f"{_UNFINISHED}{uuid.uuid4().hex}")
        try:
            self._files.put_file(str(file), temporary)
            self._files.mv(temporary, target)
        except BaseException:
            with contextlib.suppress(Exception):
                self._files.rm_file(temporary)
            raise

    def remove(self, kind: str, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(kind, name))

    def list_blobs(self, kind: str) -> list[Blob]:
        self._files.invalidate_cache()
        try:
            entries = self._files.ls(f"{self._root}/{kind}", detail=True)
        except FileNotFoundError:
            return []
        return [
            Blob(kind, str(entry["name"]).rpartition("/")[2], int(entry.get("size") or 0), _write_time(entry))
            for entry in entries
            if entry.get("type") == "file" and not str(entry["name"]).rpartition("/")[2].startswith(".")
        ]

    def _path(self, kind: str, name: str) -> str:
        return f"{self._root}/{kind}/{name}"


def _write_time(entry: Mapping[str, Any]) -> float:
    """Return the time at which an object was written, in any form in which its store gives it."""
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.datetime.fromisoformat(value).timestamp()
    return time.time()
