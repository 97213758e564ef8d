"""The shared cache behind one cache folder: entries come from there when they are missed, and new ones go there.

An entry is fetched at its first use, verified, and put into the cache folder, where it is used like one built here.
A thread stores new entries, complete or not at all. Entries that machines build at the same time are equal, so that it
does not matter which one stays. Any trouble with the place costs time and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from rekindle._src.core.atomic_checkpoint import PARTIAL
from rekindle._src.core.shared_cache.blobs import pack, unpack
from rekindle._src.core.shared_cache.places import FolderPlace, Place, place_of
from rekindle.errors import ConfigError, StoreError
from rekindle_kernels import private_files, read_through

log = logging.getLogger("rekindle.cache")
VARIABLE = "REKINDLE_SHARED_CACHE"
KINDS = ("native", "programs", "models", "weights", "pages", "snapshots")
MAX_BYTES, MAX_AGE = 64 << 30, 30 * 24 * 3600.0  # of the whole place; the oldest goes first
FAILURES = 3  # in a row, after which this process stops using the place
EXIT_SECONDS = 4.0  # for which an ending process waits for its uploads
_PRUNE_SECONDS = 3600.0
_all: weakref.WeakSet[SharedCache] = weakref.WeakSet()


class SharedCache:
    """Thread-safe. Satisfies `read_through.Behind`."""

    def __init__(self, folder: Path, where: str, place: Place, key: bytes | None) -> None:
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
            with contextlib.suppress(OSError):  # another process or thread was faster
                temporary.rename(local)
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
        """Remove entries that are too old, then the oldest beyond the capacity; return the bytes removed."""
        blobs = sorted((blob for kind in KINDS for blob in self._place.list_blobs(kind)), key=lambda blob: blob.written)
        total, removed, oldest = sum(blob.size for blob in blobs), 0, time.time() - self.max_age
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
    """Put the shared cache with this path or URL behind cache folders; None is $REKINDLE_SHARED_CACHE, if it is set.

    Raises ConfigError for a place to which other users could have written, unless its entries are signed.
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
    if key is None:
        _check_private(where, place)
    for folder in dict.fromkeys(folders):
        current = read_through.behind(folder)
        same = isinstance(current, SharedCache) and (current.where, current._key) == (where, key)
        if not same:
            read_through.attach(folder, SharedCache(folder, where, place, key))


def _check_private(where: str, place: Place) -> None:
    reason: str | None = "is reached by others, too"
    if isinstance(place, FolderPlace):
        reasons = (private_files.distrust_reason(place.root / kind) for kind in KINDS)
        reason = next((problem for problem in reasons if problem is not None), None)
    if reason is not None:
        raise ConfigError(
            "shared_cache",
            where,
            f"is not private ({reason}), and holds programs: whoever can write there could run theirs here",
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
