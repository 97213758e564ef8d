"""Executables that outlive the process: serialised ahead-of-time programs in Orbax checkpoints, loaded without tracing.

One checkpoint per program below `<cache_dir>/programs`, named by the digest of all its causes; complete or
absent, so processes may share a store. If anything is wrong with an entry or with the disk, the program is compiled
again and the reason is logged once.

Equal keys mean equal code, in any process. A key is made of causes (sources, versions, device, model, config), not of
the HLO, because computing the HLO means tracing, which a stored program avoids. Everything that is not known to be
irrelevant is part of the key.

A stored program is machine code, and JAX reads it through pickle: loading one is running it. So nothing is loaded from
a folder that other users could have written to, nor, where the store has a key, a program that is not signed with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import json
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import rekindle_kernels
from rekindle._src.core.atomic_checkpoint import ITEM, is_passing
from rekindle._src.core.claims import Claim, claimed, wanted
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.memory import gc_paused
from rekindle._src.core.store import Sound, Store, Unusable
from rekindle._src.models.loading.fingerprint import files_digest
from rekindle.errors import StoreError
from rekindle_kernels import ensure_kernels, kernels_in, private_files

# Options that change neither a shape nor a program. All others are part of the key, so a new one is safe by default.
NOT_IN_PROGRAMS = frozenset(
    {
        "cache_dir", "capture_memory", "device_memory", "disk_memory", "generation_config", "host_memory", "log_every",
        "drafts", "max_queue", "policy", "precompile", "prefix_cache", "projector", "prompt_lookup", "quiet",
        "reply_format", "restore",
        "seed",
        "shared_cache", "step_timeout", "structured",
        "mesh", "processes", "coordinator",  # a key names the devices themselves
    }
)  # fmt: skip
JAX_OPTIONS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_debug_nans", "jax_debug_infs", "jax_disable_jit", "jax_platforms",
)  # fmt: skip
# Folders of the toolkit; the kernels are added as a whole.
SOURCES = ("models", "programs", "execution", "drafts", "capabilities")


def config_fields(config: EngineConfig) -> dict[str, object]:
    """Return the fields of a resolved config that programs depend on."""
    fields = dataclasses.fields(config)
    return {field.name: getattr(config, field.name) for field in fields if field.name not in NOT_IN_PROGRAMS}


def environment() -> dict[str, object]:
    """Return everything outside the session that programs depend on: sources, versions, device, processor, flags."""
    device = default_device()
    return {
        "sources": source_digest(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "machine": platform.machine(),
        "cpu": cpu_features(),
        "threads": usable_cpus(),  # XLA:CPU splits work at compile time
        "kernels": rekindle_kernels.environment(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "options": {name: str(getattr(jax.config, name, None)) for name in JAX_OPTIONS},
    }


def default_device() -> Any:
    """Return the device of computations that name none."""
    device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def digest(fields: Mapping[str, object]) -> str:
    """Return a digest of `fields`, the same in every process for equal fields."""
    text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_features() -> str:
    """Return a digest of the processor's instruction sets, since host code is compiled for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
        text = " ".join(sorted(flags.split(":", 1)[1].split()))
    except (OSError, StopIteration):
        text = platform.processor()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.cache
def source_digest() -> str:
    """Return a digest of every source file that programs are made from."""
    private = Path(__file__).parent.parent
    folders = [*(private / name for name in SOURCES), Path(rekindle_kernels.__file__).parent]
    return files_digest(path for folder in folders for path in sorted(folder.rglob("*.py")))


log = logging.getLogger("rekindle.store")
FORMAT = 4
MAX_AGE = 60 * 24 * 3600.0  # seconds since a program was last loaded
_UNSERIALISABLE = "this backend's programs can't be serialised: JAX's compilation cache keeps them, and they are traced"
_ONE_OF_THEM = "is not serializable"  # XLA's words for a program with an operation that has no stored form
PROGRAM, META = f"{ITEM}/program", f"{ITEM}/meta.json"
NOT_STORED = "not stored yet"  # a reason of `StoreError`
PATIENCE = 60.0  # seconds for which a process waits for a program that another one compiles
LOOK = 0.25  # seconds between two looks at whether another process waits
DELAY, LONGEST = 3.0, 10.0  # seconds from the last program that is to be written later, and at most from the first
# A program from JAX's own compilation cache, where a user has enabled that, loses its functions when it is serialised
# again, and fails when it runs ("Function … not found", jax 0.10 to 0.12). So such programs are left to that cache.
KEPT_THERE = "JAX's compilation cache has it, and programs from there can't be stored again"
_HIT = "/jax/compilation_cache/cache_hits"
_hits = threading.local()  # of this thread, which is the one that compiles


