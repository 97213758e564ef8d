"""Executables that outlive the process: serialised ahead-of-time programs in Orbax checkpoints, loaded without tracing.

One checkpoint per program below `<cache_dir>/programs`, named by the digest of all that determines it. Saving writes
to a name of its own and renames, so an entry is complete or absent and processes may share a store. Whatever is wrong
with an entry or with the disk, the answer is to compile again and to say so once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from rekindle import saving
from rekindle.engine import identity
from rekindle.errors import StoreError
from rekindle_kernels.native.build import ensure

log = logging.getLogger("rekindle.store")
FORMAT = 1
STALE_PARTIAL_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
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

    def load(self, key: str) -> Any:
        """The executable, ready to be called. Raises `StoreError` with the reason why there is none."""
        path = self.folder / key
        if not path.is_dir():
            raise StoreError("not stored yet")
        try:
            payload, meta = _read(path)
            trees = pickle.loads(payload[: meta["trees"]].tobytes())
            compiled = _deserialized(payload[meta["trees"] :].tobytes(), trees)
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
        partial = self.folder / f"partial-{uuid.uuid4().hex}"
        try:
            executable, in_tree, out_tree = serialize_executable.serialize(compiled)
            trees = pickle.dumps((in_tree, out_tree))
            payload = np.frombuffer(trees + executable, np.uint8)
            meta = {
                "format": FORMAT,
                "name": name,
                "model": model,
                "compile_seconds": compile_seconds,
                "trees": len(trees),
                "checksum": _checksum(payload),
            }
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(partial, payload, meta)
            self._publish(partial, self.folder / key)
        except Exception as error:
            self._writable = not isinstance(error, OSError)
            self._say("save", f"programs can't be stored in {self.folder}: {type(error).__name__}: {error}")
            shutil.rmtree(partial, ignore_errors=True)
            return False
        self.prune()
        return True

    def entries(self) -> list[Entry]:
        """What is stored, most recently used first; broken entries are left out."""
        found = []
        for path in self._paths():
            with contextlib.suppress(Exception):
                meta = json.loads((path / "meta.json").read_text())
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                used = path.stat().st_mtime
                found.append(Entry(path.name, meta["name"], meta["model"], size, meta["compile_seconds"], used))
        return sorted(found, key=lambda entry: -entry.used)

    def prune(self) -> None:
        """Drop what is beyond the capacity, and what a killed process left half written."""
        with self._lock:
            total = 0
            for count, entry in enumerate(self.entries(), 1):
                total += entry.size
                if count > self.capacity or total > self.max_bytes:
                    self._drop(self.folder / entry.key)
            for partial in self.folder.glob("partial-*"):
                with contextlib.suppress(OSError):
                    if time.time() - partial.stat().st_mtime > STALE_PARTIAL_SECONDS:
                        self._drop(partial)

    def _paths(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith("partial-")]
        return []

    def _publish(self, partial: Path, path: Path) -> None:
        try:
            partial.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            shutil.rmtree(partial, ignore_errors=True)  # another process was faster; both compiled the same

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
        return identity.digest({"identity": self.identity, "program": name})


def _write(path: Path, payload: np.ndarray, meta: dict[str, Any]) -> None:
    from orbax.checkpoint import v1

    with saving.ONE_AT_A_TIME:
        v1.save(path, {"program": payload})
    (path / "meta.json").write_text(json.dumps(meta))


def _deserialized(executable: bytes, trees: tuple[Any, Any]) -> Any:
    """The executable, with the native kernels that it calls: tracing would have built them, so here XLA names them."""
    built: set[str] = set()
    while True:
        try:
            return serialize_executable.deserialize_and_load(executable, *trees)
        except jax.errors.JaxRuntimeError as error:
            missing = re.search(r"No FFI handler registered for rekindle_(\w+)", str(error))
            if missing is None or missing[1] in built:
                raise
            ensure(missing[1])
            built.add(missing[1])


def _read(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    from orbax.checkpoint import v1

    meta = json.loads((path / "meta.json").read_text())
    if meta["format"] != FORMAT:
        raise StoreError(f"it has format {meta['format']}, this version reads {FORMAT}")
    payload = np.asarray(v1.load(path)["program"])
    if _checksum(payload) != meta["checksum"]:
        raise StoreError("its checksum does not match")
    return payload, meta


def _checksum(payload: np.ndarray) -> str:
    return hashlib.blake2b(payload.data, digest_size=16).hexdigest()
