"""`rekindle cache ls|prune|clear`: look at and trim what persists on disk."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from rekindle._src.core.config import cache_folder
from rekindle.errors import ConfigError

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class CacheItem(NamedTuple):
    """One thing that can be dropped on its own: a folder or a file two levels below the cache directory."""

    path: Path
    kind: str  # the folder it is in: programs, pages, snapshots, weights
    size: int
    used: float  # seconds since the epoch


def run(arguments: argparse.Namespace) -> int:
    folder = cache_folder(arguments.cache_dir)
    found = entries(folder)
    match arguments.action:
        case "ls" if arguments.json:
            print(json.dumps([{**entry._asdict(), "path": str(entry.path)} for entry in found], indent=1))
        case "ls":
            _print(folder, found)
        case "prune":
            _report(prune(found, parse_size(arguments.to)))
        case "clear":
            _report(prune(found, 0))
    return 0


def entries(folder: Path) -> list[CacheItem]:
    """Everything below `folder`, most recently used first."""
    found = []
    for kind in sorted(folder.iterdir()) if folder.is_dir() else []:
        for path in sorted(kind.iterdir()) if kind.is_dir() else []:
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            stats = [file.stat() for file in files]
            used = max((max(stat.st_atime, stat.st_mtime) for stat in stats), default=path.stat().st_mtime)
            found.append(CacheItem(path, kind.name, sum(stat.st_size for stat in stats), used))
    return sorted(found, key=lambda entry: -entry.used)


def prune(found: list[CacheItem], keep: int) -> list[CacheItem]:
    """Drop the least recently used entries until at most `keep` bytes are left; returns what went."""
    total, dropped = 0, []
    for entry in found:
        total += entry.size
        if total > keep:
            if entry.path.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                entry.path.unlink(missing_ok=True)
            dropped.append(entry)
    return dropped


def parse_size(text: str) -> int:
    """Bytes from "512MiB", "2GB" or a plain number."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError("--to", text, "is not a size", "Write 512MiB, 2GB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _print(folder: Path, found: list[CacheItem]) -> None:
    print(f"{folder}: {sum(entry.size for entry in found) / 2**20:.1f} MiB in {len(found)} entries")
    for entry in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"  {entry.kind:10} {entry.size / 2**20:9.1f} MiB  {used}  {entry.path.name}")


def _report(dropped: list[CacheItem]) -> None:
    print(f"dropped {len(dropped)} entries, {sum(entry.size for entry in dropped) / 2**20:.1f} MiB")
