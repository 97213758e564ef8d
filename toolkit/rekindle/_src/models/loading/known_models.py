"""Descriptions of models, kept in a cache folder: all that a start has to know of a model, in a few KB.

A start that compiles nothing needs neither flax nor the model's module then, which take a quarter of a second to
import. A description has the model's graph as JSON: its config, its precision and the paths of its leaves. That of a
checkpoint whose laid-out weights are kept lies beside them. In a shared cache it is also an entry of its own, so that
a fresh machine has it at once and loads its programs while the weights are on their way. That of a small checkpoint,
whose weights are not kept, also says where each leaf is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rekindle._src.core.store import Store
from rekindle._src.models.base import Graph
from rekindle._src.models.config import (
    AttentionSpec,
    LatentSpec,
    ModelConfig,
    MoeSpec,
    Multipliers,
    Pages,
    RecurrentSpec,
    SharedWith,
)
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.models.loading.leaf_arrays import LeafPlan
from rekindle._src.models.loading.manifest import Source
from rekindle._src.models.loading.stored import Stored
from rekindle._src.models.loading.tensor_files import TensorEntry
from rekindle._src.models.nn.rope import RopeSpec
from rekindle._src.models.precision import Precision
from rekindle._src.models.roles import REPLICATED
from rekindle.errors import CheckpointError
from rekindle_kernels import read_through

FOLDER = "models"  # in a cache folder
MOST = 64  # descriptions in one cache folder; the oldest is removed first
_SUM = 32  # bytes of the checksum that a description begins with
_SAID = ("names", "rows", "stack", "tiled", "transpose", "add")  # of a source; its role is for meshes
_log = logging.getLogger(__name__)


class Known(NamedTuple):
    """All that a session needs to know of a model before it has its weights."""

    graph: Graph
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # one per leaf
    dtype: str


class Reads(NamedTuple):
    """The leaves and tensors to read from a checkpoint, checked against its headers."""

    leaves: list[LeafPlan]
    entries: dict[str, TensorEntry]  # by the tensor's name


def encode_graph(graph: Graph) -> dict[str, Any]:
    """Return the graph as values that JSON keeps as they are; layers of one kind are described once."""
    config = {field.name: getattr(graph.config, field.name) for field in dataclasses.fields(ModelConfig)}
    attention = list(dict.fromkeys(graph.config.attention))
    experts = list(dict.fromkeys(graph.config.moe))
    states = [None if spec is None else dataclasses.asdict(spec) for spec in graph.config.recurrent]
    pages = [None if spec is None else dataclasses.asdict(spec) for spec in graph.config.pages]
    latent = None if graph.config.latent is None else dataclasses.asdict(graph.config.latent)
    multipliers = None if graph.config.multipliers is None else dataclasses.asdict(graph.config.multipliers)
    return {
        "config": config
        | {
            "attention": None,
            "moe": None,
            "recurrent": states,
            "pages": pages,
            "latent": latent,
            "multipliers": multipliers,
        },
        "attention": [dataclasses.asdict(spec) for spec in attention],
        "layers": [attention.index(spec) for spec in graph.config.attention],
        "experts": [None if spec is None else dataclasses.asdict(spec) for spec in experts],
        "expert_layers": [experts.index(spec) for spec in graph.config.moe],
        "precision": dataclasses.asdict(graph.precision),
        "paths": graph.paths,
    }


def decode_graph(fields: dict[str, Any]) -> Graph:
    """Return the graph that was encoded. Raise TypeError, KeyError, ValueError or IndexError for anything else."""
    attention = [AttentionSpec(**spec | {"rope": _rope(spec["rope"])}) for spec in fields["attention"]]
    experts = [None if spec is None else MoeSpec(**spec) for spec in fields["experts"]]
    config = fields["config"] | {
        "attention": tuple(attention[index] for index in fields["layers"]),
        "moe": tuple(experts[index] for index in fields["expert_layers"]),
        "eos_token_ids": tuple(fields["config"]["eos_token_ids"]),
        "recurrent": tuple(spec and RecurrentSpec(**spec) for spec in fields["config"]["recurrent"]),
        "pages": tuple(spec and _pages(spec) for spec in fields["config"]["pages"]),
        "multipliers": _multipliers(fields["config"]["multipliers"]),
        "latent": fields["config"]["latent"] and LatentSpec(**fields["config"]["latent"]),
        "mlp_sizes": tuple(fields["config"]["mlp_sizes"]),
    }
    pairs = {
        name: tuple((str(path), str(kind)) for path, kind in fields["precision"][name])
        for name in ("kinds", "unpacked")
    }
    return Graph(ModelConfig(**config), Precision(**fields["precision"] | pairs), tuple(fields["paths"]))


def _pages(fields: dict[str, Any]) -> Pages | SharedWith:
    return SharedWith(**fields) if "layer" in fields else Pages(**fields)


def _multipliers(fields: dict[str, Any] | None) -> Multipliers | None:
    return None if fields is None else Multipliers(**fields | {"inputs": tuple(fields["inputs"])})


def _rope(found: dict[str, Any] | None) -> RopeSpec | None:
    if found is None:
        return None
    factors = {name: tuple(found[name]) for name in ("short_factor", "long_factor")}
    return RopeSpec(**found | factors)


def encode(graph: Graph, leaves: Sequence[tuple[tuple[int, ...], str]], dtype: str, name: str) -> bytes:
    """Return a description, with its checksum; `leaves` are shapes and dtypes, and `name` is for people to read."""
    return with_sum({"graph": encode_graph(graph), "leaves": leaves, "dtype": dtype, "name": name})


def decode(content: bytes) -> Known:
    """Return the model that was encoded. Raise CheckpointError, or an error of decoding, if it is damaged."""
    fields = checked(content)
    shapes = tuple(jax.ShapeDtypeStruct(tuple(shape), np.dtype(kind)) for shape, kind in fields["leaves"])
    return Known(decode_graph(fields["graph"]), shapes, str(fields["dtype"]))


def with_sum(described: Mapping[str, Any]) -> bytes:
    """Return the JSON of a description behind its checksum."""
    text = json.dumps(described).encode()
    return _sum(text) + text


def checked(content: bytes) -> dict[str, Any]:
    """Return the description that `with_sum` encoded. Raise CheckpointError if it is damaged."""
    text = content[_SUM:]
    if _sum(text) != content[:_SUM]:
        raise CheckpointError("the checksum of the model's description does not match")
    fields: dict[str, Any] = json.loads(text)
    return fields


def store(folder: Path) -> Store:
    """Return the descriptions in a folder."""
    return Store(folder, most=MOST)


def _sum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_SUM // 2).hexdigest().encode()


def _shared(kept: Path) -> Store | None:
    """Return the descriptions beside kept weights; None without a shared cache."""
    cache = kept.parent.parent
    return None if read_through.behind(cache) is None else store(cache / FOLDER)


def fetched(kept: Path) -> Known | None:
    """Return a shared cache's description of a model; None if it has none, or without a shared cache."""
    shared = _shared(kept)
    if shared is None:
        return None
    try:
        content = shared.get(kept.name)
        return None if content is None else decode(content)
    except Exception as error:
        _log.warning("the description of a model in %s is not used: %s", shared.path(kept.name), error)
        shared.remove(kept.name)
        return None


