"""A checkpoint as it lies on disk, in any supported format: its headers are read, its config is not yet understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.loading.gguf import files as gguf_files
from rekindle._src.models.loading.hub import locate
from rekindle._src.models.loading.tensor_files import Header
from rekindle.errors import CheckpointError

MAX_CONFIG = 16 << 20  # bytes; the longest published config.json has some 100 KB


class Stored(NamedTuple):
    """A checkpoint whose config was parsed and whose headers were read."""

    path: Path  # the folder, or the GGUF file
    raw: dict[str, Any]  # config.json, or its equivalent
    headers: tuple[Header, ...]
    fingerprint: str  # of config and weights as stored, whatever precision they are loaded in
    is_gguf: bool = False

    @property
    def may_be_quantized(self) -> bool:
        """True if some of its tensors may not be stored as plain numbers."""
        return self.is_gguf or bool(self.raw.get("quantization_config") or self.raw.get("compression_config"))

    @property
    def described_by(self) -> str:
        """The place of the model's description, in words."""
        return "its metadata" if self.is_gguf else "its config.json"


def look(model: str | Path) -> Stored:
    """Read config, headers and fingerprint of a folder, a GGUF file or a hub id: milliseconds, whatever the size."""
    path = checkpoint_path(locate(model))
    if path.is_file() and gguf_files.is_gguf(path):
        from rekindle._src.models.loading.gguf import source as gguf  # other formats don't need it

        raw, headers = gguf.look(path)
        return Stored(path, raw, headers, fingerprints.folder_fingerprint(raw, headers), is_gguf=True)
    files = tensor_files.weight_files(path)
    raw = read_config(path)
    headers = tuple(tensor_files.read_header(file) for file in files)
    return Stored(path, raw, headers, fingerprints.folder_fingerprint(raw, headers))


def checkpoint_path(path: Path) -> Path:
    """Return the GGUF file of a folder that has one and no safetensors; any other path as it is."""
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return path
    return gguf_files.in_folder(path) or path


def read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json of a folder. Raise `CheckpointError` if it is missing, unreadable or no object."""
    path = folder / "config.json"
    try:
        raw = json.loads(read_plain(path, MAX_CONFIG))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no config.json. Pass the folder of a Hugging Face checkpoint.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read ({error}). Download it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, not an object. Download it again.")
    return raw
