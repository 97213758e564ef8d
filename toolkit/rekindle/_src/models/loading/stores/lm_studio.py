"""LM Studio's models: folders PUBLISHER/MODEL with GGUF files, or with safetensors for MLX.

They lie in `models` in LM Studio's home: ~/.lmstudio, or ~/.cache/lm-studio in older versions, or where
~/.lmstudio-home-pointer says. Its settings may name another folder for downloads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rekindle._src.core.names import path_problem
from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.loading.stores.model_store import ModelStore, StoreEntry, StoreReader, home
from rekindle._src.models.loading.tensor_files import read_json
from rekindle.errors import CheckpointError

MAX_SETTINGS = 1 << 20  # bytes


class LMStudio(ModelStore):
    """The models that LM Studio has downloaded or imported."""

    PREFIX, TITLE, REMOVAL = "lmstudio", "LM Studio's models", "LM Studio, under My Models"

    def folders(self) -> list[Path]:
        homes = [home() / ".lmstudio", home() / ".cache" / "lm-studio"]
        pointer = _pointer(home() / ".lmstudio-home-pointer")
        if pointer is not None:
            homes.insert(0, pointer)
        own = (_downloads(folder / "settings.json") for folder in homes)
        return list(dict.fromkeys([*(path for path in own if path is not None), *(path / "models" for path in homes)]))

    def models(self, reader: StoreReader) -> Iterator[StoreEntry]:
        for folder in self.folders():
            for path in reader.levels(folder, 2)[-1]:
                if os.path.isdir(path):
                    yield from reader.models_in(path, path.relative_to(folder).as_posix())

    def key(self, name: str) -> str:
        return name.lower()


def _pointer(file: Path) -> Path | None:
    try:
        return _folder(read_plain(file, 1 << 14).decode().strip())
    except (OSError, ValueError):
        return None


def _downloads(settings: Path) -> Path | None:
    try:
        return _folder(read_json(settings, dict, MAX_SETTINGS).get("downloadsFolder"))
    except CheckpointError:
        return None


def _folder(text: object) -> Path | None:
    """Return a folder that a file of settings names; None for anything but a whole path."""
    if not isinstance(text, str) or not text or path_problem(text) is not None:
        return None
    path = Path(text).expanduser()
    return path if path.is_absolute() else None
