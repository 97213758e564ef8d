"""Finding a model's folder: a local one, or that of a hub id, which huggingface_hub downloads once."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from rekindle.errors import CheckpointError, MissingExtra

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_WANTED = ["*.json", "*.jinja", "*.safetensors", "additional_chat_templates/*"]
_UNWANTED = ["consolidated*", "original/*", "adapter*", "onnx/*", "*training_args*"]


def locate(model: str | Path) -> Path:
    """The folder of `model`: a path, or `owner/name` or `owner/name@revision` on the hub if no such path exists."""
    folder = Path(model).expanduser()
    if folder.exists():
        return folder
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{folder} does not exist. Pass a checkpoint's folder, a hub id such as 'owner/name', or 'tiny' for the "
            "embedded model."
        )
    name, _, revision = model.partition("@")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "hub") from error
    try:
        return Path(
            hub.snapshot_download(name, revision=revision or None, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
        )
    except Exception as error:  # network, authentication, unknown repository: all of them end here
        raise CheckpointError(
            f"There is no folder {folder}, and the hub's {model!r} could not be downloaded "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}). "
            "Check the name, the network and your access."
        ) from None  # what was wrong is in the message; the chain is some 300 lines of HTTP
