"""The parts of a family's encoder, named by its module in `towers`: it reads configs, computes, and takes tensors from
files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rekindle._src.models.loading.gguf.rewrites import HeadOrder, TensorRewrite
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.vision.config import VisionConfig, VisionKeys
from rekindle._src.models.vision.inputs import PatchGrid, PositionRows
from rekindle.errors import CheckpointError

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel
    from rekindle._src.models.precision import Precision
    from rekindle._src.models.vision.layers import VisionTower
else:  # towers annotate with these types, and import no readers
    GgufModel = Any

Positions = Callable[[VisionConfig, PatchGrid, Any, Any], PositionRows]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MmprojForm:
    """An encoder as the GGUF file that llama.cpp calls mmproj."""

    projector: str  # `clip.projector_type`, or `clip.vision.projector_type`
    read: Callable[[GgufModel], VisionConfig]
    # llama.cpp's names by the manifest's, of modules or of whole tensors. {n} is a number.
    names: Callable[[VisionConfig], Mapping[str, str]]
    # How the file's tensor is another than the checkpoint's, None if it is not.
    rewritten: Callable[[VisionConfig, str], TensorRewrite | None] = lambda config, name: None
    swapped: frozenset[str] = frozenset()  # tensors with their first two axes swapped by the converter
    # Tensors that the file splits, one for each frame.
    frames: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


class TowerFamily(NamedTuple):
    """The entry of one model_type in the `TOWERS` of its module."""

    config: Callable[[VisionKeys], VisionConfig]
    defaults: Mapping[str, Any]  # transformers', for keys that a vision_config leaves out
    module: Callable[[VisionConfig, Precision], VisionTower]
    manifest: Callable[[VisionConfig], Manifest]
    # What names of tensors begin with in a checkpoint, and in the manifest; the first that fits is taken.
    beginnings: tuple[tuple[str, str], ...]
    positions: Positions
    blocks: bool = False  # patches come token by token, else row by row
    mmproj: MmprojForm | None = None
    aliases: Mapping[str, str] = MappingProxyType({})  # transformers' `attribute_map` of the vision_config


def with_bias(path: str, name: str, rows: int, *, bias: bool = True) -> dict[str, Source]:
    """Return the sources of a module's weight and, unless it has none, of its bias."""
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{path}.{part}": one(f"{name}.{part}", rows) for part in parts}


def fused(path: str, names: tuple[str, ...], rows: int) -> dict[str, Source]:
    """Return the sources of modules with so many rows each, which are one here, with their biases."""
    return {
        f"{path}.{part}": Source(names=tuple(f"{name}.{part}" for name in names), rows=(rows,) * len(names))
        for part in ("weight", "bias")
    }


def vision_keys(model: GgufModel) -> dict[str, Any]:
    """Return the keys that the metadata of all encoders have, as a vision_config has them."""
    return {
        "hidden_size": model.integer("embedding_length"),
        "intermediate_size": model.integer("feed_forward_length"),
        "patch_size": model.integer("patch_size"),
    }


def rows_of(model: GgufModel, name: str, axis: int = 0) -> int:
    """Return the length of a tensor's axis. Raise `CheckpointError` if the file does not have it."""
    tensor = model.tensors.get(name)
    if tensor is None or len(tensor.shape) <= axis:
        problem = "is missing" if tensor is None else f"has shape {[*tensor.shape]}"
        raise CheckpointError(f"{model.header.path}: {name} {problem}. Download it again.")
    return tensor.shape[axis]


def pixel_order(config: VisionConfig) -> HeadOrder:
    """Return how files have the numbers of a patch, channel by channel, where a checkpoint has them pixel by pixel."""
    pixels = config.patch_size**2
    return HeadOrder(0, pixels, pixels * config.channels, 1)
