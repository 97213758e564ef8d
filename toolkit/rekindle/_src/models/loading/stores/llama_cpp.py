"""llama.cpp's cache: what `llama-cli -hf owner/name` has downloaded.

Files lie flat in it, as owner_name_file.gguf, with a `manifest=owner=name=tag.json` for each tag; newer versions keep
them in the form of the Hub's cache instead: in the Hub's own one, or here if LLAMA_CACHE is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rekindle._src.models.loading.gguf import files as gguf_files
from rekindle._src.models.loading.stores.hub_cache import repositories
from rekindle._src.models.loading.stores.model_store import ModelStore, StoreEntry, StoreReader, home, variable

_MANIFEST = "manifest="


class LlamaCpp(ModelStore):
    """The models that llama.cpp has downloaded."""

    PREFIX, TITLE, REMOVAL = "llamacpp", "llama.cpp's cache", "deleting its files"

    def folders(self) -> list[Path]:
        own = variable("LLAMA_CACHE")
        if own is not None:
            return [own]
        if sys.platform == "darwin":
            return [home() / "Library" / "Caches" / "llama.cpp"]
        if sys.platform == "win32":
            return [Path(os.environ.get("LOCALAPPDATA") or home()) / "llama.cpp"]
        return [(variable("XDG_CACHE_HOME") or home() / ".cache") / "llama.cpp"]

    def models(self, reader: StoreReader) -> Iterator[StoreEntry]:
        for folder in self.folders():
            names = [path.name for path in reader.children(folder) if os.path.isfile(path)]
            for name in gguf_files.models([name for name in names if "mmproj" not in name.lower()]):
                yield StoreEntry(name.removesuffix(gguf_files.SUFFIX), folder / name, _projector(folder, name, names))
            yield from repositories(folder, reader)

    def key(self, name: str) -> str:
        return name.removesuffix(gguf_files.SUFFIX)


def _projector(folder: Path, model: str, names: list[str]) -> Path | None:
    """Return the only picture reader of the same repository, if a manifest names it."""
    manifests = (name.removeprefix(_MANIFEST).split("=") for name in names if name.startswith(_MANIFEST))
    for owner, repository in {(parts[0], parts[1]) for parts in manifests if len(parts) >= 3}:
        beginning = f"{owner}_{repository}_"
        if model.startswith(beginning):
            files = [name for name in names if name.startswith(beginning) and "mmproj" in name.lower()]
            files = [name for name in files if name.lower().endswith(gguf_files.SUFFIX)]
            return folder / files[0] if len(files) == 1 else None
    return None
