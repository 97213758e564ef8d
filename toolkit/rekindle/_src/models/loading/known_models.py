"""Descriptions of models, kept in a cache folder: all that a start has to know of a model, in a few KB.

A start that compiles nothing needs neither flax nor the model's module then, which take a quarter of a second to
import. A description has the model's graph as JSON: its config, its precision and the paths of its leaves. If the
laid-out weights of a checkpoint are kept, its description lies next to them. In a shared cache it is also an entry of
its own, so that a fresh machine has it at once and loads its programs while the weights are on their way. The weights
of a small checkpoint are not kept; its description also says where each leaf is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import jax
import numpy as np

from rekindle._src.core.store import Store
from rekindle._src.models.base import Graph
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.models.loading.leaf_arrays import LeafPlan, Reads
from rekindle._src.models.loading.manifest import Source
from rekindle._src.models.loading.stored import StoredCheckpoint
from rekindle._src.models.precision import Precision
from rekindle._src.models.roles import REPLICATED
from rekindle.errors import CheckpointError
from rekindle_kernels import read_through

FOLDER = "models"  # in a cache folder
MOST = 64  # descriptions in one cache folder; the oldest is removed first
_OF_LAYERS = ("attention", "moe", "recurrent", "pages")  # fields with an entry for each layer
_SUM = 32  # bytes of the checksum that a description begins with
_SAID = ("names", "rows", "stack", "tiled", "transpose", "add")  # of a source; its role is for meshes
_log = logging.getLogger(__name__)


class KnownModel(NamedTuple):
    """All that a session needs to know of a model before it has its weights."""

    graph: Graph
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # one per leaf
    dtype: str


def encode_graph(graph: Graph) -> dict[str, Any]:
    """Return the graph as records and values that JSON keeps; layers of one kind are described once."""
    config = {field.name: getattr(graph.config, field.name) for field in dataclasses.fields(ModelConfig)}
    for name in _OF_LAYERS:
        kinds = list(dict.fromkeys(config[name]))
        config[name] = {"kinds": kinds, "layers": [kinds.index(spec) for spec in config[name]]}
    return {"config": config, "precision": graph.precision, "paths": graph.paths}


def decode_graph(fields: dict[str, Any]) -> Graph:
    """Return the graph that was encoded. Raise TypeError, KeyError, ValueError or IndexError for anything else."""
    config, types = dict(fields["config"]), _types(ModelConfig)
    for name in _OF_LAYERS:
        kinds = _decoded(types[name], config[name]["kinds"])
        config[name] = tuple(kinds[index] for index in config[name]["layers"])
    others = {name: _decoded(types[name], value) for name, value in config.items() if name not in _OF_LAYERS}
    return Graph(ModelConfig(**config | others), _decoded(Precision, fields["precision"]), tuple(fields["paths"]))


_types = functools.cache(get_type_hints)


def _decoded(kind: Any, value: Any) -> Any:
    """Return a value of a type from what JSON keeps of it: records are objects there, and tuples lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = itertools.repeat(inner[0]) if inner[-1] is ... else inner
        return tuple(_decoded(part, one) for part, one in zip(kinds, value, strict=False))
    records = [part for part in inner or (kind,) if set(value) <= set(_types(part))]
    types = _types(records[0])  # the one of several that has these fields
    return records[0](**{name: _decoded(types[name], one) for name, one in value.items()})


def encode(
    graph: Graph, leaves: Sequence[tuple[tuple[int, ...], str]], dtype: str, name: str, **others: object
) -> bytes:
    """Return a description, with its checksum; `leaves` are shapes and dtypes, and `name` is for people to read."""
    described = {"graph": encode_graph(graph), "leaves": leaves, "dtype": dtype, "name": name, **others}
    text = json.dumps(described, default=dataclasses.asdict).encode()
    return _sum(text) + text


def decode(content: bytes) -> KnownModel:
    """Return the model that was encoded. Raise CheckpointError, or an error of decoding, if it is damaged."""
    return _known(checked(content))


def _known(fields: Mapping[str, Any]) -> KnownModel:
    shapes = tuple(jax.ShapeDtypeStruct(tuple(shape), np.dtype(kind)) for shape, kind in fields["leaves"])
    return KnownModel(decode_graph(fields["graph"]), shapes, str(fields["dtype"]))


def checked(content: bytes) -> dict[str, object]:
    """Return the fields that `encode` described. Raise CheckpointError if they are damaged."""
    text = content[_SUM:]
    if _sum(text) != content[:_SUM]:
        raise CheckpointError("the checksum of the model's description does not match")
    fields: dict[str, object] = json.loads(text)
    return fields


def store(folder: Path) -> Store:
    """Return the descriptions in a folder."""
    return Store(folder, most=MOST)


def _sum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_SUM // 2).hexdigest().encode()


def _shared(kept: Path) -> Store | None:
    """Return the store that also has the descriptions of kept weights; None without a shared cache."""
    cache = kept.parent.parent
    return None if read_through.backing_of(cache) is None else store(cache / FOLDER)


def fetched(kept: Path) -> KnownModel | None:
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


def find_reads(kept: Path, stored: StoredCheckpoint) -> tuple[KnownModel, Reads] | None:
    """Return the kept description; None if it is missing or unusable."""
    try:
        content = store(kept.parent).get(kept.name)
        if content is None:
            return None
        fields = checked(content)
        return _known(fields), _reads(fields, stored)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _log.info("the description %s is not used: %s", kept, error)
        return None


def keep_reads(kept: Path, stored: StoredCheckpoint, known: KnownModel, reads: Reads) -> None:
    """Keep the description of a model with no quantised or packed matrices, such as the experts of a layer.

    A failure costs the next start some time and nothing else.
    """
    plain = all(not (leaf.scale or leaf.stored or leaf.packing or leaf.minimum) for leaf in reads.leaves)
    names = {entry.name for header in stored.headers for entry in header.entries}
    if not plain or any(entry.name not in names for entry in reads.entries.values()):  # some are parts of tensors
        return
    sources = [
        {
            "path": leaf.path,
            "source": {name: getattr(leaf.source, name) for name in _SAID},
            "shape": leaf.shape,
            "dtype": leaf.dtype.name,
        }
        for leaf in reads.leaves
    ]
    entries = {name: entry.name for name, entry in reads.entries.items()}
    leaves = [(leaf.shape, leaf.dtype.name) for leaf in known.shapes]
    content = encode(known.graph, leaves, known.dtype, readable_name(stored.path), reads=sources, entries=entries)
    with contextlib.suppress(OSError):
        store(kept.parent).put(kept.name, content)


def _reads(found: Mapping[str, Any], stored: StoredCheckpoint) -> Reads:
    entries = {entry.name: entry for header in stored.headers for entry in header.entries}
    leaves = [
        LeafPlan(leaf["path"], _source(leaf["source"]), tuple(leaf["shape"]), np.dtype(leaf["dtype"]))
        for leaf in found["reads"]
    ]
    return Reads(leaves, {name: entries[held] for name, held in found["entries"].items()})


def _source(said: Mapping[str, Any]) -> Source:
    tuples: dict[str, Sequence[Any]] = {name: tuple(said[name]) for name in ("names", "rows")}
    return dataclasses.replace(Source(**{**said, **tuples}), role=REPLICATED)