@dataclasses.dataclass(frozen=True, slots=True)
class StoredProgram:
    """One stored program, as `rekindle cache ls` and `session.programs` show it."""

    key: str
    name: str  # the bucket's
    model: str
    size: int  # bytes on disk
    compile_seconds: float
    used: float  # seconds since the epoch


class ExecutableStore(Store):
    """A folder of programs, bounded by bytes, and by age or by count."""

    log = log

    def __init__(
        self, folder: Path, *, capacity: int | None = None, max_bytes: int = 1 << 30, max_age: float = MAX_AGE
    ) -> None:
        super().__init__(folder, most=capacity, max_bytes=max_bytes, max_age=max_age if capacity is None else None)
        self._writable = True
        self._fallen_back = False
        # The folder exists if an earlier process could not serialise programs here.
        self._compilations = folder.parent / "compilations"
        usable = self.distrusted is None and self._compilations.is_dir()
        if usable and private_files.distrust_reason(self._compilations) is None:
            self._fall_back()

    def load(self, key: str, devices: Sequence[jax.Device] | None = None) -> CompiledProgram:
        """Return the executable, ready to be called. Raise `StoreError` with the reason if there is none.

        It runs on `devices`, in this order; none of them is JAX's default device. The key names the same devices.
        """
        if self.distrusted is not None:
            raise StoreError(f"not loaded: {self.distrusted}")
        if not self.holds(key):
            raise StoreError(_UNSERIALISABLE if self._compilations.is_dir() else NOT_STORED)
        try:
            return self.read(key, lambda folder: self._loaded(key, devices or [default_device()]))
        except Unusable as error:
            problem, outcome = "used", "is set aside and compiled again"
            if error.passing:
                problem, outcome = "read now", "stays, and is compiled meanwhile"
            self.warn_once(key, f"stored program {key} can't be {problem} ({error}); it {outcome}")
            raise

    def save(
        self,
        key: str,
        compiled: CompiledProgram,
        *,
        name: str,
        model: str,
        compile_seconds: float,
        devices: Sequence[jax.Device] | None = None,
    ) -> bool:
        """Store an executable, with the devices that it was compiled for, as `load` takes them.

        Return False, with a warning the first time, where the backend can't serialise or the disk is full.
        """
        if not self._writable or not threading.main_thread().is_alive():  # Orbax needs a living interpreter
            return False
        if self.distrusted is not None:
            return False
        if self._fallen_back:  # programs from JAX's cache lose their functions when they are serialised again
            self.warn_once("serialise", f"{_UNSERIALISABLE}, in {self._compilations}")
            return False
        try:
            program: Any = compiled  # what a store returned has the parts that are read of it, too
            executable, in_tree, out_tree = serialize_executable.serialize(program)
        except Exception as error:
            if _ONE_OF_THEM in str(error):
                log.info("program %s is not stored: %s", name, error)
                return False
            self.warn_once("serialise", f"{_UNSERIALISABLE}, in {self._compilations} ({type(error).__name__}: {error})")
            with contextlib.suppress(OSError):
                private_files.make_folder(self._compilations)
                self._fall_back()
            return False
        try:
            meta = {
                "format": FORMAT,
                "name": name,
                "model": model,
                "compile_seconds": compile_seconds,
                "arguments": encode_tree(in_tree),
                "results": encode_tree(out_tree),
                "native": kernels_in(executable),
                "devices": [device.id for device in devices or [default_device()]],
            }
            meta["checksum"] = _checksum(self.path(key).name, meta, executable)

            def write(folder: Path) -> None:
                (folder / Path(PROGRAM).name).write_bytes(executable)
                (folder / Path(META).name).write_text(json.dumps(meta))

            self.write(key, write)
        except Exception as error:
            self._writable = not isinstance(error, OSError)
            self.warn_once("save", f"programs can't be stored in {self.folder}: {type(error).__name__}: {error}")
            return False
        self.prune_after(len(executable))
        return True

    def claim(self, key: str) -> Claim | None:
        """Claim the making of a program; None if another process has made it while this one waited for it."""
        if self.distrusted is not None or not self._writable or self._fallen_back:
            return Claim()
        return claimed(self.folder, self.path(key).name, self.path(key).is_dir, PATIENCE)

    def wanted(self, since: float) -> bool:
        """True if another process has waited for a program of this store since then."""
        return wanted(self.folder, since)

    def stored(self) -> list[StoredProgram]:
        """Return the stored programs, most recently used first, without broken entries."""
        programs = []
        for entry in self.entries():
            with contextlib.suppress(Exception):
                meta = json.loads((entry.path / META).read_text())
                fields = entry.path.name, meta["name"], meta["model"], entry.size, meta["compile_seconds"]
                programs.append(StoredProgram(*fields, entry.used))
        return programs

    def _loaded(self, key: str, devices: Sequence[Any]) -> Any:
        """Load the executable, after the native kernels that it calls: tracing would have registered them."""
        meta = json.loads(self.content(key, META))
        if meta["format"] != FORMAT:
            raise StoreError(f"it has format {meta['format']}, this version reads {FORMAT}")
        executable = self.content(key, PROGRAM)
        checksum = meta.pop("checksum")
        if _checksum(self.path(key).name, meta, executable) != checksum:
            raise StoreError("its checksum does not match")
        with gc_paused():
            ensure_kernels(meta["native"])
            trees = decode_tree(meta["arguments"]), decode_tree(meta["results"])
            if meta["devices"] != [device.id for device in devices]:
                return _moved(executable, *trees, meta["devices"], devices)
            # Without `execution_devices` it would be loaded for all devices of the platform and not run on fewer.
            return serialize_executable.deserialize_and_load(
                executable, *trees, backend=devices[0].client, execution_devices=devices
            )

    def is_broken(self, path: Path) -> bool:
        """True if an entry lacks its description, or has an invalid one."""
        try:
            json.loads((path / META).read_text())["name"]
            return not (path / PROGRAM).exists()
        except Exception as error:
            return not is_passing(error)

    def _fall_back(self) -> None:
        """Have JAX store this process's compilations from now on, unless the user has set another folder for that."""
        if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
            self._fallen_back = True
            jax.config.update("jax_compilation_cache_dir", str(self._compilations))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            compilation_cache.reset_cache()  # it has read the options only once


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramStore:
    """An `ExecutableStore` seen by one session: its programs by their names."""

    store: ExecutableStore
    model: str
    identity: str  # a digest of all the causes of a program except its name
    devices: tuple[jax.Device, ...] = ()  # the devices of its programs; none: the default one

    def load(self, name: str) -> CompiledProgram:
        return self.store.load(self._key(name), self.devices)

    def holds(self, name: str) -> bool:
        return self.store.holds(self._key(name))

    def save(self, name: str, compiled: CompiledProgram, compile_seconds: float) -> bool:
        return self.store.save(
            self._key(name),
            compiled,
            name=name,
            model=self.model,
            compile_seconds=compile_seconds,
            devices=self.devices,
        )

    def claim(self, name: str) -> Claim | None:
        return self.store.claim(self._key(name))

    def wanted(self, since: float) -> bool:
        return self.store.wanted(since)

    def _key(self, name: str) -> str:
        return digest({"identity": self.identity, "program": name})


