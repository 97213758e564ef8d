"""A second cache, after the cache folder of each machine, that many share: a folder, or an object store by its URL.

An entry is fetched at its first use, verified, and put into the cache folder, where it is used like one built here.
A thread stores new entries, complete or not at all. Entries that machines build at the same time are equal, so that it
does not matter which one stays. Any trouble with the place costs time and nothing else.

An entry is stored as one blob: a header, then its files one after another, then a mark over everything:

    MAGIC                      16 bytes
    length of the header        8 bytes
    header                      JSON: the entry's name, and path and size of each file ("" for an entry that is a file)
    the files' contents
    mark                        32 bytes: HMAC-SHA-256 of everything above, with the key of the cache if it has one

A blob is not used before its mark is verified. With a key, only its owners can create one.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hmac
import json
import logging
import os
import shutil
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol

from rekindle._src.core.atomic_checkpoint import PARTIAL
from rekindle.errors import ConfigError, MissingExtra, StoreError
from rekindle_kernels import private_files, read_through, system

log = logging.getLogger("rekindle.cache")
VARIABLE = "REKINDLE_SHARED_CACHE"
KINDS = ("native", "programs", "models", "weights", "pages", "snapshots")
DURABLE = ("pages", "snapshots")  # must survive a power cut; the others are made again
MAX_BYTES, MAX_AGE = 64 << 30, 30 * 24 * 3600.0  # of the whole place; the oldest goes first
FAILURES = 3  # in a row, after which this process stops using the place
EXIT_SECONDS = 4.0  # for which an ending process waits for its uploads
_PRUNE_SECONDS = 3600.0
_all: weakref.WeakSet[SharedCache] = weakref.WeakSet()

MAGIC = b"rekindle blob 1\n"
_LENGTH, _MARK = 8, 32
PIECE = 4 << 20
_AHEAD = 4  # pieces that wait for the mark
_PART, _PARTS = 1 << 20, 8  # memory that is reused while a large file is unpacked
_MOST_HEADER, _MOST_FILES = 1 << 20, 256

_UNFINISHED = ".unfinished-"
_STALE_SECONDS = 24 * 3600.0
# Protocols that show an object only once it is complete. Elsewhere it is sent under another name and renamed.
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory"})
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "timeCreated", "created", "creation_time")


class SharedCache:
    """A cache that several machines share; thread-safe. Implements `read_through.BackingStore`."""

    def __init__(self, folder: Path, where: str, place: BlobPlace, key: bytes | None) -> None:
        self.folder, self.where = folder, where
        self.max_bytes, self.max_age = MAX_BYTES, MAX_AGE
        self.fetched = self.missed = self.refused = self.failed = self.stored = 0
        self._place, self._key = place, key
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._handled: set[tuple[str, str]] = set()  # fetched, stored or queued: nothing is left to do
        self._todo: deque[tuple[str, str]] = deque()
        self._working = False
        self._failures = 0
        self._pruned = 0.0
        self._warned: set[str] = set()
        _all.add(self)

    def fetch(self, kind: str, name: str) -> bool:
        """Fetch an entry. True if it is in the cache folder now, complete and verified."""
        local = self.folder / kind / name
        if kind not in KINDS or self._failures >= FAILURES or private_files.distrust_reason(local.parent) is not None:
            return False
        temporary = local.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
        try:
            with self._place.open(kind, name) as blob:
                private_files.make_folder(local.parent)
                free = shutil.disk_usage(local.parent).free // 2
                size = unpack(blob, f"{kind}/{name}", self._key, temporary, free)
            _open_to_others(temporary, shared=private_files.is_shared(local.parent))
            if kind in DURABLE:
                private_files.sync_all(temporary)
            with contextlib.suppress(OSError):  # another process or thread was faster
                system.replace(temporary, local)
                if kind in DURABLE:
                    private_files.sync(local.parent)
        except FileNotFoundError:
            self.missed += 1
            return local.exists()
        except StoreError as error:
            self.refused += 1
            self._say(name, f"{kind}/{name} in {self.where} is not used ({error}); it is removed and made again")
            with contextlib.suppress(Exception):
                self._place.remove(kind, name)  # or it would block a good one
            return False
        except Exception as error:
            self._failure(error)
            return False
        finally:
            _remove(temporary)
        self._failures = 0
        self.fetched += 1
        self._handled.add((kind, name))
        log.debug("%s/%s (%d bytes) was fetched from %s", kind, name, size, self.where)
        return True

    def keep(self, kind: str, name: str) -> None:
        """Store the entry in the place, by a thread, unless it is there."""
        with self._lock:
            if kind not in KINDS or (kind, name) in self._handled or self._failures >= FAILURES:
                return
            self._handled.add((kind, name))
            self._todo.append((kind, name))
            if self._working:
                return
            self._working = True
        threading.Thread(target=self._work, name="rekindle shared cache", daemon=True).start()

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind's entries, the newest last."""
        try:
            return [blob.name for blob in sorted(self._place.list_blobs(kind), key=lambda blob: blob.written)]
        except Exception as error:
            self._failure(error)
            return []

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all queued entries are stored; false if `timeout` seconds pass first."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._working, timeout)

    def prune(self) -> int:
        """Remove entries that are too old, then the oldest beyond the capacity; return the bytes removed.

        Age is counted from the newest entry at most: a machine with a fast clock removes no other machine's entries.
        """
        blobs = sorted((blob for kind in KINDS for blob in self._place.list_blobs(kind)), key=lambda blob: blob.written)
        today = min(time.time(), blobs[-1].written if blobs else 0.0)
        total, removed, oldest = sum(blob.size for blob in blobs), 0, today - self.max_age
        for blob in blobs:
            if blob.written >= oldest and total - removed <= self.max_bytes:
                break
            self._place.remove(blob.kind, blob.name)
            removed += blob.size
        return removed

    def __repr__(self) -> str:
        return f"<SharedCache {self.where}: {self.fetched} fetched, {self.stored} kept>"

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._working = False
                    self._idle.notify_all()
                    return
                kind, name = self._todo.popleft()
            try:
                if self._failures < FAILURES:
                    self._keep(kind, name)
                    self._failures = 0
            except FileNotFoundError:
                log.debug("%s/%s was gone before it could be kept in %s", kind, name, self.where)
            except Exception as error:
                self._failure(error)

    def _keep(self, kind: str, name: str) -> None:
        age = self._place.age(kind, name)
        if age is not None and age < self.max_age / 2:
            return  # entries in use are written again before they are too old
        local = self.folder / kind / name
        temporary = local.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                pack(local, f"{kind}/{name}", self._key, out)
            self._place.put(kind, name, temporary)
        finally:
            temporary.unlink(missing_ok=True)
        self.stored += 1
        if time.monotonic() - self._pruned > _PRUNE_SECONDS or not self._pruned:
            self._pruned = time.monotonic()
            self.prune()

    def _failure(self, error: Exception) -> None:
        self.failed += 1
        self._failures += 1
        self._say("place", f"the shared cache {self.where} can't be used now: {type(error).__name__}: {error}")

    def _say(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning(text)


def attach(where: str | None, folders: Iterable[Path]) -> None:
    """Attach the shared cache with this path or URL to cache folders; None is $REKINDLE_SHARED_CACHE, if it is set.

    Raises ConfigError if a folder's parent does not exist, and for a place that other users could have written to,
    unless its entries are signed.
    """
    where = where or os.environ.get(VARIABLE) or None
    if where is None:
        for folder in folders:
            read_through.attach(folder, None)
        return
    try:
        key = private_files.signing_key()
    except OSError as error:
        problem = f"needs the key that {private_files.KEY_VARIABLE} names, and {error.filename} {error.strerror}"
        raise ConfigError("shared_cache", where, problem, "Check the file") from error
    place = place_of(where)
    if isinstance(place, FolderPlace):
        _check_parent(where, place.root)
    if key is None:
        _check_private(where, place)
    for folder in dict.fromkeys(folders):
        current = read_through.backing_of(folder)
        same = isinstance(current, SharedCache) and (current.where, current._key) == (where, key)
        if not same:
            read_through.attach(folder, SharedCache(folder, where, place, key))


def _check_parent(where: str, folder: Path) -> None:
    """Raise ConfigError if the folder around a shared one does not exist: it may be misspelt, or not mounted."""
    missing = next((path for path in reversed(folder.absolute().parents) if not path.exists()), None)
    if missing is not None:
        fix = f"Make {folder.parent} first, or name another place"
        raise ConfigError("shared_cache", where, f"lies in a folder that does not exist: {missing}", fix)


def _check_private(where: str, place: BlobPlace) -> None:
    reason: str | None = "is reached by others, too"
    if isinstance(place, FolderPlace):
        reasons = (private_files.distrust_reason(place.root / kind) for kind in KINDS)
        reason = next((problem for problem in reasons if problem is not None), None)
    if reason is not None:
        raise ConfigError(
            "shared_cache",
            where,
            f"is not private ({reason}), and holds programs: anyone who can write there could run their own here",
            f"Name a file with a secret key in {private_files.KEY_VARIABLE}, the same on all machines",
        )


def _open_to_others(path: Path, *, shared: bool) -> None:
    """Let other users read fetched files if the cache folder itself is shared with the key."""
    if not shared:
        return
    for at, _, files in os.walk(path):
        os.chmod(at, 0o755)
        for name in files:
            os.chmod(os.path.join(at, name), 0o644)
    if path.is_file():
        path.chmod(0o644)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@atexit.register
def _finish() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for cache in tuple(_all):
        cache.wait(max(0.0, deadline - time.monotonic()))


def pack(entry: Path, name: str, key: bytes | None, out: IO[bytes]) -> int:
    """Write an entry as the blob `name`; return its size in bytes. Raises OSError."""
    files = _files(entry)
    header = json.dumps({"name": name, "files": [(path, file.stat().st_size) for path, file in files]}).encode()
    mark = BlobSignature(key)
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
    mark = BlobSignature(key)
    begin = mark.added(_exactly(blob, len(MAGIC) + _LENGTH))
    if not begin.startswith(MAGIC):
        raise StoreError("it is not a blob of this version")
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


def _unpack_large(blob: IO[bytes], size: int, mark: BlobSignature, out: IO[bytes]) -> int:
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


class BlobSignature:
    """The mark over all added data. A thread adds large pieces while they are written or the next one is read:
    this took half of the time for 260 MB of weights."""

    def __init__(self, key: bytes | None) -> None:
        self._state = hmac.new(key or b"", b"rekindle blob", "sha256")
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._last: Future[None] | None = None

    def added(self, data: bytes) -> bytes:
        if self._pool is None and len(data) < PIECE:
            self._state.update(data)
            return data
        self._pending.append(self.later(data))
        while len(self._pending) > _AHEAD:
            self._pending.popleft().result()
        return data

    def later(self, data: bytes | memoryview) -> Future[None]:
        """Add data by the thread. The data may change once the future is done."""
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="rekindle shared cache")
        try:
            self._last = self._pool.submit(self._state.update, data)
        except RuntimeError:  # the process ends: pools take no more work, while its uploads still have some seconds
            if self._last is not None:
                self._last.result()
            self._state.update(data)
            self._last = Future()
            self._last.set_result(None)
        return self._last

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
    while size and (piece := source.read(min(size, PIECE))):
        size -= len(piece)
        yield piece


def _exactly(blob: IO[bytes], size: int) -> bytes:
    data = b"".join(_pieces(blob, size))
    if len(data) != size:
        raise StoreError("it is cut off")
    return data


class Blob(NamedTuple):
    """The description of one blob."""

    kind: str
    name: str
    size: int
    written: float  # seconds since the epoch; the present time if the store does not tell


class BlobPlace(Protocol):
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


def place_of(where: str) -> BlobPlace:
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
        return open(system.open_file(self.root / kind / name, os.O_RDONLY), "rb")

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
            system.replace(temporary, folder / name)
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
            return max(0.0, time.time() - write_time(self._files.info(self._path(kind, name))))
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
            Blob(kind, str(entry["name"]).rpartition("/")[2], int(entry.get("size") or 0), write_time(entry))
            for entry in entries
            if entry.get("type") == "file" and not str(entry["name"]).rpartition("/")[2].startswith(".")
        ]

    def _path(self, kind: str, name: str) -> str:
        return f"{self._root}/{kind}/{name}"


def write_time(entry: Mapping[str, Any]) -> float:
    """Return the time when an object was written, from any form that its store gives."""
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
