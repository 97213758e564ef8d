"""A checkpoint as it lies on disk, in any supported format: its headers are read, its config is not yet understood."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.core.plain_files import open_plain
from rekindle._src.models.loading import fingerprint as fingerprints
from rekindle._src.models.loading import tensor_files
from rekindle._src.models.loading.gguf import files as gguf_files
from rekindle._src.models.loading.hub import locate
from rekindle._src.models.loading.tensor_files import Header, TensorEntry
from rekindle.errors import CheckpointError

_log = logging.getLogger(__name__)
_mentioned: set[Path] = set()  # checkpoints whose other parts were mentioned
# Keys of the whole that are true of its language model, where that one's own config leaves them out.
_SHARED_KEYS = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")
# Beginnings of tensors' names, and those of the same tensors in a checkpoint of the language model alone.
_LANGUAGE_MODEL = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("lm_head.", "lm_head."),
)
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight", "wte.weight")
_COMPARED_WHOLE, _SAMPLES, _BLOCK = 4 << 20, 32, 4096  # bytes; samples in all; bytes of each
MODULES = "modules.json"  # of sentence-transformers, beside a model that embeds
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
    if gguf_files.is_file(path):
        from rekindle._src.models.loading.gguf import source as gguf  # other formats don't need it

        raw, headers = gguf.look(path)
        return Stored(path, raw, headers, fingerprints.folder_fingerprint(raw, headers), is_gguf=True)
    files = tensor_files.weight_files(path)
    raw = read_config(path)
    headers = tuple(tensor_files.read_header(file) for file in files)
    fingerprint = fingerprints.folder_fingerprint(raw, headers)
    config, headers = text_config(raw), _language_model(path, raw, headers)
    names = (entry.name for header in headers for entry in header.entries)
    if (path / MODULES).is_file() and not any("lm_head." in name for name in names):
        config |= {"headless": True}
    if config.get("tie_word_embeddings") is not False and _has_another_head(headers):
        config |= {"another_head": True}
    return Stored(path, config, headers, fingerprint)


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model in a model of images or sounds; that of any other model as it is."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return dict(raw)
    shared = {name: raw[name] for name in _SHARED_KEYS if raw.get(name) is not None}
    own = {name: value for name, value in text.items() if value is not None or name not in shared}
    tied = {name: shared[name] for name in ("tie_word_embeddings",) if name in shared}  # the whole model decides
    return {**shared, **own, **tied, "nested_in": raw.get("model_type")}


def _language_model(path: Path, raw: Mapping[str, Any], headers: tuple[Header, ...]) -> tuple[Header, ...]:
    """Return the headers with the tensors of the language model alone, under the names that they have by themselves."""
    if not isinstance(raw.get("text_config"), Mapping):
        return headers
    kept = tuple(header._replace(entries=tuple(_renamed(header.entries))) for header in headers)
    left = {entry.name for header in headers for entry in header.entries}
    count = len(left) - sum(len(header.entries) for header in kept)
    if count and all(len(header.entries) == 0 for header in kept):
        return headers  # an unknown layout: the differences are listed later
    if count and path not in _mentioned:
        _mentioned.add(path)
        towers = sorted({re.sub(r"^model\.", "", name).partition(".")[0] for name in left if not _own_name(name)})
        _log.warning("%s: only the language model is used; %d tensors of %s are not", path, count, ", ".join(towers))
    return kept


def _has_another_head(headers: Iterable[Header]) -> bool:
    """True if the numbers of the stored head are not those of the embedding; of a large one, by samples."""
    entries = {entry.name: entry for header in headers for entry in header.entries}
    head = entries.get("lm_head.weight")
    embedding = next((entries[name] for name in _EMBEDDINGS if name in entries), None)
    if head is None or embedding is None:
        return False
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return True
    count = 1 if head.nbytes <= _COMPARED_WHOLE else _SAMPLES
    size = head.nbytes if count == 1 else _BLOCK
    places = [(head.nbytes - size) * number // max(1, count - 1) for number in range(count)]
    with open_plain(head.file) as one, open_plain(embedding.file) as other:
        for place in places:
            one.seek(head.offset + place)
            other.seek(embedding.offset + place)
            if one.read(size) != other.read(size):
                return True
    return False


def _renamed(entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    for entry in entries:
        name = _own_name(entry.name)
        if name is not None:
            yield entry._replace(name=name)


def _own_name(name: str) -> str | None:
    """Return the name of a language model's tensor in a checkpoint of its own; None for other tensors."""
    for nested, own in _LANGUAGE_MODEL:
        if name.startswith(nested):
            return own + name.removeprefix(nested)
    return None


def checkpoint_path(path: Path) -> Path:
    """Return the GGUF file of a folder that has one and no safetensors; any other path as it is."""
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return path
    return gguf_files.in_folder(path) or path


def read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json of a folder. Raise `CheckpointError` if it is missing, unreadable or no object."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = tensor_files.read_json(path, dict, MAX_CONFIG)
    except CheckpointError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise CheckpointError(
            f"{folder} has no config.json. Pass the folder of a Hugging Face checkpoint."
        ) from error.__cause__
    return config
