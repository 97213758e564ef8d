"""Finding a model: a local folder or file, or a hub id, whose files huggingface_hub downloads once."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.models.loading.gguf import files as gguf_files
from rekindle.errors import CheckpointError, MissingExtra

EMBEDDED = ("tiny", "tiny-vision")  # names of the models in the package
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)((?:/[\w.-]+)*\.gguf)?(?:@([\w./-]+))?", re.IGNORECASE)
_WANTED = ["*.json", "*.jinja", "*.safetensors", "additional_chat_templates/*"]
_UNWANTED = ["consolidated*", "original/*", "adapter*", "onnx/*", "*training_args*"]


class HubId(NamedTuple):
    """The parts of a hub id."""

    name: str  # owner/name
    file: str | None  # a GGUF file of it
    revision: str | None


def readable_name(model: str | Path) -> str:
    """Return a readable name: that of an embedded model, the hub id of a download, or that of its folder or file."""
    path = Path(model).expanduser()
    for part in path.parts:
        if part.startswith("models--"):  # in the hub's cache
            return part.removeprefix("models--").replace("--", "/")
    if path.parts[-3:-1] == ("rekindle", "tiny"):  # where the package has them
        return {"model": "tiny", "vision": "tiny-vision"}.get(path.name, path.name)
    if str(model) in EMBEDDED:
        return str(model)
    return path.resolve().name if path.exists() else str(model)


def locate(model: str | Path) -> Path:
    """Return the folder or GGUF file of `model`: a path, or a download if no such path exists.

    Hub ids are `owner/name` and `owner/name/file.gguf`, each with or without `@revision` after it.
    """
    request = hub_id(model)
    if request is None:
        return Path(model).expanduser()
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "hub") from error
    try:
        return _download(hub, request)
    except CheckpointError:
        raise
    except Exception as error:  # network, authentication, unknown repository: all of them end here
        raise CheckpointError(
            f"There is no folder {Path(model).expanduser()}, and the hub's {model!r} could not be downloaded "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}). "
            "Check the name, the network and your access."
        ) from None  # the message says what was wrong; the chain is some 300 lines of HTTP


def hub_id(model: str | Path) -> HubId | None:
    """Return the parts of a hub id, None for a path that exists. Raise `CheckpointError` for anything else."""
    folder = Path(model).expanduser()
    if folder.exists():
        return None
    match = None if isinstance(model, Path) else _HUB_ID.fullmatch(model)
    if match is None or match[1].lower().endswith(gguf_files.SUFFIX):  # the name of a file, not of a repository
        raise CheckpointError(
            f"{folder} does not exist. {_nearest(folder)}Pass a checkpoint's folder or GGUF file, a hub id such as "
            "'owner/name', or 'tiny' for the embedded model."
        )
    name, file, revision = match.groups()
    return HubId(name, file and file[1:], revision)


def _nearest(folder: Path) -> str:
    """Return a question that offers a neighbour of nearly the same name; "" if there is none."""
    with contextlib.suppress(OSError):
        neighbours = [path.name for path in folder.parent.iterdir() if path.is_dir() or gguf_files.is_gguf(path)]
        alone = folder.parent == Path()
        close = difflib.get_close_matches(folder.name, [*(EMBEDDED if alone else ()), *neighbours], n=1, cutoff=0.75)
        if close:
            return f"Did you mean {str(folder.parent / close[0])!r}? "
    return ""


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
