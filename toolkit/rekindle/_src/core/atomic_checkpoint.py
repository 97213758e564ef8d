"""Folders of files that Orbax commits: complete or absent, written one at a time, read without importing Orbax.

Orbax commits a checkpoint as a whole or not at all. It is written under a name of its own and renamed, because of two
writers of one path Orbax lets the second remove what the first is writing. Readers open the files in `<path>/<ITEM>`
themselves: importing Orbax takes 0.1 s and more, which only those pay who write.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import threading
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

# Orbax's operations signal each other through counters of the whole process: two saves in two threads, even to
# different paths, were seen to create each other's folders or to wait for one another until a timeout.
ONE_AT_A_TIME = threading.Lock()
PARTIAL = "partial-"
ITEM = "rekindle"  # the item of such a checkpoint, hence the folder that its files are in
_unfinished: set[Path] = set()


def write_checkpoint(path: Path, write: Callable[[Path], None]) -> None:
    """`write` fills the folder of a new Orbax checkpoint, which is at `path` when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    _unfinished.add(own)
    try:
        orbax().save(own, write)
        own.rename(path)
    except BaseException:
        _remove(own)
        raise
    finally:
        _unfinished.discard(own)


def abandon() -> None:
    """Remove what this process is still writing: it ends."""
    for own in list(_unfinished):
        _remove(own)


def _remove(own: Path) -> None:
    for left in own.parent.glob(f"{own.name}*"):  # Orbax writes to a name of its own, which starts like this one
        shutil.rmtree(left, ignore_errors=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    write: Callable[[Path], None]


class _Handler:
    """What Orbax calls to write the one item of such a checkpoint, or to find where its files are."""

    async def save(self, directory: Any, checkpointable: _Files) -> Awaitable[None]:
        async def write() -> None:
            checkpointable.write(Path(str(await directory.await_creation())))

        return write()

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


class _Orbax:
    """Orbax with the handler above; imported at first use."""

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
            self._v1.save_checkpointables(path, {ITEM: _Files(write)})

    def load(self, path: Path) -> Path:
        """The folder of the files, after Orbax has found the checkpoint complete."""
        with self._context():
            return Path(self._v1.load_checkpointables(path)[ITEM])


orbax = functools.cache(_Orbax)
