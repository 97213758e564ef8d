"""Weights in their final form, kept by Orbax, so that the next start reads them as they are.

Orbax commits a checkpoint as a whole or not at all; what lies in it is one safetensors file, read by the same parallel
reader as the original. Measured on 400 MB of int8 leaves, 2 cores: Orbax's own array format saved at 150 MB/s,
loaded at 540 MB/s and needed five times the weights' memory; this one runs at the speed of the disk. Reading goes to
the file directly: importing Orbax takes 0.12 s and more, as long as 200 MB take.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rekindle import saving
from rekindle.errors import CheckpointError, StoreError
from rekindle.models import reading, tensor_files
from rekindle.models.base import Graph
from rekindle.models.progress import Meter, Report
from rekindle.models.weights import one

MIN_BYTES = 64 << 20  # smaller checkpoints are read again faster than Orbax is imported (0.3 s)
MAX_ENTRIES = 4  # sets of weights kept per cache folder, the least recently used leaves first
_VERSION = "1"
_FILE = "weights.safetensors"
_SUMS = "checksums.json"
_ITEM = "weights"
_saving: set[threading.Thread] = set()
_registered = False
Leaf = jax.Array | np.ndarray[Any, Any]
_log = logging.getLogger(__name__)


class Slot(NamedTuple):
    """Where one model in one precision is kept."""

    path: Path
    key: str


def slot(cache_dir: str | Path, fingerprint: str, graph: Graph, shapes: Sequence[jax.ShapeDtypeStruct]) -> Slot:
    """`fingerprint` includes the precision; names, shapes and dtypes of the leaves stand for the layout."""
    layout = [(path, leaf.shape, str(leaf.dtype)) for path, leaf in zip(graph.paths, shapes, strict=True)]
    key = hashlib.blake2b(repr((_VERSION, fingerprint, layout)).encode(), digest_size=16).hexdigest()
    return Slot(Path(cache_dir).expanduser() / "weights" / key, key)


def load(
    kept: Slot,
    graph: Graph,
    shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    place: reading.Place = reading.place_on_default_device,
    report: Report | None = None,
) -> tuple[jax.Array, ...] | None:
    """The leaves, or None if nothing is kept. `StoreError` if it is damaged: the slot is then empty again."""
    if not kept.path.is_dir():
        return None
    wanted = dict(zip(graph.paths, shapes, strict=True))
    try:
        leaves = _read(kept.path / _ITEM / _FILE, wanted, place, report)
    except Exception as error:  # whatever is wrong with it, the checkpoint itself is still there
        shutil.rmtree(kept.path, ignore_errors=True)
        raise StoreError(f"the laid-out weights in {kept.path} are damaged and were removed ({error})") from error
    os.utime(kept.path)
    return leaves


def save(kept: Slot, graph: Graph, leaves: Sequence[jax.Array]) -> None:
    """Keeps the leaves; a thread writes them, so that the model can be used at once. See `wait`.

    Failing to keep them costs the next start some time and nothing else, so it is only logged.
    """
    global _registered
    if not _registered:
        atexit.register(wait, 2.0)
        _registered = True
    # On CPU a view holds the memory: the session may delete its leaves while they are being written.
    held = [np.asarray(leaf) if leaf.is_fully_addressable and _on_host(leaf) else leaf for leaf in leaves]
    thread = threading.Thread(target=_save, args=(kept, graph.paths, held), name="rekindle-keep", daemon=True)
    _saving.add(thread)
    thread.start()


def _on_host(leaf: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in leaf.devices())


def wait(timeout: float | None = None) -> bool:
    """Until what is being kept is on disk; False if that takes longer than `timeout` seconds."""
    end = None if timeout is None else time.monotonic() + timeout
    for thread in list(_saving):
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    return not _saving


def _save(kept: Slot, paths: Sequence[str], leaves: Sequence[Leaf]) -> None:
    try:
        size = sum(leaf.nbytes for leaf in leaves)
        kept.path.parent.mkdir(parents=True, exist_ok=True)
        _prune(kept.path.parent)
        free = shutil.disk_usage(kept.path.parent).free
        if free < 2 * size:
            _log.warning("laid-out weights not kept: they need %d MB, %d MB are free", size >> 20, free >> 20)
            return
        # Of two writers of one path, Orbax lets the second remove what the first is writing, and the first commit
        # the rest; hence a name of one's own and a rename, which only one of them wins.
        own = kept.path.with_name(f"{kept.key}.{uuid.uuid4().hex}.tmp")
        _orbax().save(own, dict(zip(paths, leaves, strict=True)))
        try:
            own.rename(kept.path)
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
            if not kept.path.is_dir():
                raise
    except Exception as error:
        _log.warning("laid-out weights not kept in %s: %s", kept.path, error)
    finally:
        _saving.discard(threading.current_thread())


def _prune(folder: Path) -> None:
    """Leaves room for one more entry, and removes what writers that died left behind."""
    entries = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    unfinished = [path for path in entries if "tmp" in path.name]
    finished = [path for path in entries if path not in unfinished]
    old = [path for path in unfinished if time.time() - path.stat().st_mtime > 3600]
    for path in (*finished[: max(0, len(finished) - MAX_ENTRIES + 1)], *old):
        with contextlib.suppress(OSError):
            shutil.rmtree(path)


def checksum(array: np.ndarray[Any, Any]) -> str:
    """Detects flipped bits, zeroed and exchanged blocks at the speed of memory; no protection against intent."""
    flat = array.reshape(-1).view(np.uint8)
    words = flat[: flat.size // 8 * 8].view(np.uint64)
    total = np.uint64(flat.size)
    with np.errstate(over="ignore"):
        for index, start in enumerate(range(0, words.size, 1 << 15)):
            block = words[start : start + (1 << 15)]
            total += np.add.reduce(block) * np.uint64(2 * index + 1)
    tail = int.from_bytes(flat[words.nbytes :].tobytes(), "little")
    return f"{int(total):016x}{tail:x}"


class _Leaves(NamedTuple):
    leaves: Mapping[str, Leaf]


class _Handler:
    """What Orbax calls to write the one item of such a checkpoint."""

    async def save(self, directory: Any, checkpointable: _Leaves) -> Awaitable[None]:
        async def write() -> None:
            folder = Path(str(await directory.await_creation()))
            leaves, sums = checkpointable.leaves, dict[str, str]()

            def arrays() -> Iterator[np.ndarray[Any, Any]]:  # one at a time: they may come from an accelerator
                for path, leaf in leaves.items():
                    array = np.ascontiguousarray(leaf)
                    sums[path] = checksum(array)
                    yield array

            tensor_files.write(folder / _FILE, leaves, arrays())
            (folder / _SUMS).write_text(json.dumps(sums))

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        raise NotImplementedError("kept weights are read without Orbax")

    async def metadata(self, directory: Any) -> None:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, _Leaves)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None


def _read(
    path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], place: reading.Place, report: Report | None
) -> tuple[jax.Array, ...]:
    header = tensor_files.read_header(path)
    sums = json.loads((path.parent / _SUMS).read_text())
    entries = {entry.name: entry for entry in header.entries}
    found = {name: (entry.shape, entry.numpy_dtype) for name, entry in entries.items()}
    if found != {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in wanted.items()}:
        raise CheckpointError(f"{path} holds other leaves than the model has.")

    def check(name: str, array: np.ndarray[Any, Any]) -> jax.Array:
        if checksum(array) != sums.get(name):
            raise CheckpointError(f"{path}: the checksum of {name} does not match.")
        return place(name, array)

    leaves = [
        reading.Leaf(name, one(name, leaf.shape[0]), tuple(leaf.shape), np.dtype(leaf.dtype))
        for name, leaf in wanted.items()
    ]
    meter = Meter(sum(entry.nbytes for entry in header.entries), report)
    arrays = reading.read_leaves(leaves, entries, place=check, meter=meter)
    meter.tell(final=True)
    return tuple(arrays[name] for name in wanted)


class _Orbax:
    """Orbax with the handler above; imported at first use."""

    def __init__(self) -> None:
        from orbax.checkpoint import v1

        self._v1 = v1
        self._registry = v1.handlers.local_registry(include_global_registry=False)
        self._registry.add(_Handler, checkpointable_name=_ITEM)

    def save(self, path: Path, leaves: Mapping[str, Leaf]) -> None:
        context = self._v1.Context()
        context.checkpointables.registry = self._registry
        with saving.ONE_AT_A_TIME, context:
            self._v1.save_checkpointables(path, {_ITEM: _Leaves(leaves)})


_orbax = functools.cache(_Orbax)
