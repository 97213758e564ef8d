"""Adapters from wherever they are: a PEFT folder, a GGUF file, or a trainer's arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle._src.models.adapters import peft
from rekindle._src.models.adapters.adapter import Adapter
from rekindle._src.models.adapters.sites import sites_of
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.gguf.files import is_gguf
from rekindle.errors import CheckpointError


def read_adapter(source: Any, name: str, config: ModelConfig, *, alpha: float | None = None) -> Adapter:
    """Return an adapter for a model with this config. Raise CheckpointError for one that does not fit it."""
    sites = sites_of(config)
    if isinstance(source, Adapter):
        return Adapter(name, source.digest, source.products)
    if not isinstance(source, str | Path):
        from rekindle._src.models.adapters.states import read_state

        return read_state(source, name, sites, alpha=alpha)
    path = Path(source).expanduser()
    if is_gguf(path) and path.is_file():
        from rekindle._src.models.adapters.llama_cpp import read_file

        return read_file(path, name, config, sites)
    if not path.is_dir():
        raise CheckpointError(
            f"The adapter {name!r} is at {str(source)!r}, which is not a folder. Pass a local folder: "
            "huggingface_hub.snapshot_download(…) returns that of an adapter on the hub."
        )
    return peft.read_folder(path, name, sites)
