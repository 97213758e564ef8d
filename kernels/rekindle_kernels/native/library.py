"""Native kernels that were compiled ahead, for several levels of processors, in one shared library.

A wheel for a platform brings it (`python -m rekindle_kernels.native.build_library` makes it); then kernels need neither
numba nor llvmlite, and nothing is compiled at the first start. It is used only with the sources that it was made from.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rekindle_kernels.native import cpu
from rekindle_kernels.native.chain_plan import ENTRIES, SLOTS

FOLDER = "REKINDLE_NATIVE_LIBRARY"  # looks for the library elsewhere
MANIFEST = "manifest.json"
log = logging.getLogger(__name__)


class Library(NamedTuple):
    """A library that fits this processor and these sources."""

    path: Path
    digest: str
    levels: dict[str, frozenset[str]]  # the kernels of each level that may run here, the best first


def folder() -> Path:
    """Where the library is looked for."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parent / "prebuilt")


def symbol(name: str, level: cpu.Level) -> str:
    """The symbol of a kernel's entry at a level."""
    return f"rekindle_{name}_entry_{level.suffix}"


def platform_tag(machine: str = "") -> str:
    """The system and machine that a library is for; by default this one."""
    return f"{sys.platform}-{machine or cpu.machine()}"


@cache
def source_digest() -> str:
    """A digest of the sources of all native kernels."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        content = path.read_bytes()
        hasher.update(len(content).to_bytes(8, "little") + content)
    return hasher.hexdigest()


def find() -> Library | None:
    """The library, if there is one for this system, processor and these sources; why not is said in the debug log."""
    return _find(folder(), cpu.levels())


@cache
def _find(place: Path, levels: tuple[cpu.Level, ...]) -> Library | None:
    try:
        manifest: dict[str, Any] = json.loads((place / MANIFEST).read_text())
        found = {level.name: frozenset(manifest["levels"].get(level.name, ())) for level in levels}
        usable = {name: kernels for name, kernels in found.items() if kernels}
        if (manifest["platform"], manifest["sources"]) != (platform_tag(), source_digest()) or not usable:
            log.debug("%s is for another system, processor or version", place)
            return None
        return Library(place / manifest["library"], manifest["digest"], usable)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        log.debug("no library of native kernels in %s: %r", place, error)
        return None


def address(name: str) -> int | None:
    """The address of a kernel's code for the best level that may run here; None if the library does not have it."""
    library = find()
    if library is None:
        return None
    for level, kernels in library.levels.items():
        if name in kernels:
            function = getattr(_loaded(library.path), symbol(name, cpu.level_called(level)))
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def entries() -> Any:
    """The table of entries that code in the library reads; None without a library."""
    library = find()
    return None if library is None else (ctypes.c_int64 * SLOTS).in_dll(_loaded(library.path), ENTRIES)


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
