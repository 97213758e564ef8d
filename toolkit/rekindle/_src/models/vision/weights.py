"""The weights of an encoder: the tensors of a checkpoint by the names of its manifest, checked, then read or taken.

Tensors are entries of files, which are read straight into their final form as for language models, or arrays
in memory. Tensors of other parts of the model are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from rekindle._src.core.words import count
from rekindle._src.models.loading import reading
from rekindle._src.models.loading.leaf_arrays import Reads
from rekindle._src.models.loading.load_progress import ByteMeter, Report
from rekindle._src.models.loading.manifest import Manifest
from rekindle._src.models.loading.tensor_files import FLOATS, TensorEntry, listed
from rekindle._src.models.vision.config import VisionConfig
from rekindle._src.models.vision.registry import tower_family, tower_manifest
from rekindle._src.models.vision.tower import AbstractTower
from rekindle.errors import CheckpointError

Tensor = TypeVar("Tensor", bound=Any)  # a `TensorEntry` or an array


class TowerTensors(NamedTuple, Generic[Tensor]):
    """An encoder's tensors in a checkpoint, by the names of the manifest."""

    config: VisionConfig
    manifest: Manifest
    tensors: Mapping[str, Tensor]
    origin: str  # of error messages: the folder or file
    shown: Callable[[str], str] = str  # a manifest's name as the checkpoint has it


def tower_tensors(config: VisionConfig, stored: Mapping[str, Tensor], origin: str) -> TowerTensors[Tensor]:
    """Select the encoder's tensors from a Hugging Face checkpoint, by their names there.

    Raise `CheckpointError` for more layers than there are tensors: it costs little to ask before the encoder is made.
    """
    if config.num_layers > len(stored):
        raise CheckpointError(
            f"{origin} does not hold the encoder of pictures that config.json describes: {config.num_layers:,} layers, "
            f"and the weights are {len(stored):,} tensors. Check that both belong together."
        )
    beginnings = tower_family(config.model_type).beginnings
    tensors, names = dict[str, Tensor](), dict[str, str]()
    for name, tensor in stored.items():
        own = next((own + name[len(theirs) :] for theirs, own in beginnings if name.startswith(theirs)), None)
        if own is None:
            continue
        if own in names:
            raise CheckpointError(
                f"{origin} has two tensors for {own}: {names[own]} and {name}. Keep the weights of one model in it."
            )
        tensors[own], names[own] = tensor, name
    return TowerTensors(config, tower_manifest(config), tensors, origin, lambda name: names.get(name, name))


def checked(tower: AbstractTower, stored: TowerTensors[Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the encoder needs, by the manifest's names and in its shapes.

    One `CheckpointError` lists all that are missing, unexpected or misshapen.
    """
    shapes, needed, problems = dict(zip(tower.graph.paths, tower.shapes, strict=True)), dict[str, Tensor](), list[str]()
    for path, source in stored.manifest.sources.items():
        for part in source.parts(shapes[path].shape):
            tensor, shown = stored.tensors.get(part.name), stored.shown(part.name)
            if tensor is None:
                problems.append(f"missing: {shown} {list(part.shape)}")
                continue
            needed[part.name] = tensor = _flat(tensor, part.shape)
            if tuple(tensor.shape) != part.shape:
                problems.append(f"{shown}: shape {list(tensor.shape)}, expected {list(part.shape)}")
            elif isinstance(tensor, TensorEntry) and not tensor.has_numbers:
                problems.append(f"{shown}: stored as {tensor.dtype}, expected one of {', '.join(sorted(FLOATS))}")
    pattern = re.compile("|".join(f"(?:{expression})" for expression in stored.manifest.ignored) or r"(?!)")
    problems += [
        f"unexpected: {stored.shown(name)}"
        for name in sorted(stored.tensors)
        if name not in needed and not pattern.fullmatch(name)
    ]
    if problems:
        raise CheckpointError(
            f"{stored.origin} does not hold the encoder of pictures of the {stored.config.model_type} model that its "
            f"config describes ({count(len(problems), 'difference')}): {listed(list(dict.fromkeys(problems)))}. "
            "Check that both belong together."
        )
    return needed


def plan_tower(tower: AbstractTower, stored: TowerTensors[TensorEntry]) -> Reads:
    """Plan the reads for each leaf from the entries of files. Raise `CheckpointError` as `checked` does."""
    entries = checked(tower, stored)
    shapes = dict(zip(tower.graph.paths, tower.shapes, strict=True))
    leaves = [
        reading.LeafPlan(path, source, shapes[path].shape, np.dtype(shapes[path].dtype))
        for path, source in stored.manifest.sources.items()
    ]
    return Reads(leaves, entries)


def read_tower(
    tower: AbstractTower,
    stored: TowerTensors[TensorEntry],
    *,
    place: reading.Place = reading.place_on_default_device,
    progress: Report | None = None,
) -> tuple[Array, ...]:
    """Read the leaves of an encoder from files, in parallel; `place(path, array)` puts each on its device."""
    leaves, entries = plan_tower(tower, stored)
    meter = ByteMeter(sum(entry.nbytes for entry in entries.values()), progress)
    by_path = reading.read_leaves(leaves, entries, place=place, meter=meter)
    meter.tell(final=True)
    return tuple(by_path[path] for path in tower.graph.paths)


def load_tower(tower: AbstractTower, stored: TowerTensors[NDArray[Any]]) -> tuple[Array, ...]:
    """Return the leaves of an encoder from arrays in memory."""
    arrays, leaves = checked(tower, stored), list[Array]()
    for path, leaf in zip(tower.graph.paths, tower.shapes, strict=True):
        source = stored.manifest.sources[path]
        result = np.empty(leaf.shape, leaf.dtype)
        for part in source.parts(leaf.shape):
            values = np.asarray(arrays[part.name], np.float32)
            result[part.place] = (values.T if source.transpose else values) + np.float32(source.add)
        leaves.append(jax.device_put(result))
    return tuple(leaves)


def _flat(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a convolution's kernel as the matrix that patches are multiplied by, and a scalar as a vector of one.

    Other tensors keep their shape, so that a wrong one is a difference.
    """
    stored = tuple(tensor.shape)
    kernel = len(stored) in (4, 5) and len(shape) == 2 and stored[0] == shape[0]
    if not (kernel or (stored == () and shape == (1,))) or np.prod(stored, dtype=np.int64) != np.prod(shape):
        return tensor
    reshaped: Tensor = tensor._replace(shape=shape) if isinstance(tensor, TensorEntry) else tensor.reshape(shape)
    return reshaped
