"""`rekindle cache ls|rm|prune|clear`: list and trim the files of the cache directory.

Only rekindle's own entries are removed: those in known folders of a cache folder with rekindle's CACHEDIR.TAG. Links
are neither followed nor removed, and entries that a process is writing stay. The modification time of an
entry is the time of its last use, because every use sets it (`private_files.touch`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.core.atomic_checkpoint import ITEM, PARTIAL, is_finished, is_stale, order_of_use, try_remove
from rekindle._src.core.config import cache_folder
from rekindle._src.core.names import nearest, printable
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import Segment
from rekindle._src.models.loading.hub import readable_name
from rekindle.errors import ConfigError, StoreError
from rekindle_kernels.private_files import KINDS, TAG, TAG_TEXT

SHARED = "(shared by models)"
MOST_NAMED = 5  # snapshots in a line


class CacheItem(NamedTuple):
    """A removable entry: a folder or a file two levels below the cache directory."""

    path: Path
    kind: str  # the folder it is in, one of `KINDS`
    size: int
    used: float  # seconds since the epoch, as `core.store` has it: the time of the last change
    model: str = ""  # its model; "" if several models share it, or the model is unknown

    @property
    def snapshot(self) -> str:
        """The name that a user gave to a snapshot; "" for all else."""
        return self.path.name.rpartition("@")[0] if self.kind == "snapshots" and is_finished(self.path.name) else ""


def run(arguments: argparse.Namespace) -> int:
    """Carry out one action. Return 1 if it was not confirmed, or an entry could not be removed."""
    folder = cache_folder(arguments.cache_dir)
    if not folder.exists():
        return _absent(folder, arguments)
    items = entries(folder)
    match arguments.action:
        case "ls" if arguments.json:
            print(json.dumps([{**entry._asdict(), "path": str(entry.path)} for entry in items], indent=1))
        case "ls":
            _print(folder, items) if arguments.all else _print_models(folder, items)
        case "rm":
            return remove_items(folder, named(items, arguments.names), arguments.yes)
        case "prune":
            surplus = beyond(items, arguments.to)
            return remove_items(folder, surplus, arguments.yes, stay=_snapshots(set(items) - set(surplus)))
        case "clear":
            return remove_items(folder, items, arguments.yes)
    return 0


def _absent(folder: Path, arguments: argparse.Namespace) -> int:
    """Say that there is no cache folder. Raise ConfigError if the user named it."""
    if arguments.cache_dir is not None:
        raise ConfigError("--cache-dir", str(folder), "does not exist", "Check the path, or leave it out")
    if os.environ.get("REKINDLE_CACHE"):
        raise ConfigError("REKINDLE_CACHE", str(folder), "does not exist", "Check the variable; a session makes it")
    print("[]" if arguments.json else f"{folder}: does not exist yet; the first session makes it")
    return 0


def entries(folder: Path) -> list[CacheItem]:
    """Return rekindle's entries below `folder`, most recently used first, without those being written."""
    items = []
    for kind in KINDS:
        for path in _inside(folder / kind):
            if path.name.startswith((PARTIAL, ".")) and not is_stale(path):
                continue
            with contextlib.suppress(OSError):  # another process removed it meanwhile
                files = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]
                stats = [os.lstat(file) for file in files or [str(path)]]
                size = sum(stat.st_size for stat in stats if files or path.is_file())
                items.append(CacheItem(path, kind, size, path.lstat().st_mtime, owner(path, kind)))
    return sorted(items, key=lambda entry: -order_of_use(entry.used))


def owner(path: Path, kind: str) -> str:
    """Return the name of the model in an entry, as it may be printed; "" if it has none."""
    return printable(_owner(path, kind))


