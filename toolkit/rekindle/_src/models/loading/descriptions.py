"""Descriptions of small checkpoints, kept in the cache folder: their models, and where each leaf is read.

Larger ones are kept whole (`prepared`), with a description beside the weights. Either way a start that compiles nothing
needs neither flax nor the model's module, which take a quarter of a second to import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rekindle._src.models.loading import graph_json, known_models, prepared
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.models.loading.known_models import Known
from rekindle._src.models.loading.leaf_arrays import LeafPlan
from rekindle._src.models.loading.manifest import Source
from rekindle._src.models.loading.stored import Stored
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.roles import REPLICATED
from rekindle.errors import CheckpointError
from rekindle_kernels import private_files

_SAID = ("names", "rows", "stack", "tiled", "transpose", "add")  # of a source; its role is for meshes
_log = logging.getLogger(__name__)


class Reads(NamedTuple):
    """The leaves and tensors to read from a checkpoint, checked against its headers."""

    leaves: list[LeafPlan]
    entries: dict[str, TensorEntry]  # by the tensor's name


def place(cache_dir: str | Path, seen: Stored, *asked: object) -> Path:
    """Return where the description of a checkpoint is kept for these options, on this platform, by these sources."""
    return prepared.slot(cache_dir, seen.fingerprint, *asked, folder=known_models.FOLDER)


def find(kept: Path, seen: Stored) -> tuple[Known, Reads] | None:
    """Return the description that is kept there; None if there is none, or none that can be used."""
    if private_files.distrust_reason(kept.parent) is not None:
        return None
    try:
        fields = known_models.checked(private_files.read(kept, inside=kept.parent))
        shapes = tuple(jax.ShapeDtypeStruct(tuple(shape), np.dtype(kind)) for shape, kind in fields["shapes"])
        known = Known(graph_json.decode(fields["graph"]), shapes, str(fields["dtype"]))
        return known, _reads(fields, seen)
    except FileNotFoundError:
        return None
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _log.info("the description %s is not used: %s", kept, error)
        return None


def keep(kept: Path, seen: Stored, known: Known, reads: Reads) -> None:
    """Keep the description of a model in which nothing is quantised or packed, as the experts of a layer are.

    A failure costs the next start some time and nothing else.
    """
    plain = all(not (leaf.scale or leaf.stored or leaf.packing or leaf.minimum) for leaf in reads.leaves)
    if not plain or private_files.distrust_reason(kept.parent) is not None:
        return
    fields = {
        "graph": graph_json.encode(known.graph),
        "shapes": [(leaf.shape, leaf.dtype.name) for leaf in known.shapes],
        "dtype": known.dtype,
        "name": readable_name(seen.path),
        "leaves": [
            {
                "path": leaf.path,
                "source": {name: getattr(leaf.source, name) for name in _SAID},
                "shape": leaf.shape,
                "dtype": leaf.dtype.name,
            }
            for leaf in reads.leaves
        ],
        "entries": {name: entry.name for name, entry in reads.entries.items()},
    }
    with contextlib.suppress(OSError):
        private_files.make_folder(kept.parent)
        known_models.make_room(kept.parent)
        private_files.write(kept, [known_models.with_sum(fields)])


def _reads(found: Mapping[str, Any], seen: Stored) -> Reads:
    entries = {entry.name: entry for header in seen.headers for entry in header.entries}
    leaves = [
        LeafPlan(leaf["path"], _source(leaf["source"]), tuple(leaf["shape"]), np.dtype(leaf["dtype"]))
        for leaf in found["leaves"]
    ]
    return Reads(leaves, {name: entries[stored] for name, stored in found["entries"].items()})


def _source(said: Mapping[str, Any]) -> Source:
    tuples: dict[str, Sequence[Any]] = {name: tuple(said[name]) for name in ("names", "rows")}
    return dataclasses.replace(Source(**{**said, **tuples}), role=REPLICATED)