def keep(kept: Path, content: bytes) -> None:
    """Put the description of weights that are kept into the shared cache, if there is one."""
    shared = _shared(kept)
    if shared is None:
        return
    entry = shared.path(kept.name)
    try:
        if shared.distrusted is None and (entry.exists() or shared.put(kept.name, content)):
            read_through.keep(entry)
    except OSError as error:
        _log.warning("the description of a model is not kept in %s: %s", entry, error)


def find_reads(kept: Path, seen: Stored) -> tuple[Known, Reads] | None:
    """Return the description that is kept there; None if there is none, or none that can be used."""
    try:
        content = store(kept.parent).get(kept.name)
        if content is None:
            return None
        fields = checked(content)
        shapes = tuple(jax.ShapeDtypeStruct(tuple(shape), np.dtype(kind)) for shape, kind in fields["shapes"])
        known = Known(decode_graph(fields["graph"]), shapes, str(fields["dtype"]))
        return known, _reads(fields, seen)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _log.info("the description %s is not used: %s", kept, error)
        return None


def keep_reads(kept: Path, seen: Stored, known: Known, reads: Reads) -> None:
    """Keep the description of a model in which nothing is quantised or packed, as the experts of a layer are.

    A failure costs the next start some time and nothing else.
    """
    plain = all(not (leaf.scale or leaf.stored or leaf.packing or leaf.minimum) for leaf in reads.leaves)
    stored = {entry.name for header in seen.headers for entry in header.entries}
    if not plain or any(entry.name not in stored for entry in reads.entries.values()):  # some are parts of tensors
        return
    fields = {
        "graph": encode_graph(known.graph),
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
        store(kept.parent).put(kept.name, with_sum(fields))


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
