"""The Hub's cache, which huggingface_hub, transformers and newer llama.cpp share.

models--owner--name/refs/main               the commit that "main" was when it was last downloaded
models--owner--name/snapshots/COMMIT/…      the files of a commit, as links to blobs
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.loading.stores.model_store import (
    ModelStore,
    StoreEntry,
    StoreReader,
    home,
    variable,
)

FOLDER = "models--"  # the beginning of a repository's folder; "--" stands for the slash
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LEVELS = 3  # levels of folders to search for GGUF files in a repository, as in owner/name/BF16/model.gguf


class HubCache(ModelStore):
    """The models that were downloaded from the Hub."""

    PREFIX, TITLE, REMOVAL = "hub", "the Hub's cache", "`hf cache rm model/{}`"

    def folders(self) -> list[Path]:
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            if (own := variable(name)) is not None:
                return [own]
        above = variable("HF_HOME") or (variable("XDG_CACHE_HOME") or home() / ".cache") / "huggingface"
        return [above / "hub"]

    def models(self, reader: StoreReader) -> Iterator[StoreEntry]:
        for folder in self.folders():
            yield from repositories(folder, reader)


def repositories(folder: Path, reader: StoreReader) -> Iterator[StoreEntry]:
    """Yield the models of a folder in the form of the Hub's cache."""
    for path in reader.children(folder):
        if path.name.startswith(FOLDER):
            snapshot = _snapshot(path, reader)
            if snapshot is not None:
                name = path.name.removeprefix(FOLDER).replace("--", "/")
                yield from reader.models_in(snapshot, name, levels=_LEVELS)


def _snapshot(repository: Path, reader: StoreReader) -> Path | None:
    """Return the files of the main branch; else the files that were changed last. None if there are none."""
    snapshots = [path for path in reader.children(repository / "snapshots") if _COMMIT.fullmatch(path.name)]
    snapshots = [path for path in snapshots if os.path.isdir(path)]
    try:
        commit = read_plain(repository / "refs" / "main", 64).decode().strip()
    except (OSError, ValueError):
        commit = ""
    for path in snapshots:
        if path.name == commit:
            return path
    return max(snapshots, key=_changed, default=None)


def _changed(path: Path) -> float:
    """Return when a folder was changed; 0 if it went meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
