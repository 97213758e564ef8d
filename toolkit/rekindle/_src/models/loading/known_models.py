"""Descriptions of models whose laid-out weights are kept: a few KB, all that a start has to know of a model.

A description lies beside the weights. In a shared cache it is also an entry of its own, so that a fresh machine has it
at once and loads its programs while the weights are on their way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rekindle._src.models.base import Graph
from rekindle._src.models.loading import graph_json
from rekindle.errors import CheckpointError
from rekindle_kernels import private_files, read_through

FOLDER = "models"  # in a cache folder
MOST = 64  # descriptions in one cache folder; the oldest is removed first
_SUM = 32  # bytes of the checksum that a description begins with
_log = logging.getLogger(__name__)


class Known(NamedTuple):
    """All that a session needs to know of a model before it has its weights."""

    graph: Graph
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # one per leaf
    dtype: str


def encode(graph: Graph, leaves: Sequence[tuple[tuple[int, ...], str]], dtype: str, name: str) -> bytes:
    """Return a description, with its checksum; `leaves` are shapes and dtypes, and `name` is for people to read."""
    return with_sum({"graph": graph_json.encode(graph), "leaves": leaves, "dtype": dtype, "name": name})


def decode(content: bytes) -> Known:
    """Return the model that was encoded. Raise CheckpointError, or an error of decoding, if it is damaged."""
    fields = checked(content)
    shapes = tuple(jax.ShapeDtypeStruct(tuple(shape), np.dtype(kind)) for shape, kind in fields["leaves"])
    return Known(graph_json.decode(fields["graph"]), shapes, str(fields["dtype"]))


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


def make_room(folder: Path) -> None:
    """Remove the oldest descriptions, so that there is room for one more."""
    entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for entry in entries[: max(0, len(entries) - MOST + 1)]:
        entry.unlink(missing_ok=True)


def _sum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_SUM // 2).hexdigest().encode()


def _entry(kept: Path) -> Path:
    return kept.parent.parent / FOLDER / kept.name


def fetched(kept: Path) -> Known | None:
    """Return a shared cache's description of a model; None if it has none, or without a shared cache."""
    entry = _entry(kept)
    if read_through.behind(kept.parent.parent) is None or private_files.distrust_reason(entry.parent) is not None:
        return None
    try:
        return decode(private_files.read(entry, inside=entry.parent))
    except FileNotFoundError:
        return None
    except Exception as error:
        _log.warning("the description of a model in %s is not used: %s", entry, error)
        with contextlib.suppress(OSError):
            entry.unlink()
        return None


def keep(kept: Path, content: bytes) -> None:
    """Put the description of weights that are kept into the shared cache, if there is one."""
    entry = _entry(kept)
    if read_through.behind(kept.parent.parent) is None or private_files.distrust_reason(entry.parent) is not None:
        return
    try:
        if not entry.exists():
            private_files.make_folder(entry.parent)
            make_room(entry.parent)
            private_files.write(entry, [content])
        read_through.keep(entry)
    except OSError as error:
        _log.warning("the description of a model is not kept in %s: %s", entry, error)
