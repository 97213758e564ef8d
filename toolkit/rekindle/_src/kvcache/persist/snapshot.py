"""Snapshots: named lists of the pages that a session knew, and for which model they are any good.

A snapshot lists pages; their payloads are in the segments of the disk tier, where each is kept once however many
snapshots list it. Saving under a name that exists writes a new version beside the old one and removes that afterwards,
so at any moment one complete version can be found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.core import html
from rekindle._src.core.atomic_checkpoint import PARTIAL
from rekindle._src.kvcache.digest import root_digest
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.persist.segment import Page, Segment, pages_of, write_index
from rekindle._src.kvcache.tree import PrefixCache
from rekindle.errors import ConfigError, SnapshotRefused, StoreError

VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What pages belong to: they are only equal if all of this is, except for `model`, which is for people."""

    fingerprint: str  # of config and weights
    kv_dtype: str
    page_size: int
    layout: str = ""  # shapes and dtypes of a page's payload
    model: str = ""
    version: int = VERSION

    @property
    def root(self) -> bytes:
        """The root key of the tree."""
        return root_digest(f"pages {self.version}", self.fingerprint, self.kv_dtype, str(self.page_size), self.layout)

    def fields(self) -> dict[str, Any]:
        return {"identity": dataclasses.asdict(self)}

    def refuses(self, other: dict[str, Any]) -> str | None:
        """Why pages with the stored fields `other` are no good here."""
        for name, what in _REASONS:
            mine, theirs = getattr(self, name), other.get(name)
            if mine != theirs:
                return f"{what} {theirs!r}, this session has {mine!r}"
        return None


_REASONS = (
    ("version", "it was written in format"),
    ("fingerprint", "it belongs to weights"),
    ("kv_dtype", "its pages hold"),
    ("page_size", "its page size is"),
    ("layout", "its pages are laid out as"),
)


class Restored(NamedTuple):
    """What became known when a session was opened."""

    name: str
    pages: int
    missing: int  # listed, but no longer in the store


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SnapshotInfo(html.Record):
    """One snapshot, as `session.cache.snapshots()` shows it."""

    name: str
    pages: int
    tokens: int
    model: str
    saved: float  # seconds since the epoch
    refused: str | None  # why this session can't use it

    def __str__(self) -> str:
        refused = f"; refused: {self.refused}" if self.refused else ""
        size = f"{self.pages} pages ({self.tokens} tokens)"
        return f"snapshot {self.name!r} of {self.model}: {size}, saved {self.when}{refused}"

    @property
    def when(self) -> str:
        """`saved` to read, in local time."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved))

    def _repr_html_(self) -> str:
        return html.line(str(self))


def check_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "auto" or name.startswith(PARTIAL):
        raise ConfigError(
            "name", name, "is no name for a snapshot", "Use up to 100 letters, digits, '.', '_' and '-', not 'auto'"
        )
    return name


def save(folder: Path, name: str, identity: Identity, pages: Sequence[Page]) -> Path:
    """A new version of `name`, complete or absent; earlier ones are removed."""
    older = _versions(folder, check_name(name))
    number = 1 + max((_number(path) for path in older), default=0)
    path = folder / "snapshots" / f"{name}@{number:08d}-{uuid.uuid4().hex[:8]}"
    header = identity.fields() | {"name": name, "saved": time.time()}
    write_index(path, header, pages, identity.page_size)
    for old in older:
        remove(old)
    return path


def find(folder: Path, name: str) -> Segment:
    """The newest version of `name` that can be read. Raises StoreError if there is none."""
    damaged = ""
    for path in reversed(_versions(folder, name)):
        try:
            return Segment.open(path)
        except FileNotFoundError:
            continue
        except Exception as error:
            damaged = f" ({path} is damaged: {error})"
    known = ", ".join(sorted({repr(_name(path)) for path in _all(folder)}))
    there = f"There are: {known}" if known else f"There are none; await session.save({name!r}) makes one"
    raise StoreError(f"there is no snapshot {name!r} in {folder / 'snapshots'}{damaged}. {there}")


def listed(folder: Path, identity: Identity, name: str) -> list[Page]:
    """The pages of a snapshot. Raises SnapshotRefused if they are no good for `identity`."""
    index = find(folder, check_name(name))
    reason = identity.refuses(index.header["identity"])
    if reason is not None:
        raise SnapshotRefused(f"snapshot {name!r} can't be restored: {reason}. Open without restore and save anew")
    return pages_of(index.records)


def infos(folder: Path, identity: Identity) -> list[SnapshotInfo]:
    found = []
    for name in sorted({_name(path) for path in _all(folder)}):
        with contextlib.suppress(StoreError):
            index = find(folder, name)
            theirs = index.header["identity"]
            found.append(
                SnapshotInfo(
                    name,
                    len(index.records),
                    len(index.records) * theirs["page_size"],
                    theirs["model"],
                    index.header["saved"],
                    identity.refuses(theirs),
                )
            )
    return found


def delete(folder: Path, name: str) -> bool:
    """Its pages stay until the disk tier needs their room."""
    versions = _versions(folder, check_name(name))
    for path in versions:
        remove(path)
    return bool(versions)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        gone = path.rename(path.with_name(f"{PARTIAL}{uuid.uuid4().hex}"))
        shutil.rmtree(gone, ignore_errors=True)


def protected(folder: Path) -> dict[str, set[bytes]]:
    """Digests that snapshots list, by the root they belong to."""
    kept: dict[str, set[bytes]] = {}
    for path in _all(folder):
        with contextlib.suppress(Exception):
            index = Segment.open(path)
            root = Identity(**index.header["identity"]).root.hex()
            kept.setdefault(root, set()).update(index.digests())
    return kept


def graft(cache: PrefixCache, pages: Sequence[Page]) -> int:
    """Make pages known to the tree, each run without branches at once; how many are reachable from the root."""
    below: dict[bytes, list[Page]] = {}
    for page in pages:
        below.setdefault(page.parent, []).append(page)
    now = cache.clock() - time.time()
    count = 0
    todo: list[tuple[bytes, Node]] = [(cache.root_key, cache.root)]
    while todo:
        parent, node = todo.pop()
        for first in below.get(parent, ()):
            run = [first]
            while len(follow := below.get(run[-1].digest, [])) == 1:
                run.append(follow[0])
            nodes = cache.graft_path(np.concatenate([page.tokens for page in run]), after=node)
            if nodes is None:
                continue
            for page, grafted in zip(run, nodes, strict=True):
                if not grafted.last_use:
                    grafted.digest, grafted.visits, grafted.last_use = page.digest, page.visits, page.used + now
            count += len(run)
            todo.append((run[-1].digest, nodes[-1]))
    return count


def _all(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(folder / "snapshots"))
        return [folder / "snapshots" / name for name in names if "@" in name and not name.startswith(PARTIAL)]
    return []


def _versions(folder: Path, name: str) -> list[Path]:
    return sorted((path for path in _all(folder) if _name(path) == name), key=_number)


def _name(path: Path) -> str:
    return path.name.rpartition("@")[0]


def _number(path: Path) -> int:
    digits = path.name.rpartition("@")[2].partition("-")[0]
    return int(digits) if digits.isdigit() else 0
