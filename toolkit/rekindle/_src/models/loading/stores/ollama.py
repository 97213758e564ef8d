"""Ollama's store: a manifest for each tag, and blobs by their digests; one blob is the model's GGUF file.

    manifests/registry.ollama.ai/library/qwen3/0.6b     JSON, with a layer for the model and one for its projector
    manifests-v2/…                                      the same, as links to blobs; where both are, this is newer
    blobs/sha256-…                                      layers by their digests

A manifest may list several others, for different runners; the one in GGUF is read. Ollama's own template and options
are not: a GGUF file has a chat template itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle._src.models.loading.stores.model_store import ModelStore, StoreEntry, StoreReader, home, variable
from rekindle.errors import CheckpointError

MAX_MANIFEST = 4 << 20  # bytes; a GGUF model's has about one KB
MAX_LAYERS = 1 << 16  # of a manifest; a model that is stored tensor by tensor has one for each
MAX_LISTED = 16  # manifests in a manifest
_KIND = "application/vnd.ollama.image."  # before "model", "projector", "adapter", "tensor" and others
_LIST = "application/vnd.ollama.manifest.list.v2+json"
_RUNNERS = ("ollama", "llamacpp")  # runners that take GGUF, the preferred one first
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
SERVICE = Path("/usr/share/ollama/.ollama/models")  # of Ollama as a service on Linux, with the user `ollama`


class Ollama(ModelStore):
    """The models that Ollama has pulled or made."""

    PREFIX, TITLE, REMOVAL = "ollama", "Ollama's store", "`ollama rm {}`"

    def folders(self) -> list[Path]:
        own = variable("OLLAMA_MODELS")
        return [home() / ".ollama" / "models", SERVICE] if own is None else [own]

    def models(self, reader: StoreReader) -> Iterator[StoreEntry]:
        for folder in self.folders():
            for manifests in (folder / "manifests-v2", folder / "manifests"):
                for path in reader.levels(manifests, 4)[-1]:
                    parts = path.relative_to(manifests).parts
                    if all(_PART.fullmatch(part) for part in parts):
                        yield _entry(folder, path, _short(parts), reader)

    def key(self, name: str) -> str:
        return _full(name).lower()


def _short(parts: Sequence[str]) -> str:
    """Return a name as Ollama shows it, without the parts that are there by default."""
    host, namespace, model, tag = parts
    before = f"{host}/{namespace}/" if host != _HOST else "" if namespace == _NAMESPACE else f"{namespace}/"
    return f"{before}{model}:{tag}"


def _full(name: str) -> str:
    """Return a name with all of its parts."""
    path, _, tag = name.rpartition("/")[2].partition(":")
    above = name.rpartition("/")[0].split("/") if "/" in name else []
    host, namespace = (_HOST, _NAMESPACE, *above)[-2:] if len(above) != 1 else (_HOST, above[0])
    return f"{host}/{namespace}/{path}:{tag or _TAG}"


def _entry(folder: Path, manifest: Path, name: str, reader: StoreReader) -> StoreEntry:
    try:
        layers = _layers(folder, manifest, reader)
        models, projectors = (_blobs(folder, layers, kind) for kind in ("model", "projector"))
        if not models:
            tensors = any(layer.get("mediaType") == f"{_KIND}tensor" for layer in layers)
            problem = "is stored tensor by tensor, not in GGUF" if tensors else "has no weights on this machine"
        elif len(models) > 1 or any(layer.get("mediaType") == f"{_KIND}adapter" for layer in layers):
            problem = "has an adapter or several files, which only Ollama puts together"
        elif not os.path.isfile(models[0]):
            problem = f"lacks its weights, {models[0].name}; `ollama pull {name}` fetches them"
        else:
            return StoreEntry(name, models[0], projectors[0] if len(projectors) == 1 else None)
    except CheckpointError as error:
        problem = f"has a manifest that can't be used: {error}".rstrip(".")
    return StoreEntry(name, manifest, problem=problem)


def _layers(folder: Path, manifest: Path, reader: StoreReader) -> list[Mapping[str, Any]]:
    """Return the layers of a manifest; of a list of manifests, the layers of the GGUF one."""
    content: Any = reader.object_in(manifest, MAX_MANIFEST)
    if content.get("mediaType") == _LIST:
        several = _list(content, "manifests")[:MAX_LISTED]
        readable = [one for runner in _RUNNERS for one in several if one.get("runner") == runner]
        if not readable:
            return []
        content = readable[0]
        if "layers" not in content:
            (blob,) = _paths(folder, [content.get("digest")])
            content = reader.object_in(blob, MAX_MANIFEST)
    return _list(content, "layers")[:MAX_LAYERS]


def _list(content: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = content.get(key)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _blobs(folder: Path, layers: Sequence[Mapping[str, Any]], kind: str) -> list[Path]:
    return _paths(folder, [layer.get("digest") for layer in layers if layer.get("mediaType") == _KIND + kind])


def _paths(folder: Path, digests: Sequence[Any]) -> list[Path]:
    paths = []
    for digest in digests:
        match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
        if match is None:
            raise CheckpointError(f"{str(digest)[:80]!r} is no digest.")
        paths.append(folder / "blobs" / f"sha256-{match[1].lower()}")
    return paths