class _NotMovable(Sound):
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


def _checksum(name: str, meta: dict[str, Any], executable: bytes) -> str:
    """Return the checksum of everything that is stored under `name`, except the checksum itself."""
    return private_files.checksum(name, json.dumps(meta, sort_keys=True).encode(), executable)


class CompiledProgram(Protocol):
    """A program on its devices: a `jax.stages.Compiled`, or a store's replacement for one."""

    def __call__(self, *arguments: Any, **options: Any) -> Any: ...
    def as_text(self) -> str | None: ...


class Executables(Protocol):
    """Executables on disk, which outlive the process."""

    def load(self, name: str) -> CompiledProgram:
        """Load an executable. Raise `StoreError` with the reason if there is none."""

    def holds(self, name: str) -> bool:
        """True if there seems to be one."""

    def save(self, name: str, compiled: CompiledProgram, compile_seconds: float) -> bool: ...
    def claim(self, name: str) -> Claim | None:
        """Claim the making of an executable; None if another process has made it while this one waited for it."""

    def wanted(self, since: float) -> bool:
        """True if another process has waited for an executable since then, in seconds since the epoch."""
        ...


class NoStore:
    """The store of programs that do not outlive the process."""

    def load(self, name: str) -> CompiledProgram:
        raise StoreError("no store")

    def holds(self, name: str) -> bool:
        return False

    def save(self, name: str, compiled: CompiledProgram, compile_seconds: float) -> bool:
        return False

    def claim(self, name: str) -> Claim | None:
        return Claim()

    def wanted(self, since: float) -> bool:
        return False


