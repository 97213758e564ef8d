"""Folders of files that Orbax commits: complete or absent, written one at a time, read without importing Orbax.

A checkpoint is written under a unique name and then renamed: when two writers share a path, Orbax lets the second
remove the first one's files. Readers open the files in `<path>/<ITEM>` themselves: importing Orbax takes 0.1 s and
more, which only writers pay.

A damaged checkpoint is renamed and not removed, so that a mistake of ours costs no data. Only a proven mismatch is
damage: a checksum that does not fit, a file that is cut off or missing. A failing disk, an absent file server or a lack
of descriptors or memory gives errors that pass (`is_passing`), and these prove nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import shutil
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

from rekindle_kernels import private_files, system

# Orbax's operations signal each other through counters of the whole process: two saves in two threads, even to
# different paths, created each other's folders or waited for one another until a timeout.
ONE_AT_A_TIME = threading.Lock()
PARTIAL, DAMAGED = "partial-", "damaged-"  # prefixes of the names of unfinished and of damaged checkpoints
ITEM = "rekindle"  # the item of such a checkpoint, hence the folder of its files
KEPT_DAMAGED = 2  # in one folder
STALE_SECONDS = 3600.0  # without a write for this long, an unfinished checkpoint has lost its writer
_unfinished: set[Path] = set()


def write_checkpoint(path: Path, write: Callable[[Path], None], *, durable: bool = False) -> None:
    """Write a new Orbax checkpoint to `path`; `write` fills its folder. Raises OSError.

    Only this user can read the files, unless the store is shared with a key. With `durable`, a power cut leaves the
    checkpoint complete or absent too, and complete once this has returned. Others are verified when they are read.
    """
    private_files.make_folder(path.parent)
    partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    _unfinished.add(partial)
    errors: list[OSError] = []

    def write_or_remember(folder: Path) -> None:
        try:
            write(folder)
        except OSError as error:
            errors.append(error)
            raise

    try:
        if several_processes():
            # Orbax would wait until every process saves as well, but only one does.
            (partial / ITEM).mkdir(parents=True)
            write_or_remember(partial / ITEM)
        else:
            orbax().save(partial, write_or_remember)
        private_files.make_private(partial)
        if durable:
            private_files.sync_all(partial / ITEM)  # no reader opens Orbax's own files
            private_files.sync(partial)
        system.replace(partial, path)
        if durable:
            private_files.sync(path.parent)
    except BaseException as error:
        _remove_all(partial)
        if errors and not isinstance(error, OSError):  # Orbax wraps the errors of its threads
            raise errors[0] from error
        raise
    finally:
        _unfinished.discard(partial)


def several_processes() -> bool:
    """True if JAX runs in several processes, without importing it to find out."""
    distributed: Any = getattr(sys.modules.get("jax"), "distributed", None)
    return distributed is not None and bool(distributed.is_initialized())


def abandon() -> None:
    """Remove the checkpoints that this process is still writing, because the process ends."""
    for path in list(_unfinished):
        _remove_all(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, if that is possible; see `try_remove`."""
    with contextlib.suppress(OSError):
        try_remove(path)


def try_remove(path: Path) -> None:
    """Remove a checkpoint. Raise OSError if it stays.

    It is renamed first, so that a removal killed half way leaves no half checkpoint.
    """
    renamed = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    system.replace(path, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def set_aside(path: Path, *, keep: int = KEPT_DAMAGED) -> None:
    """Rename a damaged checkpoint to free its name. The `keep` latest of a folder stay, others are removed."""
    with contextlib.suppress(OSError):
        renamed = path.with_name(f"{DAMAGED}{uuid.uuid4().hex}")
        system.replace(path, renamed)
        os.utime(renamed)
        earlier = sorted(path.parent.glob(f"{DAMAGED}*"), key=lambda one: one.stat().st_mtime)
        for entry in earlier[:-keep]:
            shutil.rmtree(entry, ignore_errors=True)


def is_finished(name: str) -> bool:
    """True if a checkpoint of this name can be used: it is neither unfinished nor set aside."""
    return not name.startswith((PARTIAL, DAMAGED))


def is_stale(path: Path) -> bool:
    """True if `path` had no write for `STALE_SECONDS`, or one that far ahead: the clock was set back since then.

    An unreadable folder is not stale.
    """
    try:
        newest = path.lstat().st_mtime
        for at, folders, files in os.walk(path):
            newest = max([newest, *(os.lstat(os.path.join(at, name)).st_mtime for name in (*folders, *files))])
    except OSError:
        return False
    return abs(time.time() - newest) > STALE_SECONDS


def order_of_use(used: float) -> float:
    """Return the key for removing entries, the least first.

    A time far in the future dates from before the clock was set back, so entries used since then count as used later.
    """
    return used if used <= time.time() + STALE_SECONDS else 0.0


def is_passing(error: BaseException | None) -> bool:
    """True if a read failed for a reason that says nothing about the file: the next attempt may succeed."""
    while error is not None:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return True
        if isinstance(error, OSError):
            return not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        error = error.__cause__
    return False


def _remove_all(path: Path) -> None:
    for leftover in path.parent.glob(f"{path.name}*"):  # Orbax writes under other names, which start like this one
        shutil.rmtree(leftover, ignore_errors=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    write: Callable[[Path], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _AwaitableWrite:
    """The object that Orbax awaits. A coroutine would warn where a full disk keeps Orbax from awaiting it."""

    directory: Any
    files: _Files

    def __await__(self) -> Generator[Any, Any, None]:
        created = yield from self.directory.await_creation().__await__()
        self.files.write(Path(str(created)))


class _Handler:
    """Writes the one item of such a checkpoint for Orbax, or returns the place of its files."""

    async def save(self, directory: Any, checkpointable: _Files) -> Awaitable[None]:
        return _AwaitableWrite(directory, checkpointable)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Path]:
        async def read() -> Path:
            return Path(str(directory))

        return read()

    async def metadata(self, directory: Any) -> None:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, _Files)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None


def _close_unstarted_coroutines(error: BaseException) -> None:
    """Close the coroutines that Orbax created and had not begun when it failed; Python would warn of each."""
    chain: BaseException | None = error
    while chain is not None:
        for frame, _ in traceback.walk_tb(chain.__traceback__):
            for value in tuple(frame.f_locals.values()):
                for candidate in (value, getattr(value, "_background_awaitable", None)):
                    if inspect.iscoroutine(candidate) and inspect.getcoroutinestate(candidate) == inspect.CORO_CREATED:
                        candidate.close()
        chain = chain.__cause__ or chain.__context__


class _Orbax:
    """Orbax with the handler above. It is imported at first use."""

    def __init__(self) -> None:
        from orbax.checkpoint import v1

        self._v1 = v1
        self._registry = v1.handlers.local_registry(include_global_registry=False)
        self._registry.add(_Handler, checkpointable_name=ITEM)

    def _context(self) -> Any:
        context = self._v1.Context()
        context.checkpointables.registry = self._registry
        return context

    def save(self, path: Path, write: Callable[[Path], None]) -> None:
        with ONE_AT_A_TIME, self._context():
            try:
                self._v1.save_checkpointables(path, {ITEM: _Files(write)})
            except BaseException as error:
                _close_unstarted_coroutines(error)
                raise

    def load(self, path: Path) -> Path:
        """Return the folder of the files, once Orbax has verified that the checkpoint is complete."""
        with self._context():
            return Path(self._v1.load_checkpointables(path)[ITEM])


orbax = functools.cache(_Orbax)
