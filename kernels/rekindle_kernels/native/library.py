"""Native kernels that were compiled ahead: at installation for this processor, or for all levels of a platform's wheel.

`build_library` makes them; then kernels need neither numba nor llvmlite, and nothing is compiled while a user waits.
They are used only with the sources that they were made from. An installation's on x86-64 Linux are object files in one
file, which `object_loader` loads; others are a shared library that a linker made.

A release's wheel has its shared library compressed as a whole, because a wheel's own compression sees 32 KiB at once,
and little of what the levels have in common. The library is unpacked when a kernel is first needed, into the folder of
`kernel_files`.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rekindle_kernels.native import cpu, kernel_files, object_loader
from rekindle_kernels.native.chain_plan import ENTRIES, SLOTS

FOLDER = "REKINDLE_NATIVE_LIBRARY"  # looks for the library elsewhere
MANIFEST = "manifest.json"
PACKED = ".xz"  # at the end of the name of a library that is unpacked first
_SOURCES = ("chain_plan", "compiling", "cpu", "cpuid", "kernel_table", "layout")
_LONGEST = max(len(level.suffix) for level in cpu.LEVELS)
log = logging.getLogger(__name__)


class Library(NamedTuple):
    """A library that fits this processor and these sources."""

    path: Path
    digest: str
    levels: dict[str, frozenset[str]]  # the kernels of each level that may run here, the best first
    objects: dict[str, tuple[int, int]]  # offset and size of object files, by symbol; of a shared library none
    origin: str  # how it was made, in words
    prefetch: cpu.Prefetching | None = None  # chosen by a measurement of `processor`; None if it is the levels' own
    processor: str = ""


def folder() -> Path:
    """Return where the library is looked for."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parent / "prebuilt")


def symbol(name: str, level: cpu.Level) -> str:
    """Return the symbol of a kernel's entry at a level: as long at each, so that equal code makes equal objects."""
    return f"rekindle_{name}_{level_name(level)}_entry"


def level_name(level: cpu.Level) -> str:
    """Return the part of symbols that names a level."""
    return f"{level.suffix:_<{_LONGEST}}"


def platform_tag(machine: str = "", system: str = sys.platform) -> str:
    """Return the system and machine that a library is for; by default this one."""
    return f"{system}-{machine or cpu.machine()}"


def sources() -> list[Path]:
    """Return the files that machine code depends on: the modules that `compiling` imports."""
    folder = Path(__file__).parent
    found = [*folder.glob("kernels/*.py"), *folder.glob("language/*.py"), folder.parent / "int4_format.py"]
    return sorted([*found, *(folder / f"{name}.py" for name in _SOURCES)])


@cache
def source_digest() -> str:
    """Return a digest of the sources of all native kernels."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in sources():
        content = path.read_bytes()
        hasher.update(len(content).to_bytes(8, "little") + content)
    return hasher.hexdigest()


def find() -> Library | None:
    """Return the library, if there is one for this system, processor and these sources; why not is said in the debug
    log."""
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
        if manifest["library"].endswith(PACKED) and importlib.util.find_spec("_lzma") is None:
            log.warning("this Python was built without lzma, which native kernels are unpacked with: install liblzma's "
                        "headers and build it again. XLA does their work, more slowly")  # fmt: skip
            return None
        objects = {symbol: (first, size) for symbol, (first, size) in manifest.get("objects", {}).items()}
        measured = manifest.get("prefetch") or {}
        chosen = cpu.Prefetching.read(measured["chosen"]) if measured else None
        return Library(
            place / manifest["library"], manifest["digest"], usable, objects, manifest.get("origin", ""),
            chosen, measured.get("processor", ""),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.debug("no library of native kernels in %s: %r", place, error)
        return None


def address(name: str) -> int | None:
    """Return the address of a kernel's code for the best level that may run here; None if the library does not have
    it."""
    library = find()
    if library is None:
        return None
    for level, kernels in library.levels.items():
        if name in kernels:
            entry = symbol(name, cpu.level_called(level))
            if library.objects:
                return _loaded_object(library, entry)
            shared = _loaded(library)
            return None if shared is None else ctypes.cast(getattr(shared, entry), ctypes.c_void_p).value
    return None


@cache
def entries() -> Any:
    """Return the addresses of all kernels' code, which the kernel of chains calls; in a shared library's memory if
    there is one."""
    library = find()
    shared = None if library is None or library.objects else _loaded(library)
    return _own_entries() if shared is None else (ctypes.c_int64 * SLOTS).in_dll(shared, ENTRIES)


@cache
def _own_entries() -> Any:
    return (ctypes.c_int64 * SLOTS)()


def _loaded(library: Library) -> ctypes.CDLL | None:
    return _opened(library.path, library.digest)


@cache
def _opened(path: Path, digest: str) -> ctypes.CDLL | None:
    """Return the shared library; None if it can't be loaded or unpacked, which is said once: XLA does its work then."""
    try:
        return ctypes.CDLL(str(unpacked(path, digest) if path.suffix == PACKED else path))
    except OSError as error:
        log.warning("the native kernels of the installation can't be used: %s", error)
        return None


def unpacked(path: Path, digest: str) -> Path:
    """Return a file with the shared library that is compressed in `path`, after checking its digest.

    It is kept for later processes if no other user can replace it there; else it lies in a temporary folder, which this
    process removes when it ends. Raises OSError if `path` is damaged.
    """
    plain = Path(path.stem)
    name = f"{plain.stem}-{digest}{plain.suffix}"
    found = kernel_files.shared_library(name, digest)
    if found is not None:
        return found
    import lzma  # 3 ms, and only here

    try:
        content = lzma.decompress(path.read_bytes())
    except lzma.LZMAError:
        content = b""
    if kernel_files.digest_of(content) != digest:
        raise OSError(f"{path} is damaged: install rekindle again")
    kept = kernel_files.keep_shared_library(name, content)
    if kept is None:
        folder = tempfile.mkdtemp(prefix="rekindle-kernels-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # Windows keeps a file that is in use
        kept = Path(folder, name)
        kept.write_bytes(content)
    return kept


_objects: dict[tuple[str, str], int] = {}  # addresses of what is loaded, by library and symbol


def _loaded_object(library: Library, entry: str) -> int:
    key = library.digest, entry
    if key not in _objects:
        found = object_loader.load(object_file(library, entry), entry, {ENTRIES: ctypes.addressof(_own_entries())})
        if found is None:
            raise OSError(f"{library.path} is damaged: install rekindle again")
        _objects[key] = found
    return _objects[key]


def object_file(library: Library, entry: str) -> bytes:
    """Return the object file in a library with this symbol."""
    first, size = library.objects[entry]
    with library.path.open("rb") as file:
        file.seek(first)
        return file.read(size)