class LateStore:
    """A store in front of another one. While it is `late`, programs are written in a thread, when no more come.

    While programs are compiled and steps run, processor time is worth more: serialising programs and importing Orbax
    take half a second of a core, most of it with the GIL, which tracing and steps need. `flush` returns when all are
    written; it is called before the executables are released and before the interpreter ends.
    """

    def __init__(self, store: Executables) -> None:
        self.late = False
        self._store = store
        self._waiting: deque[tuple[str, CompiledProgram, float]] = deque()
        self._newest = 0.0  # when the last one came
        self._lock = threading.Lock()  # of the four around it
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._writing = threading.Lock()
        self._claims: dict[str, Claim] = {}  # of executables that are being made, or wait to be written

    def claim(self, name: str) -> bool:
        """Claim the making of an executable, until it is written or given up.

        Return False if another process has made it while this one waited for it.
        """
        claim = self._store.claim(name)
        if claim is None:
            return False
        with self._lock:
            self._claims[name] = claim
        return True

    def give_up(self, name: str) -> None:
        """End the claim on an executable that is not written, if there is one."""
        with self._lock:
            claim = self._claims.pop(name, None)
        if claim is not None:
            claim.release()

    def detach(self) -> None:
        """Use no store from now on, neither to load nor to save."""
        self._store = NoStore()

    def load(self, name: str) -> CompiledProgram:
        """Load an executable. Raises `StoreError` with the reason if there is none."""
        return self._store.load(name)

    def holds(self, name: str) -> bool:
        """True if there seems to be one on disk."""
        return self._store.holds(name)

    def save(self, name: str, compiled: CompiledProgram, compile_seconds: float) -> bool:
        """Write it now, or soon. Return False if writing was tried and failed."""
        if not self.late:
            return self._save(name, compiled, compile_seconds)
        with self._lock:
            self._waiting.append((name, compiled, compile_seconds))
            self._newest = time.monotonic()
            if self._thread is None:
                self._hurry.clear()
                # A daemon: the end of the interpreter, which flushes, does not wait for its delay.
                self._thread = threading.Thread(target=self._later, name="rekindle store", daemon=True)
                self._thread.start()
        return True

    def flush(self) -> None:
        """Write the waiting programs."""
        self._hurry.set()
        self._write()

    def _later(self) -> None:
        end, began = time.monotonic() + LONGEST, time.time()
        while (left := min(self._newest + DELAY, end) - time.monotonic()) > 0:
            if self._hurry.wait(min(left, LOOK)) or self._store.wanted(began):
                break
        with self._lock:
            self._thread = None  # programs saved from now on wait for another thread
        self._write()

    def _write(self) -> None:
        with self._writing:
            while self._waiting:
                self._save(*self._waiting.popleft())

    def _save(self, name: str, compiled: Any, compile_seconds: float) -> bool:
        try:
            return self._store.save(name, compiled, compile_seconds)
        finally:
            self.give_up(name)


@contextlib.contextmanager
def watching_hits() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a program came from the cache in this thread since the context began."""
    before = getattr(_hits, "count", 0)
    yield lambda: getattr(_hits, "count", 0) > before


def _count(event: str, **_: str | int) -> None:
    if event == _HIT:
        _hits.count = getattr(_hits, "count", 0) + 1


jax.monitoring.register_event_listener(_count)


# The structure of a program's arguments and results as JSON, so that calling it reads no pickle:
#   "*"                       an array
#   null                      None
#   ["tuple", …]              as "list"
#   ["dict", {key: …}]        keys are strings
#   ["module:Class", …]       a NamedTuple of rekindle's own
PACKAGES = ("rekindle", "rekindle_kernels")


def encode_tree(tree: Any) -> Any:
    """Return JSON for a PyTreeDef. Raise TypeError for nodes of other types."""
    description = _describe(jax.tree.unflatten(tree, [_LEAF] * tree.num_leaves))
    if decode_tree(description) != tree:
        raise TypeError(f"{tree} is not made of tuples, lists, dicts and rekindle's own records")
    return description


def decode_tree(description: Any) -> Any:
    """Return the PyTreeDef. Raise ValueError for anything that `encode_tree` did not make."""
    return jax.tree.structure(_build(description))


class _Leaf:
    """A placeholder for an array."""


_LEAF = _Leaf()


def _describe(value: Any) -> Any:
    if value is _LEAF:
        return "*"
    if value is None:
        return None
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", {key: _describe(item) for key, item in value.items()}]
    kind = type(value)
    if kind in (tuple, list):
        return [kind.__name__, *map(_describe, value)]
    if _is_record(kind):
        return [f"{kind.__module__}:{kind.__qualname__}", *map(_describe, value)]
    raise TypeError(f"a {kind.__name__} among the arguments or results of a program")


def _build(description: Any) -> Any:
    if description == "*":
        return _LEAF
    if description is None:
        return None
    if not isinstance(description, list) or not description or not isinstance(description[0], str):
        raise ValueError(f"{description!r} describes no tree")
    name, *parts = description
    if name == "dict":
        return {key: _build(item) for key, item in parts[0].items()}
    children = [_build(item) for item in parts]
    if name in ("tuple", "list"):
        return tuple(children) if name == "tuple" else children
    module, _, attribute = name.partition(":")
    kind: Any = getattr(importlib.import_module(module), attribute) if module.split(".")[0] in PACKAGES else None
    if not _is_record(kind):
        raise ValueError(f"{name} is not a record of rekindle's own")
    return kind(*children)


def _is_record(kind: Any) -> bool:
    is_namedtuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_namedtuple and kind.__module__.split(".")[0] in PACKAGES
