"""Snapshots: named lists of the pages that a session knew. A name has one for each identity that saved under it.

A snapshot lists pages; their payloads are in the segments of the disk tier, where each is kept once however many
snapshots list it. Saving under a name that exists writes a new version before it removes the old one, so at any
moment one complete version can be found. Versions of other models and configurations stay.

In a cache that machines share, one machine saves, and any other with the same model restores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rekindle._src.core.atomic_checkpoint import is_finished, remove
from rekindle._src.core.drawable import Record
from rekindle._src.core.names import printable
from rekindle._src.core.prefix import is_namespace
from rekindle._src.kvcache.caches import AnyCache
from rekindle._src.kvcache.node import Node
from rekindle._src.kvcache.persist.identity import Identity, verify
from rekindle._src.kvcache.persist.segment import Page, Segment, pages_of, saved_at, size_of, write_index
from rekindle._src.kvcache.tree import PrefixCache
from rekindle.errors import ConfigError, SnapshotRefused, StoreError
from rekindle_kernels import private_files, read_through

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ATTEMPTS = 20  # to read a snapshot that another process saves again and again


class RestoredPages(NamedTuple):
    """The pages that became known when a session was opened."""

    name: str
    pages: int
    missing: int  # listed, but no longer in the store


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SnapshotInfo(Record):
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
        """`saved` as text, in local time."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved))


_OTHERS = ("auto", "none")  # what `restore` takes in the place of a name


def check_name(name: str) -> str:
    """Return `name` if it is valid for a snapshot. Raises ConfigError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _OTHERS or not is_finished(name):
        fix = "Use up to 100 letters, digits, '.', '_' and '-', and neither 'auto' nor 'none'"
        raise ConfigError("name", name, "can't be a snapshot's name", fix)
    return name


def save(folder: Path, name: str, identity: Identity, pages: Sequence[Page]) -> Path:
    """Save a new version of `name`, complete or absent; earlier ones of the same identity are removed.

    Raises StoreError if it can't be written.
    """
    versions = kept_versions(folder, check_name(name))
    number = 1 + max((_number(path) for path in versions), default=0)
    path = folder / "snapshots" / f"{name}@{number:08d}-{tag(identity)}-{uuid.uuid4().hex[:8]}"
    reason = private_files.distrust_reason(path.parent)
    if reason is not None:
        raise StoreError(f"snapshot {name!r} was not saved: {reason}")
    older = [version for version in versions if _replaced(version, identity)]
    header = identity.fields() | {"name": name, "saved": time.time()}
    try:
        write_index(path, header, pages, identity.page_size)
    except OSError as error:
        raise StoreError(f"snapshot {name!r} was not saved: {error}. Free some space, or check the disk") from error
    for old in older:
        remove(old)
    return path


def _replaced(version: Path, identity: Identity) -> bool:
    """True if a new snapshot of `identity` replaces this version: it has the same identity, or is damaged."""
    try:
        return Identity.stored_in(Segment.open(version).header).root == identity.root
    except StoreError:
        return True
    except OSError:
        return False  # it may be another's, and readable again later


def tag(identity: Identity) -> str:
    """Return the part of a version's file name that stands for its identity."""
    return identity.root.hex()[:16]


def tagged(names: Sequence[str], name: str, identity: Identity) -> str | None:
    """Return the newest version of `name` with this identity's tag in its file name, else the newest, or None."""
    versions = sorted((file for file in names if file.rpartition("@")[0] == name), key=lambda one: _number(Path(one)))
    return next(
        (file for file in reversed(versions) if f"-{tag(identity)}-" in file), versions[-1] if versions else None
    )


def find(folder: Path, name: str, identity: Identity | None = None) -> Segment:
    """Open the newest intact version of `name`, preferably one that `identity` can use.

    Raises StoreError if there is none, or if it can't be read now.
    """
    reason = private_files.distrust_reason(folder / "snapshots")
    if reason is not None:
        raise StoreError(f"snapshot {name!r} is not read: {reason}")
    damaged = ""
    for _ in range(_ATTEMPTS):
        versions = kept_versions(folder, name)
        vanished = False
        fallback: Segment | None = None  # of another identity
        for path in reversed(versions):
            try:
                index = Segment.open(path)
                if identity is None or identity.mismatch(Identity.stored_in(index.header)) is None:
                    return index
                fallback = fallback or index
            except FileNotFoundError:
                vanished = vanished or not path.exists()
            except OSError as error:
                raise StoreError(f"snapshot {name!r} can't be read now: {error}. Try again") from error
            except StoreError as error:
                damaged = f" ({path} is damaged: {error})"
        if fallback is not None and not vanished:
            return fallback
        if not vanished:
            break  # else another process has replaced a version by a newer one since they were listed
    known = ", ".join(sorted({repr(_name(path)) for path in _all(folder)}))
    hint = f"There are: {known}" if known else f"There are none; await session.save({name!r}) makes one"
    raise StoreError(f"there is no snapshot {name!r} in {folder / 'snapshots'}{damaged}. {hint}")


def pages_of_snapshot(folder: Path, identity: Identity, name: str) -> list[Page]:
    """Return the pages of a snapshot. Raises SnapshotRefused if `identity` can't use them, StoreError if they fail
    verification."""
    index = find(folder, check_name(name), identity)
    reason = identity.mismatch(Identity.stored_in(index.header))
    if reason is not None:
        raise SnapshotRefused(
            f'snapshot {name!r} can\'t be restored: {reason}. restore="auto" has every page that is kept for this '
            f"session's model and options; save({name!r}) then adds a second snapshot"
        )
    try:
        verify(identity, index.records, None)
    except StoreError as error:
        raise StoreError(f"snapshot {name!r} can't be restored: {error}. Save it anew") from error
    touch(folder, name, identity)
    return pages_of(index.records)


