"""Executables that outlive the process: serialised ahead-of-time programs in Orbax checkpoints, loaded without tracing.

One checkpoint per program below `<cache_dir>/programs`, named by the digest of all its causes; complete or
absent, so processes may share a store. If anything is wrong with an entry or with the disk, the program is compiled
again and the reason is logged once.

A stored program is machine code, and JAX reads it through pickle: loading one is running it. So nothing is loaded from
a folder that other users could have written to, nor, where the store has a key, a program that is not signed with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from rekindle._src.core.atomic_checkpoint import (
    DAMAGED,
    ITEM,
    is_finished,
    is_passing,
    is_stale,
    remove,
    set_aside,
    write_checkpoint,
)
from rekindle._src.core.gc_pause import gc_paused
from rekindle._src.programs import program_key, stored_trees
from rekindle._src.programs.late_store import NOT_STORED
from rekindle.errors import StoreError
from rekindle_kernels import ensure_kernels, kernels_in, private_files, read_through

log = logging.getLogger("rekindle.store")
FORMAT = 4
MAX_AGE = 60 * 24 * 3600.0  # seconds since a program was last loaded
_UNSERIALISABLE = "this backend's programs can't be serialised: JAX's compilation cache keeps them, and they are traced"
_ONE_OF_THEM = "is not serializable"  # XLA's words for a program with an operation that has no stored form
PROGRAM, META = f"{ITEM}/program", f"{ITEM}/meta.json"


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
    """A folder of programs, bounded by bytes, and by age or by count. The least recently used are removed first."""

    def __init__(
        self, folder: Path, *, capacity: int | None = None, max_bytes: int = 1 << 30, max_age: float = MAX_AGE
    ) -> None:
        self.folder, self.capacity, self.max_bytes, self.max_age = folder, capacity, max_bytes, max_age
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._writable = True
        self._fallen_back = False
        self.distrusted = private_files.distrust_reason(folder)  # the reason why nothing is loaded or stored here
        # The folder exists if an earlier process could not serialise programs here.
        self._compilations = folder.parent / "compilations"
        if self.distrusted is not None:
            private_files.tell_once(self.distrusted)
        elif self._compilations.is_dir() and private_files.distrust_reason(self._compilations) is None:
            self._fall_back()

    def load(self, key: str, devices: Sequence[Any] | None = None) -> Any:
        """Return the executable, ready to be called. Raise `StoreError` with the reason if there is none.

        It runs on `devices`, in this order; None is JAX's default device. The key names the same devices.
        """
        if self.distrusted is not None:
            raise StoreError(f"not loaded: {self.distrusted}")
        path = self._path(key)
        if not path.is_dir() and not read_through.fetch(path):
            raise StoreError(_UNSERIALISABLE if self._compilations.is_dir() else NOT_STORED)
        try:
            compiled = _loaded(path, devices or [program_key.default_device()])
        except _NotMovable:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            if is_passing(error):
                self._warn_once(
                    key, f"stored program {key} can't be read now ({reason}); it stays, and is compiled meanwhile"
                )
            else:
                self._warn_once(
                    key, f"stored program {key} can't be used ({reason}); it is set aside and compiled again"
                )
                set_aside(path)
            raise StoreError(reason) from error
        with contextlib.suppress(OSError):
            os.utime(path)  # for the order in which programs are removed; it stays as it is in a read-only store
        read_through.keep(path)
        return compiled

    def save(
        self,
        key: str,
        compiled: Any,
        *,
        name: str,
        model: str,
        compile_seconds: float,
        devices: Sequence[Any] | None = None,
    ) -> bool:
        """Store an executable, with the devices that it was compiled for, as `load` takes them.

        Return False, with a warning the first time, where the backend can't serialise or the disk is full.
        """
        if not self._writable or not threading.main_thread().is_alive():  # Orbax needs a living interpreter
            return False
        if self.distrusted is not None:
            return False
        if self._fallen_back:  # programs from JAX's cache lose their functions when they are serialised again
            self._warn_once("serialise", f"{_UNSERIALISABLE}, in {self._compilations}")
            return False
        try:
            executable, in_tree, out_tree = serialize_executable.serialize(compiled)
        except Exception as error:
            if _ONE_OF_THEM in str(error):
                log.info("program %s is not stored: %s", name, error)
                return False
            self._warn_once(
                "serialise", f"{_UNSERIALISABLE}, in {self._compilations} ({type(error).__name__}: {error})"
            )
            with contextlib.suppress(OSError):
                private_files.make_folder(self._compilations)
                self._fall_back()
            return False
        path = self._path(key)
        try:
            meta = {
                "format": FORMAT,
                "name": name,
                "model": model,
                "compile_seconds": compile_seconds,
                "arguments": stored_trees.encode(in_tree),
                "results": stored_trees.encode(out_tree),
                "native": kernels_in(executable),
                "devices": [device.id for device in devices or [program_key.default_device()]],
            }
            meta["checksum"] = _checksum(path.name, meta, executable)
            _write(path, executable, meta)
        except Exception as error:
            if path.is_dir():
                return True  # another process was faster; both compiled the same
            self._writable = not isinstance(error, OSError)
            self._warn_once("save", f"programs can't be stored in {self.folder}: {type(error).__name__}: {error}")
            return False
        read_through.keep(path)
        self.prune()
        return True

    def holds(self, key: str) -> bool:
        """True if there is an executable, which may turn out to be unusable."""
        path = self._path(key)
        return self.distrusted is None and (path.is_dir() or read_through.fetch(path))

    def entries(self) -> list[StoredProgram]:
        """Return the stored programs, most recently used first, without broken entries."""
        entries = []
        for path in self._paths():
            with contextlib.suppress(Exception):
                meta = json.loads((path / META).read_text())
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                used = path.stat().st_mtime
                entries.append(
                    StoredProgram(path.name, meta["name"], meta["model"], size, meta["compile_seconds"], used)
                )
        return sorted(entries, key=lambda entry: -entry.used)

    def prune(self) -> None:
        """Remove programs beyond the bounds, and entries that are old and unfinished or can't be read."""
        with self._lock:
            total, entries, oldest = 0, self.entries(), time.time() - self.max_age
            for count, entry in enumerate(entries, 1):
                total += entry.size
                expired = entry.used < oldest if self.capacity is None else count > self.capacity
                if expired or total > self.max_bytes:
                    remove(self.folder / entry.key)
            with contextlib.suppress(OSError):  # a folder that can't be listed now is pruned next time
                for path in self.folder.iterdir() if self.folder.is_dir() else ():
                    if path.is_dir() and not path.name.startswith(DAMAGED) and _is_broken(path) and is_stale(path):
                        remove(path)

    def _fall_back(self) -> None:
        """Have JAX store this process's compilations from now on, unless the user has set another folder for that."""
        if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
            self._fallen_back = True
            jax.config.update("jax_compilation_cache_dir", str(self._compilations))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            compilation_cache.reset_cache()  # it has read the options only once

    def _paths(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [path for path in self.folder.iterdir() if path.is_dir() and is_finished(path.name)]
        return []

    def _path(self, key: str) -> Path:
        return self.folder / private_files.stored_name(key)

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning(text)


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramStore:
    """An `ExecutableStore` seen by one session: its programs by their names."""

    store: ExecutableStore
    model: str
    identity: str  # a digest of all the causes of a program except its name
    devices: tuple[Any, ...] | None = None  # the devices of its programs; None: the default one

    def load(self, name: str) -> Any:
        return self.store.load(self._key(name), self.devices)

    def holds(self, name: str) -> bool:
        return self.store.holds(self._key(name))

    def save(self, name: str, compiled: Any, compile_seconds: float) -> bool:
        return self.store.save(
            self._key(name),
            compiled,
            name=name,
            model=self.model,
            compile_seconds=compile_seconds,
            devices=self.devices,
        )

    def _key(self, name: str) -> str:
        return program_key.digest({"identity": self.identity, "program": name})


def _write(path: Path, payload: bytes, meta: dict[str, Any]) -> None:
    def write(folder: Path) -> None:
        (folder / Path(PROGRAM).name).write_bytes(payload)
        (folder / Path(META).name).write_text(json.dumps(meta))

    write_checkpoint(path, write)


def _loaded(path: Path, devices: Sequence[Any]) -> Any:
    """Load the executable, after the native kernels that it calls: tracing would have registered them."""
    meta = json.loads(private_files.read(path / META, inside=path.parent))
    if meta["format"] != FORMAT:
        raise StoreError(f"it has format {meta['format']}, this version reads {FORMAT}")
    executable = private_files.read(path / PROGRAM, inside=path.parent)
    checksum = meta.pop("checksum")
    if _checksum(path.name, meta, executable) != checksum:
        raise StoreError("its checksum does not match")
    with gc_paused():
        ensure_kernels(meta["native"])
        trees = stored_trees.decode(meta["arguments"]), stored_trees.decode(meta["results"])
        if meta["devices"] != [device.id for device in devices]:
            return _moved(executable, *trees, meta["devices"], devices)
        # Without `execution_devices` it would be loaded for all devices of the platform, and would not run on fewer.
        return serialize_executable.deserialize_and_load(
            executable, *trees, backend=devices[0].client, execution_devices=devices
        )


class _NotMovable(StoreError):
    """A program was compiled for other devices, and this version of JAX does not let it be loaded for these."""


def _moved(executable: bytes, arguments: Any, results: Any, made_for: Sequence[int], devices: Sequence[Any]) -> Any:
    """Load the executable on another device than it was compiled for, which its key does not name.

    JAX reads device ids from it and has no public way to replace them, so this extends JAX's own reader. Where a
    version of JAX works otherwise, the program is compiled again.
    """
    try:
        (device,) = devices
        (old_id,) = made_for
        library: Any = vars(importlib.import_module("jax._src.lib"))["xla_client"]
        options = library.CompileOptions()
        options.num_replicas = options.num_partitions = 1
        options.device_assignment = library.DeviceAssignment.create(np.array([[device.id]]))
        unpickler: Any = vars(serialize_executable)["_JaxPjrtUnpickler"]

        class Reader(unpickler):  # type: ignore[misc]
            def persistent_load(self, pid: Any) -> Any:
                if pid[0] == "exec":
                    return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
                return super().persistent_load(pid)

        reader = Reader(io.BytesIO(executable), device.client, [device])
        reader.devices_by_id = {old_id: device}
        unloaded, leaves, no_kwargs = reader.load()
        compiled: Any = jax.stages.Compiled
        return compiled(unloaded.load(), [], arguments.unflatten(leaves), results, no_kwargs=no_kwargs)
    except (ImportError, AttributeError, TypeError, KeyError, ValueError) as error:
        new_ids = [device.id for device in devices]
        raise _NotMovable(f"it was compiled for devices {made_for}, these are {new_ids}: {error}") from error


def _is_broken(path: Path) -> bool:
    """True if an entry lacks its description, or has an invalid one. A passing error proves nothing."""
    try:
        json.loads((path / META).read_text())["name"]
        return not (path / PROGRAM).exists()
    except Exception as error:
        return not is_passing(error)


def _checksum(name: str, meta: dict[str, Any], executable: bytes) -> str:
    """Return the checksum of everything that is stored under `name`, except the checksum itself."""
    return private_files.checksum(name, json.dumps(meta, sort_keys=True).encode(), executable)
