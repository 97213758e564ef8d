"""A store of another tool: the models in its folders, by the tool's own names.

A store is listed from names of files and from the tool's own small manifests; no model is opened for it. Its files are
a stranger's, and may be another user's: unprintable names are left out, and reading and
listing have limits. `os.path.isdir` and `isfile` return False for inaccessible paths, but pathlib's raise.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rekindle._src.core.names import nearest
from rekindle._src.models.loading.gguf import files as gguf_files
from rekindle._src.models.loading.tensor_files import read_json
from rekindle.errors import CheckpointError

MAX_MODELS = 1000  # of a store
MAX_ENTRIES = 4096  # of a folder, and of a level of folders
MAX_LOOKS = 1 << 18  # entries that are looked at for one listing of a store, in about a second
MAX_SCANNED = 2 * MAX_ENTRIES  # entries of a folder that are passed over for it, hidden ones included
_FOLDER_LOOKS = 16  # of these, so many for each folder
MAX_BYTES = 64 << 20  # of manifests that are read for one listing
MAX_NAME = 256  # characters of a file's name
MOST_NAMED = 5  # models in an error


class StoreEntry(NamedTuple):
    """A model of a store."""

    name: str  # as its tool has it
    path: Path  # a folder, or the first GGUF file
    projector: Path | None = None  # the file that reads pictures, where the store says which
    problem: str = ""  # why it can't be opened, where the store shows it already


class ModelStore(abc.ABC):
    """The models that one tool keeps. `PREFIX` stands before the name of a model, as in `ollama:qwen3:0.6b`."""

    PREFIX: ClassVar[str]
    TITLE: ClassVar[str]  # the tool's name, in a sentence
    REMOVAL: ClassVar[str]  # how a model is removed from it; {} is its name

    @abc.abstractmethod
    def folders(self) -> list[Path]:
        """Return the tool's model folders, whether they exist or not."""

    @abc.abstractmethod
    def models(self, reader: StoreReader) -> Iterator[StoreEntry]:
        """Yield the models of all folders."""

    def entries(self) -> list[StoreEntry]:
        """Return the models sorted by name, at most `MAX_MODELS`; of two with one name the first."""
        by_name: dict[str, StoreEntry] = {}
        for entry in self.models(StoreReader()):
            by_name.setdefault(self.key(entry.name), entry)
            if len(by_name) == MAX_MODELS:
                break
        return sorted(by_name.values(), key=lambda entry: entry.name.lower())

    def key(self, name: str) -> str:
        """Return the common form of a model name's spellings."""
        return name

    def names_at(self, path: Path) -> list[str]:
        """Return the names of the model at a path: one file can have several. None lie outside of the folders."""
        if not any(path.is_relative_to(folder) for folder in self.folders()):
            return []
        return [entry.name for entry in self.entries() if entry.path == path]

    def find(self, name: str) -> StoreEntry:
        """Return a model by its name. Raise `CheckpointError`, with names that are near, if there is none."""
        entries = self.entries()
        for entry in entries:
            if self.key(entry.name) == self.key(name):
                if entry.problem:
                    raise CheckpointError(f"{self.PREFIX}:{entry.name} {entry.problem}.")
                return entry
        names = [entry.name for entry in entries]
        near = nearest(name, names, 0.5)
        if near:
            fix = f"Did you mean {f'{self.PREFIX}:{near}'!r}?"
        elif names:
            more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
            fix = f"It has {', '.join(names[:MOST_NAMED])}{more}."
        else:
            fix = "It is empty. `rekindle ls` lists the models of this machine."
        where = next((folder for folder in self.folders() if os.path.isdir(folder)), self.folders()[0])
        raise CheckpointError(f"There is no {name[:MAX_NAME]!r} in {self.TITLE} ({where}). {fix}")


class StoreReader:
    """Reads folders and manifests for one listing of a store. All that it reads has one bound.

    A few links can lead to one folder, or to one file, millions of times.
    """

    def __init__(self) -> None:
        self._looks, self._bytes = MAX_LOOKS, MAX_BYTES

    def children(self, folder: Path) -> list[Path]:
        """Return the entries of a folder, as `children` does; empty once the bound is reached."""
        if self._looks <= 0:
            return []
        paths = children(folder)
        self._looks -= _FOLDER_LOOKS + len(paths)
        return paths

    def levels(self, folder: Path, depth: int) -> list[list[Path]]:
        """Return the paths of so many levels below a folder, at most `MAX_ENTRIES` of each."""
        levels, level = list[list[Path]](), [folder]
        for _ in range(depth):
            level = [*itertools.islice((path for parent in level for path in self.children(parent)), MAX_ENTRIES)]
            levels.append(level)
        return levels

    def models_in(self, folder: Path, name: str, *, levels: int = 1) -> Iterator[StoreEntry]:
        """Yield the models of a folder: its safetensors as one, and each GGUF file; several get their own names."""
        below = itertools.chain.from_iterable(self.levels(folder, levels))
        names = {path.relative_to(folder).as_posix(): path for path in below if not os.path.isdir(path)}
        tensors = any(path.parent == folder and ".safetensors" in path.name for path in names.values())
        if tensors:
            yield StoreEntry(name, folder)
        files = gguf_files.models([*names])
        for file in files:
            yield StoreEntry(f"{name}/{file}" if tensors or len(files) > 1 else name, names[file])

    def object_in(self, file: Path, most: int) -> dict[str, Any]:
        """Return the JSON object of a file of at most `most` bytes. Raise `CheckpointError` for another content."""
        most = min(most, self._bytes)
        with contextlib.suppress(OSError):
            size = os.stat(file).st_size
            self._bytes -= size if size <= most else 0
        content: dict[str, Any] = read_json(file, dict, most)
        return content


def children(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted, without hidden files and unprintable names; empty if it can't be read."""
    paths: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in itertools.islice(entries, MAX_SCANNED):
                if len(entry.name) <= MAX_NAME and entry.name.isprintable() and not entry.name.startswith("."):
                    paths.append(folder / entry.name)
                if len(paths) == MAX_ENTRIES:
                    break
    except OSError:
        return []
    return sorted(paths)


def home() -> Path:
    """Return the user's home; the current folder where there is none, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path()


def variable(name: str) -> Path | None:
    """Return the folder that an environment variable names; None if it is not set."""
    value = os.environ.get(name, "").strip()
    return Path(os.path.expanduser(value)) if value else None