def touch(folder: Path, name: str, identity: Identity) -> None:
    """Mark the snapshot with this name and identity as used now, which delays its removal."""
    for path in kept_versions(folder, name):
        if f"-{tag(identity)}-" in path.name:
            private_files.touch(path)


def describe_all(folder: Path, identity: Identity) -> list[SnapshotInfo]:
    """Describe each readable snapshot, sorted by name; this identity's come first within a name."""
    infos_by_key: dict[tuple[str, bytes], SnapshotInfo] = {}
    for path in sorted(_all(folder), key=_number, reverse=True):
        with contextlib.suppress(StoreError, OSError):
            index = Segment.open(path)
            saved_for, name, count = Identity.stored_in(index.header), _name(path), len(index.records)
            if saved_for.beside_pages:
                continue  # it belongs to a snapshot of pages
            saved, refused = saved_at(index.header), identity.mismatch(saved_for)
            model = printable(saved_for.model)
            info = SnapshotInfo(name, count, count * saved_for.page_size, model, saved, refused)
            infos_by_key.setdefault((name, saved_for.root), info)
    return sorted(infos_by_key.values(), key=lambda info: (info.name, info.refused is not None, -info.saved))


def delete(folder: Path, name: str) -> bool:
    """Remove every snapshot of a name, if there is one. Their pages stay until the disk tier needs the room."""
    versions = kept_versions(folder, check_name(name))
    for path in versions:
        remove(path)
    return bool(versions)


def protected(folder: Path) -> dict[str, set[bytes]]:
    """Return the digests that snapshots list, by root. Raises OSError while a snapshot can't be read."""
    digests: dict[str, set[bytes]] = {}
    for path in _all(folder):
        with contextlib.suppress(StoreError, FileNotFoundError):
            index = Segment.open(path)
            root = Identity.stored_in(index.header).root.hex()
            digests.setdefault(root, set()).update(index.digests())
    return digests


def graft(cache: PrefixCache, pages: Sequence[Page]) -> int:
    """Add verified pages to the tree, each run without branches at once.

    Returns how many of them can be reached from the root or from a namespace's root. The tree computes digests from the
    tokens itself, so an unverified page would not be found under any payload.
    """
    below: dict[bytes, list[Page]] = {}
    for page in pages:
        below.setdefault(page.parent, []).append(page)
    now, today = cache.clock() - time.time(), time.time()
    count = 0
    pending: list[tuple[bytes, Node]] = [(cache.root_key, cache.root)]
    pending += [(digest, cache.root_with(digest)) for digest in below if is_namespace(digest, cache.root_key)]
    seen = {digest for digest, _ in pending}
    while pending:
        parent, node = pending.pop()
        for first in below.get(parent, ()):
            run = [first]
            while len(children := below.get(run[-1].digest, [])) == 1 and len(run) < len(pages):
                run.append(children[0])
            nodes = cache.graft(np.concatenate([page.tokens for page in run]), after=node)
            if nodes is None:
                continue
            for page, grafted in zip(run, nodes, strict=True):
                if not grafted.last_use:
                    # Not in the future, where a clock that was set back would leave it.
                    grafted.visits, grafted.last_use = page.visits, min(page.last_use, today) + now
            count += sum(cache.digest_of(grafted) == page.digest for page, grafted in zip(run, nodes, strict=True))
            if run[-1].digest not in seen:
                seen.add(run[-1].digest)
                pending.append((run[-1].digest, nodes[-1]))
    return count


def graft_all(cache: AnyCache, pages: Sequence[Page]) -> int:
    """Apply `graft` to all trees: any may restore the pages. Returns the largest count."""
    return max(graft(tree, pages) for tree in cache.trees)


def connected(pages: Sequence[Page], root: bytes) -> list[Page]:
    """Return the pages that can be reached from the root or a namespace's; in `pages`, parents come before children."""
    reached = {root}
    connected_pages = []
    for page in pages:
        if page.parent in reached or is_namespace(page.parent, root):
            reached.add(page.digest)
            connected_pages.append(page)
    return connected_pages


def fetch_shared(folder: Path, name: str, identity: Identity, limit: int) -> None:
    """Fetch snapshot `name` from the shared cache before a restore, and up to `limit` bytes of its pages.

    Both are verified like local ones.
    """
    backing = read_through.backing_of(folder)
    if backing is None:
        return
    if name != "auto":
        version = tagged(backing.names("snapshots"), name, identity)
        if version is not None:
            _fetch(folder / "snapshots" / version)
    root, total = identity.root.hex(), 0
    for segment in reversed(backing.names("pages")):
        if segment.startswith(root) and total < limit:
            _fetch(folder / "pages" / segment)
            total += size_of(folder / "pages" / segment)[0]


def keep_shared(snapshot: Path, segments: Iterable[Path]) -> None:
    """Copy a saved snapshot, and the segments with its pages, to the shared cache as well, if there is one."""
    for segment in segments:
        read_through.keep(segment)
    read_through.keep(snapshot)


def _all(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(folder / "snapshots"))
        return [folder / "snapshots" / name for name in names if "@" in name and is_finished(name)]
    return []


def kept_versions(folder: Path, name: str) -> list[Path]:
    return sorted((path for path in _all(folder) if _name(path) == name), key=_number)


def _name(path: Path) -> str:
    return path.name.rpartition("@")[0]


def _number(path: Path) -> int:
    digits = path.name.rpartition("@")[2].partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _fetch(path: Path) -> None:
    if not path.exists():
        read_through.fetch(path)
