"""The parts of a model family: the reader of its config.json, its module, and its weights' places in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.hf_config import Keys
from rekindle._src.models.loading.manifest import Manifest
from rekindle._src.models.precision import Precision


class Family(NamedTuple):
    """The entry of one model_type; every module in `families` ends with its own as `FAMILY`."""

    architecture: str  # as in config.json's `architectures`
    config: Callable[[Keys], ModelConfig]
    module: Callable[[ModelConfig, Precision], Any]
    manifest: Callable[[ModelConfig], Manifest]
    aliases: Mapping[str, str] = MappingProxyType({})  # transformers' `attribute_map` for this model_type
