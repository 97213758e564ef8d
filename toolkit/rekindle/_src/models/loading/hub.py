"""Finds a model: a local folder or file, a name in another tool's store, or a hub id to download once."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.core.atomic_checkpoint import ITEM
from rekindle._src.core.config import cache_folder
from rekindle._src.core.names import nearest
from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.loading.gguf import files as gguf_files
from rekindle._src.models.loading.stores import known
from rekindle._src.models.loading.stores.model_store import children
from rekindle.errors import CheckpointError, MissingExtra

EMBEDDED = ("tiny", "tiny-vision")  # names of the models in the package
MAX_DESCRIPTION = 16 << 20  # bytes of the description of kept weights
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)((?:/[\w.-]+)*\.gguf)?(?:@([\w./-]+))?", re.IGNORECASE)
_WANTED = ["*.json", "*.jinja", "*.safetensors", "additional_chat_templates/*"]
_WIDTH = 200  # characters of another package's error
_UNWANTED = ["consolidated*", "original/*", "adapter*", "onnx/*", "*training_args*"]


class HubId(NamedTuple):
    """The parts of a hub id."""

    name: str  # owner/name
    file: str | None  # a GGUF file of it
    revision: str | None


def readable_name(model: str | Path) -> str:
    """Return a readable name: an embedded model's, the hub id of a download, the first name in another tool's store, or
    the name of the model's folder or file.
    """
    path = Path(model).expanduser()
    for name in known.names_at(path):
        return name
    for part in path.parts:
        if part.startswith("models--"):  # in the hub's cache
            return part.removeprefix("models--").replace("--", "/")
    if path.parts[-3:-1] == ("rekindle", "tiny"):  # where the package has them
        return {"model": "tiny", "vision": "tiny-vision"}.get(path.name, path.name)
    if str(model) in EMBEDDED:
        return str(model)
    return path.resolve().name if path.exists() else str(model)


class ModelPlace(NamedTuple):
    """The place of a model."""

    path: Path  # a folder or a GGUF file
    projector: Path | None = None  # the file that reads pictures, where a store says which


def on_disk(model: str | Path) -> ModelPlace | None:
    """Return the place of a model that is on this machine: a path, or a name such as `ollama:qwen3:0.6b`.

    Return None for anything else. Raise `CheckpointError` if a store that it names does not have it, and for a path
    that this process can't look at.
    """
    try:
        path = Path(model).expanduser()
        if path.exists():
            return ModelPlace(path)
    except (OSError, RuntimeError) as error:  # too long, in a closed folder, or in an unknown user's home
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{str(model)[:_WIDTH]!r} can't be looked at ({reason}). Pass the path of one that you can read."
        ) from error
    found = known.find(model)
    return None if found is None else ModelPlace(found[1].path, found[1].projector)


def locate(model: str | Path) -> ModelPlace:
    """Return the place of `model`: an existing path, a name in a store, or else a download.

    Hub ids are `owner/name` and `owner/name/file.gguf`, each with or without `@revision` after it.
    """
    return on_disk(model) or ModelPlace(download(model))


def download(model: str | Path) -> Path:
    """Return the folder or GGUF file of a hub id, updated from the hub if it can be reached."""
    request = hub_id(model)
    if request is None:
        raise CheckpointError(f"{model} is on this machine, and no hub id. Pass one such as 'owner/name'.")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "hub") from error
    try:
        return _download(hub, request)
    except CheckpointError:
        raise
    except Exception as error:  # network, authentication, unknown repository: all of them end here
        words = str(error).strip().splitlines()[0][:_WIDTH] if str(error).strip() else "no message"
        raise CheckpointError(
            f"There is no folder {Path(model).expanduser()}, and the hub's {model!r} could not be downloaded "
            f"({type(error).__name__}: {words}). {_download_fix(request)}"
        ) from None  # the message says what was wrong; the chain is some 300 lines of HTTP


def _download_fix(request: HubId) -> str:
    """Return the advice for a download that failed: a model of nearly the same name that is here, or the network."""
    near = known.near_name(request.name if request.file is None else f"{request.name}/{request.file}")
    if near:
        return f"This machine has {near!r}."
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "Unset HF_HUB_OFFLINE, or see what `rekindle ls` lists."
    return "Check the name, the network and your access."


def hub_id(model: str | Path) -> HubId | None:
    """Return the parts of a hub id, None for a model that is on this machine. Raise `CheckpointError` for anything
    else."""
    if on_disk(model) is not None:
        return None
    folder = Path(model).expanduser()
    match = None if isinstance(model, Path) else _HUB_ID.fullmatch(model)
    if match is None or match[1].lower().endswith(gguf_files.SUFFIX):  # the name of a file, not of a repository
        if str(model) in _kept_names():  # `rekindle ls` lists it, and says the same
            raise CheckpointError(
                f"{folder} does not exist. The cache keeps weights of a model of this name, but not its path. "
                "Pass the file or folder that these weights were made of."
            )
        raise CheckpointError(
            f"{folder} does not exist. {_nearest(folder)}Pass a checkpoint's folder or GGUF file, a hub id such as "
            "'owner/name', a name that `rekindle ls` says opens, or 'tiny' for the embedded model."
        )
    name, file, revision = match.groups()
    return HubId(name, file and file[1:], revision)


def _kept_names() -> set[str]:
    """Return the names of the models with weights in the default cache, as their descriptions have them."""
    names = set[str]()
    for path in children(cache_folder() / "weights"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # a damaged one is made again
            content = read_plain(path / ITEM / "model.json", MAX_DESCRIPTION)
            names.add(str(json.loads(content[content.index(b"{") :])["name"]))
    return names


def _nearest(folder: Path) -> str:
    """Return a question that offers a neighbour of nearly the same name; "" if there is none."""
    with contextlib.suppress(OSError):
        neighbours = [path.name for path in folder.parent.iterdir() if path.is_dir() or gguf_files.is_gguf(path)]
        alone = folder.parent == Path()
        close = nearest(folder.name, [*(EMBEDDED if alone else ()), *neighbours], 0.75)
        if close:
            return f"Did you mean {str(folder.parent / close)!r}? "
    near = known.near_name(str(folder))
    return f"Did you mean {near!r}? " if near else ""


def _download(hub: Any, asked: HubId) -> Path:
    if asked.file is not None:
        return _download_gguf(hub, asked, asked.file)
    options = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    folder = Path(hub.snapshot_download(asked.name, revision=asked.revision, **options))
    if any(folder.glob("*.safetensors*")) or gguf_files.in_folder(folder) is not None:
        return folder
    # A repository of GGUF files has many of them, each a whole model.
    names = hub.HfApi().list_repo_files(asked.name, revision=asked.revision)
    file = gguf_files.only(names, f"The hub's {asked.name}", f"{asked.name}/{{}}")
    return folder if file is None else _download_gguf(hub, asked, file)


def _download_gguf(hub: Any, asked: HubId, file: str) -> Path:
    """Download all parts of a GGUF file; return the path of the first."""
    head, slash, tail = file.rpartition("/")
    names = [head + slash + name for name in gguf_files.siblings(tail)]
    paths = [Path(hub.hf_hub_download(asked.name, name, revision=asked.revision)) for name in names]
    return paths[names.index(file)]
