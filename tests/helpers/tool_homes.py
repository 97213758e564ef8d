"""Homes as Ollama, LM Studio, llama.cpp and the Hub's package make them, by their documented layouts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS", "REKINDLE_CACHE",
    "XDG_CACHE_HOME",
)  # fmt: skip
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KIND = "application/vnd.ollama.image."


def empty(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home, which all tools use for their models."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("rekindle._src.models.loading.stores.ollama.SERVICE", home / "no-service")
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    return home


def blob(store: Path, content: bytes) -> dict[str, Any]:
    """A layer of Ollama's, without its kind."""
    digest = hashlib.sha256(content).hexdigest()
    path = store / "blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def manifest(store: Path, **layers: bytes) -> dict[str, Any]:
    """A manifest of layers by their kinds."""
    listed = [{"mediaType": KIND + kind, **blob(store, content)} for kind, content in layers.items()]
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", **blob(store, b"{}")}
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": config,
        "layers": listed,
    }


def ollama(store: Path, name: str, content: Mapping[str, Any] | bytes, *, newer: bool = False) -> Path:
    """A tag of Ollama's store, `library/qwen3/0.6b` or with the host before it; newer ones are links to blobs."""
    parts = name.split("/")
    host = parts[:-3] or ["registry.ollama.ai"]
    path = store.joinpath("manifests-v2" if newer else "manifests", *host, *parts[-3:])
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    if newer:
        digest = blob(store, data)["digest"].replace(":", "-")
        path.symlink_to(os.path.relpath(store / "blobs" / digest, path.parent))
    else:
        path.write_bytes(data)
    return path


def hub(cache: Path, name: str, files: Mapping[str, bytes], *, commit: str = COMMIT) -> Path:
    """A download in the Hub's cache: links to blobs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for file, content in files.items():
        stored = repository / "blobs" / hashlib.sha256(content).hexdigest()
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_bytes(content)
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(stored, link.parent))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def lm_studio(models: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """A folder PUBLISHER/MODEL of LM Studio's."""
    folder = models / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


def llama_cpp(cache: Path, repository: str, files: Mapping[str, bytes], *, tag: str = "Q8_0") -> None:
    """The flat files of an older llama.cpp, with their manifest."""
    cache.mkdir(parents=True, exist_ok=True)
    owner, name = repository.split("/")
    for file, content in files.items():
        (cache / f"{owner}_{name}_{file}").write_bytes(content)
        (cache / f"{owner}_{name}_{file}.json").write_text("{}")
    (cache / f"manifest={owner}={name}={tag}.json").write_text("{}")
