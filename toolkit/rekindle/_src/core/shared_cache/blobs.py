"""One entry of a cache as one blob: its files behind each other, between a header and a mark over everything.

    MAGIC                      16 bytes
    length of the header        8 bytes
    header                      JSON: the entry's name, and path and size of each file ("" for an entry that is a file)
    the files' contents
    mark                        32 bytes: HMAC-SHA-256 of everything above, with the key of the cache if it has one

A blob is not used before its mark is verified. With a key, only its owners can create one.
"""

from __future__ import annotations

import hmac
import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rekindle.errors import StoreError

MAGIC = b"rekindle blob 1\n"
_LENGTH, _MARK = 8, 32
_PIECE = 4 << 20
_AHEAD = 4  # pieces that wait for the mark
_PART, _PARTS = 1 << 20, 8  # memory that is reused while a large file is unpacked
_MOST_HEADER, _MOST_FILES = 1 << 20, 256


def pack(entry: Path, name: str, key: bytes | None, out: IO[bytes]) -> int:
    """Write an entry as the blob `name`; return its size in bytes. Raises OSError."""
    files = _files(entry)
    header = json.dumps({"name": name, "files": [(path, file.stat().st_size) for path, file in files]}).encode()
    mark = _Mark(key)
    total = out.write(mark.added(MAGIC + len(header).to_bytes(_LENGTH, "little") + header))
    for path, file in files:
        size = file.stat().st_size
        with file.open("rb") as content:
            for piece in _pieces(content, size):
                total += out.write(mark.added(piece))
                size -= len(piece)
        if size:
            raise OSError(f"{path or entry.name} has changed while it was read")
    return total + out.write(mark.digest())


def unpack(blob: IO[bytes], name: str, key: bytes | None, target: Path, limit: int) -> int:
    """Write a blob's files to `target`, which must not exist yet; return their size in bytes. Raises StoreError for a
    blob that is damaged, too large or not `name`'s; the caller removes the files written so far."""
    mark = _Mark(key)
    begin = mark.added(_exactly(blob, len(MAGIC) + _LENGTH))
    if not begin.startswith(MAGIC):
        raise StoreError("it is no blob of this version")
    length = int.from_bytes(begin[len(MAGIC) :], "little")
    if length > _MOST_HEADER:
        raise StoreError(f"its header is of {length:,} bytes")
    files = _parse_header(mark.added(_exactly(blob, length)), name)
    total = sum(size for _, size in files)
    if total > limit:
        raise StoreError(f"it has {total:,} bytes, and there is room for {limit:,}")
    for path, size in files:
        file = target / path if path else target
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as content:
            if size < _PART:
                size -= content.write(mark.added(b"".join(_pieces(blob, size))))
            else:
                size -= _unpack_large(blob, size, mark, content)
        if size:
            raise StoreError("it is cut off")
    if not hmac.compare_digest(_exactly(blob, _MARK), mark.digest()):
        raise StoreError("its mark does not fit" + ("" if key is None else ", or it was made with another key"))
    return total


def _unpack_large(blob: IO[bytes], size: int, mark: _Mark, out: IO[bytes]) -> int:
    """Unpack up to `size` bytes and return their number. They are read, marked and written at the same time, in reused
    memory: new memory for each piece cost as much as the marks."""
    parts: deque[tuple[memoryview, tuple[Future[Any], ...]]] = deque()
    parts.extend((memoryview(bytearray(_PART)), ()) for _ in range(_PARTS))
    position = 0
    with ThreadPoolExecutor(1, thread_name_prefix="rekindle shared cache") as writer:
        while position < size:
            memory, busy = parts.popleft()
            for future in busy:
                future.result()
            count = _read_into(blob, memory[: size - position])
            if not count:
                break
            part = memory[:count]
            parts.append((memory, (mark.later(part), writer.submit(out.write, part))))
            position += count
        for _, busy in parts:
            for future in busy:
                future.result()
    return position


def _read_into(blob: IO[bytes], memory: memoryview) -> int:
    readinto: Any = getattr(blob, "readinto", None)
    if readinto is not None:
        return int(readinto(memory) or 0)
    piece = blob.read(len(memory))
    memory[: len(piece)] = piece
    return len(piece)


class _Mark:
    """The mark over all added data. A thread adds large pieces while they are written or the next one is read:
    this took half of the time for 260 MB of weights."""

    def __init__(self, key: bytes | None) -> None:
        self._state = hmac.new(key or b"", b"rekindle blob", "sha256")
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def added(self, data: bytes) -> bytes:
        if self._pool is None and len(data) < _PIECE:
            self._state.update(data)
            return data
        self._pending.append(self.later(data))
        while len(self._pending) > _AHEAD:
            self._pending.popleft().result()
        return data

    def later(self, data: bytes | memoryview) -> Future[None]:
        """Add data by the thread. The data may change once the future is done."""
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="rekindle shared cache")
        return self._pool.submit(self._state.update, data)

    def digest(self) -> bytes:
        if self._pool is not None:
            self._pool.shutdown()
        return self._state.digest()


def _files(entry: Path) -> list[tuple[str, Path]]:
    """Return the files of an entry by their paths in it, without links."""
    if entry.is_file():
        return [("", entry)]
    paths = []
    for at, _, names in os.walk(entry):
        paths += [Path(at) / name for name in names]
    plain = sorted(file for file in paths if file.is_file() and not file.is_symlink())
    if not plain:
        raise FileNotFoundError(f"{entry} is gone")
    return [(file.relative_to(entry).as_posix(), file) for file in plain]


def _parse_header(header: bytes, name: str) -> list[tuple[str, int]]:
    """Return the files that a header lists. Raises StoreError unless they are within the entry `name`."""
    try:
        fields: Any = json.loads(header)
        label, files = fields["name"], [(path, size) for path, size in fields["files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"its header makes no sense ({error!r})") from error
    if label != name:
        raise StoreError(f"it is the blob of {label!r}")
    if not 0 < len(files) <= _MOST_FILES or len({path for path, _ in files}) < len(files):
        raise StoreError(f"it has {len(files)} files")
    for path, size in files:
        if not isinstance(path, str) or type(size) is not int or size < 0:
            raise StoreError(f"its header makes no sense ({path!r}, {size!r})")
        parts = PurePosixPath(path).parts
        plain = path == "" and len(files) == 1
        if not plain and (not parts or path.startswith("/") or "\\" in path or ".." in parts or "\0" in path):
            raise StoreError(f"it has a file {path!r}")
    return files


def _pieces(source: IO[bytes], size: int) -> Iterator[bytes]:
    while size and (piece := source.read(min(size, _PIECE))):
        size -= len(piece)
        yield piece


def _exactly(blob: IO[bytes], size: int) -> bytes:
    data = b"".join(_pieces(blob, size))
    if len(data) != size:
        raise StoreError("it is cut off")
    return data