def _owner(path: Path, kind: str) -> str:
    with contextlib.suppress(Exception):  # a damaged entry is listed without a name
        match kind:
            case "programs":
                return str(json.loads((path / ITEM / "meta.json").read_text())["model"])
            case "weights":
                return str(_description(path / ITEM / "model.json")["name"])
            case "models":
                return str(_description(path)["name"])
            case "chats":
                return readable_name(json.loads(path.read_text())["model"])
            case "pages" | "snapshots":
                identity = Segment.open(path).header["identity"]
                return readable_name(identity["model"]) if isinstance(identity, dict) else ""
    return ""


def _description(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    description: dict[str, Any] = json.loads(content[content.index(b"{") :])
    return description


def named(items: Sequence[CacheItem], names: Sequence[str]) -> list[CacheItem]:
    """Return the entries of the models with these names, snapshots of these names, and single entries.

    Raise ConfigError for an unknown name, and for a snapshot's that several models have.
    """
    chosen: list[CacheItem] = []
    for name in names:
        matches = [entry for entry in items if name and name in (entry.model, entry.path.name)]
        matches = matches or _snapshots_of(items, name)
        if not matches:
            models = sorted({entry.model for entry in items if entry.model})
            snapshots = sorted({entry.snapshot for entry in items if entry.snapshot})
            close = nearest(name, [*models, *snapshots], 0.4)
            known = f"There are: {', '.join([*models, *snapshots])}" if items else "Nothing is kept there"
            raise ConfigError("NAME", name, "has nothing here", f"Did you mean {close}?" if close else known)
        chosen += [entry for entry in matches if entry not in chosen]
    return chosen


def _snapshots_of(items: Sequence[CacheItem], name: str) -> list[CacheItem]:
    """Return the snapshots of a name, of one model. Raise ConfigError if several models have one."""
    matches = [entry for entry in items if name and entry.snapshot == name]
    by_model = {entry.model: entry for entry in reversed(matches)}
    if len(by_model) > 1:
        one_of_each = ", ".join(f"{entry.path.name} ({entry.model or SHARED})" for entry in by_model.values())
        raise ConfigError("NAME", name, "is a snapshot of several models", f"Pass the full name: {one_of_each}")
    return matches


def _snapshots(items: Iterable[CacheItem]) -> list[str]:
    """Return the names of the snapshots among entries."""
    return sorted({entry.snapshot for entry in items if entry.snapshot})


def by_worth(items: Sequence[CacheItem]) -> list[CacheItem]:
    """Return entries in the order of their worth: by class, and within a class the most recently used first.

    A snapshot with a name is kept before all else, and then the pages that it lists: without them it is empty.
    """
    listed: dict[str, set[bytes]] = {}
    for entry in items:
        if entry.snapshot:
            with contextlib.suppress(StoreError, OSError):  # a damaged one can't be restored
                index = Segment.open(entry.path)
                root = Identity.stored_in(index.header).root.hex()
                listed.setdefault(root, set()).update(index.digests())

    def is_listed(entry: CacheItem) -> bool:
        digests = listed.get(entry.path.name.split("-")[0]) if entry.kind == "pages" else None
        with contextlib.suppress(StoreError, OSError):
            return digests is not None and not digests.isdisjoint(Segment.open(entry.path).digests())
        return False

    return sorted(items, key=lambda entry: (not entry.snapshot, not is_listed(entry), -order_of_use(entry.used)))


def beyond(items: Sequence[CacheItem], keep: int) -> list[CacheItem]:
    """Return the entries to remove, the last in `by_worth`, so that at most `keep` bytes are left."""
    total, surplus = 0, []
    for entry in by_worth(items):
        total += entry.size
        if total > keep:
            surplus.append(entry)
    return surplus


def _remove_all(items: Iterable[CacheItem]) -> dict[Path, str]:
    """Remove entries. Return the reason for each entry that stays."""
    failures: dict[Path, str] = {}
    for entry in items:
        try:
            if entry.path.is_symlink():
                failures[entry.path] = "it is a symbolic link"
            elif entry.path.is_dir():
                try_remove(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
        except FileNotFoundError:  # another process removed it meanwhile
            pass
        except OSError as error:
            failures[entry.path] = error.strerror or str(error)
    return failures


def _inside(folder: Path) -> list[Path]:
    """Return the paths in a folder without links. Return none if it is a link itself."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.is_symlink())


def remove_items(folder: Path, items: Sequence[CacheItem], confirmed: bool, *, stay: Sequence[str] = ()) -> int:
    """Show the entries to remove, ask, and remove them. Return the exit status. `stay` are snapshots that are kept."""
    if not items:
        print(f"{folder}: nothing to remove")
        return 0
    _check_marked(folder)
    _print(folder, items, "to be removed")
    if stay:
        print(f"(named snapshots go last, after the pages they list; these stay: {_first(stay)})")
    if going := _snapshots(items):
        print(f"(named snapshots are among them: {_first(going)})")
    if not confirmed and not _ask(f"Remove {len(items)} entries? [y/N] "):
        print("nothing was removed; --yes removes without asking")
        return 1
    failures = _remove_all(items)
    removed = [entry for entry in items if entry.path not in failures]
    if removed:
        print(f"dropped {len(removed)} entries, {sum(entry.size for entry in removed) / 2**20:.1f} MiB")
    for reason, paths in _by_reason(failures).items():
        which = str(paths[0]) if len(paths) == 1 else f"{len(paths)} entries of {folder}"
        print(f"could not be removed: {which}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _by_reason(failures: Mapping[Path, str]) -> dict[str, list[Path]]:
    reasons: dict[str, list[Path]] = {}
    for path, reason in failures.items():
        reasons.setdefault(reason, []).append(path)
    return reasons


def _first(names: Sequence[str]) -> str:
    """Return the first names of a list, as text."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _check_marked(folder: Path) -> None:
    """Raise StoreError unless rekindle made this folder."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        tag = folder / TAG
        if not tag.is_symlink() and tag.read_text() == TAG_TEXT:
            return
    raise StoreError(
        f"nothing was removed: {folder} has no {TAG} of rekindle's, so it is also used for other things. Check "
        f"--cache-dir, or remove its folders {', '.join(KINDS)} yourself"
    )


def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _print_models(folder: Path, items: Sequence[CacheItem]) -> None:
    """Print a line for each model, most recently used first: its size, its age, and the kinds of its entries."""
    size = sum(entry.size for entry in items)
    print(f"{folder}: {_size(size)}, {len(items)} entries")
    groups: dict[str, list[CacheItem]] = {}
    for entry in items:
        groups.setdefault(entry.model or SHARED, []).append(entry)
    width = max(map(len, groups), default=0)
    for name, entries in sorted(groups.items(), key=lambda group: group[0] == SHARED):
        kinds = sorted({entry.kind for entry in entries})
        parts = [f"{kind} {_size(sum(entry.size for entry in entries if entry.kind == kind))}" for kind in kinds]
        age = _age(time.time() - max(entry.used for entry in entries))
        print(f"  {name:{width}}  {_size(sum(entry.size for entry in entries)):>9}  {age:>10}  {', '.join(parts)}")
    if items:
        print(
            "(--all lists every entry; `rekindle cache rm NAME` removes a model's,  "
            "`rekindle cache prune --to 1GiB` what was used longest ago)"
        )


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{-(-size // 2**10)} KiB"


def _age(seconds: float) -> str:
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "just now"


def _print(folder: Path, items: Sequence[CacheItem], note: str = "") -> None:
    size = sum(entry.size for entry in items) / 2**20
    print(f"{folder}: {size:.1f} MiB in {len(items)} entries{note and ' ' + note}")
    width = max((len(entry.model or SHARED) for entry in items), default=0)
    for entry in items:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        model = f"{entry.model or SHARED:{width}}"
        print(f"  {entry.kind:10} {entry.size / 2**20:9.1f} MiB  {used}  {model}  {entry.path.name}")
