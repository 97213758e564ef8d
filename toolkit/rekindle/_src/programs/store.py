"""Executables that outlive the process: serialised ahead-of-time programs in Orbax checkpoints, loaded without tracing.

One checkpoint per program below `<cache_dir>/programs`, named by the digest of all that determines it; complete or
absent, so processes may share a store. Whatever is wrong with an entry or with the disk, the answer is to compile again
and to say so once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from rekindle._src.core.atomic_checkpoint import ITEM, PARTIAL, write_checkpoint
from rekindle._src.core.gc_pause import gc_paused
from rekindle._src.programs import program_key
from rekindle.errors import StoreError
from rekindle_kernels import ensure_kernels, kernels_in

log = logging.getLogger("rekindle.store")
FORMAT = 2
_UNSERIALISABLE = "this backend's programs can't be serialised: JAX's compilation cache keeps them, and they are traced"
PROGRAM, META = f"{ITEM}/program", f"{ITEM}/meta.json"
STALE_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class StoredProgram:
    """One stored program, as `rekindle cache ls` and `session.programs` show it."""

    key: str
    name: str  # the bucket's
    model: str
    size: int  # bytes on disk
    compile_seconds: float
    used: float  # seconds since the epoch


class ExecutableStore:
    """A folder of programs, bounded by count and bytes; the least recently used leave first."""

    def __init__(self, folder: Path, *, capacity: int = 64, max_bytes: int = 1 << 30) -> None:
        self.folder, self.capacity, self.max_bytes = folder, capacity, max_bytes
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._writable = True
        # Its presence says that an earlier process could not serialise programs here.
        self._compilations = folder.parent / "compilations"
        if self._compilations.is_dir():
            self._fall_back()

    def load(self, key: str) -> Any:
        """The executable, ready to be called. Raises `StoreError` with the reason why there is none."""
        path = self.folder / key
        if not path.is_dir():
            raise StoreError(_UNSERIALISABLE if self._compilations.is_dir() else "not stored yet")
        try:
            compiled = _loaded(path)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self._say(key, f"stored program {key} can't be used ({reason}); it is dropped and compiled again")
            self._drop(path)
            raise StoreError(reason) from error
        with contextlib.suppress(OSError):
            os.utime(path)  # what LRU goes by; a read-only store just keeps its order
        return compiled

    def save(self, key: str, compiled: Any, *, name: str, model: str, compile_seconds: float) -> bool:
        """Keep it; False, said once, where the backend can't serialise or the disk can't be written."""
        if not self._writable or not threading.main_thread().is_alive():  # Orbax needs an interpreter that lives
            return False
        try:
            executable, in_tree, out_tree = serialize_executable.serialize(compiled)
        except Exception as error:
            self._say("serialise", f"{_UNSERIALISABLE}, in {self._compilations} ({type(error).__name__}: {error})")
            with contextlib.suppress(OSError):
                self._compilations.mkdir(parents=True, exist_ok=True)
                self._fall_back()
            return False
        try:
            trees = pickle.dumps((in_tree, out_tree))
            meta = {
                "format": FORMAT,
                "name": name,
                "model": model,
                "compile_seconds": compile_seconds,
                "trees": len(trees),
                "checksum": _checksum(trees + executable),
                "native": kernels_in(executable),
            }
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / key, trees + executable, meta)
        except Exception as error:
            if (self.folder / key).is_dir():
                return True  # another process was faster; both compiled the same
            self._writable = not isinstance(error, OSError)
            self._say("save", f"programs can't be stored in {self.folder}: {type(error).__name__}: {error}")
            return False
        self.prune()
        return True

    def entries(self) -> list[StoredProgram]:
        """What is stored, most recently used first; broken entries are left out."""
        found = []
        for path in self._paths():
            with contextlib.suppress(Exception):
                meta = json.loads((path / META).read_text())
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                used = path.stat().st_mtime
                found.append(StoredProgram(path.name, meta["name"], meta["model"], size, meta["compile_seconds"], used))
        return sorted(found, key=lambda entry: -entry.used)

    def prune(self) -> None:
        """Drop what is beyond the capacity, what a killed process left half written, and what nobody can read."""
        with self._lock:
            total, kept = 0, self.entries()
            for count, entry in enumerate(kept, 1):
                total += entry.size
                if count > self.capacity or total > self.max_bytes:
                    self._drop(self.folder / entry.key)
            readable = {entry.key for entry in kept}
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                with contextlib.suppress(OSError):
                    if path.name not in readable and time.time() - path.stat().st_mtime > STALE_SECONDS:
                        self._drop(path)

    def _fall_back(self) -> None:
        """Have JAX keep compilations of this process from now on, unless the user already has it do so elsewhere."""
        if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
            jax.config.update("jax_compilation_cache_dir", str(self._compilations))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            compilation_cache.reset_cache()  # it has looked at the options only once

    def _paths(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith(PARTIAL)]
        return []

    def _drop(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning(text)


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramStore:
    """An `ExecutableStore` seen by one session: its programs by their names."""

    store: ExecutableStore
    model: str
    identity: str  # of everything but the program's name

    def load(self, name: str) -> Any:
        return self.store.load(self._key(name))

    def save(self, name: str, compiled: Any, compile_seconds: float) -> bool:
        return self.store.save(self._key(name), compiled, name=name, model=self.model, compile_seconds=compile_seconds)

    def _key(self, name: str) -> str:
        return program_key.digest({"identity": self.identity, "program": name})


def _write(path: Path, payload: bytes, meta: dict[str, Any]) -> None:
    def write(folder: Path) -> None:
        (folder / Path(PROGRAM).name).write_bytes(payload)
        (folder / Path(META).name).write_text(json.dumps(meta))

    write_checkpoint(path, write)


def _loaded(path: Path) -> Any:
    """The executable, after the native kernels that it calls: tracing would have registered them."""
    meta = json.loads((path / META).read_text())
    if meta["format"] != FORMAT:
        raise StoreError(f"it has format {meta['format']}, this version reads {FORMAT}")
    payload = (path / PROGRAM).read_bytes()
    if _checksum(payload) != meta["checksum"]:
        raise StoreError("its checksum does not match")
    with gc_paused():
        ensure_kernels(meta["native"])
        trees = pickle.loads(payload[: meta["trees"]])
        return serialize_executable.deserialize_and_load(payload[meta["trees"] :], *trees)


def _checksum(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
