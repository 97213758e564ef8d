"""The parts of a model family, named by its module in `families`: it reads configs, computes and exports.

They need neither JAX nor flax, so that the config of a checkpoint is known before these are imported. Only `module`,
which makes the model, imports them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.hf_config import ConfigKeys
from rekindle._src.models.loading.gguf.rewrites import TensorRewrite
from rekindle._src.models.loading.manifest import Manifest

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision
else:  # families annotate with these types, and import no readers
    GgufModel = Any

Windows = Callable[[Sequence[bool]], Mapping[str, Any]]


def no_windows(slides: Sequence[bool]) -> dict[str, Any]:
    """Refuse sliding windows in any layer."""
    raise ValueError("llama.cpp knows no sliding windows for it, or none in some layers only")


def windows_in_all_layers(slides: Sequence[bool]) -> dict[str, Any]:
    """Refuse sliding windows in some layers only."""
    return {} if all(slides) else no_windows(slides)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufForm:
    """A family as a GGUF file: the keys that it reads, and what llama.cpp knows by the architecture alone."""

    architecture: str  # `general.architecture`
    others: tuple[str, ...] = ()  # other architectures that are the same family
    # Metadata → the keys of config.json.
    read: Callable[[GgufModel], Mapping[str, Any]] = lambda model: model.decoder() | model.rope()
    variant: Callable[[GgufModel], str | None] = lambda model: None  # another family that has the same architecture
    # llama.cpp's names of modules within a layer, where they differ from `gguf/names.py`.
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of tensors, with the ends of their names
    # Hugging Face's tensors of one number, as in `tensors` → whole keys of the metadata, with a number for each layer.
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused_experts: bool = False  # gate and up of experts are one tensor
    # Of a layer and a tensor of Hugging Face's, as in `tensors`: how the file's is another, None if it is not.
    rewritten: Callable[[ModelConfig, int, str], TensorRewrite | None] = lambda config, layer, name: None
    joined: Callable[[ModelConfig], Mapping[str, tuple[str, ...]]] = lambda config: {}  # the file has several for one
    paired: bool = False  # rows of q and k lie with rotated pairs side by side (LLAMA_ROPE_TYPE_NORM)
    norm: str = "layer_norm_rms_epsilon"
    expert_length: bool = True  # experts have a length of their own in the metadata
    local_rope: bool = False  # layers with a window may have a rope of their own
    activation: str = "silu"
    rotates: Callable[[int], bool] = lambda layer: True
    fields: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: {}  # metadata of this family alone
    scales: bool = False  # the scale of scores is in the metadata
    reads_only: str = ""  # why a model is not written as such a file
    windows: Windows = no_windows  # layers with a window → metadata; raises ValueError where llama.cpp has others
    scale_dim: Callable[[ModelConfig], int] = lambda config: config.head_dim  # scores are divided by its square root


def with_biases(**tensors: str) -> Callable[[GgufModel], dict[str, Any]]:
    """Return a `read` of the usual keys, and of these: each is true if such tensors of the file have biases."""
    return lambda model: (
        model.decoder() | {key: model.has(f"blk.0.{tensor}.bias") for key, tensor in tensors.items()} | model.rope()
    )


def decoder_of(block: str, decoder: str = "Decoder") -> Callable[[ModelConfig, Precision], Any]:
    """Return the `module` of a family with these decoder and blocks, by their names in `nn/decoders.py`."""

    def module(config: ModelConfig, precision: Precision) -> Any:
        from rekindle._src.models.nn import decoders

        return getattr(decoders, decoder)(config, precision, getattr(decoders, block))

    return module


class Family(NamedTuple):
    """The entry of one model_type in the `FAMILIES` of its module."""

    architecture: str  # as in config.json's `architectures`
    config: Callable[[ConfigKeys], ModelConfig]
    module: Callable[[ModelConfig, Precision], Any]
    manifest: Callable[[ModelConfig], Manifest]
    aliases: Mapping[str, str] = MappingProxyType({})  # transformers' `attribute_map` for this model_type
    gguf: GgufForm | None = None  # None: llama.cpp does not know it
    # transformers' defaults of keys that the config of a model of images leaves out for its language model
    nested: Mapping[str, Any] = MappingProxyType({})
    layer_norms: bool = False  # its norms subtract the mean
