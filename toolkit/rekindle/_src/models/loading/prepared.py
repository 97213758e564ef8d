"""Weights in their final form, kept by Orbax, so that the next start uses them as they are.

Orbax commits a checkpoint as a whole or not at all; in it lies one safetensors file. A CPU device computes with that
file where it is mapped; for others the reader of checkpoints reads it. Measured on 400 MB of int8 leaves, 2 cores:
Orbax's own array format saved at 150 MB/s, loaded at 540 MB/s and needed five times the weights' memory; this one is
written at the speed of the disk. Orbax is not imported to load it, which takes 0.12 s and more. Next to it lies a
description of the model as JSON: a start that compiles nothing then needs neither flax nor the model's module, which
take 0.2 s.

Seconds from a process's start to its first token with everything compiled, bfloat16, medians of fresh processes in
turn on a virtual machine with a host that takes free memory back between two starts:

                                  270 MB    720 MB
    kept and mapped                 1.00      1.05
    the checkpoint is read          1.81      2.28
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from rekindle._src.core.atomic_checkpoint import ITEM, abandon
from rekindle._src.core.priority import yield_to_others
from rekindle._src.core.store import Store, Unusable
from rekindle._src.models.base import ALONE, Graph, Placement
from rekindle._src.models.loading import kept_weights, known_models, mmap_weights, reading, tensor_files
from rekindle._src.models.loading.kept_weights import MappedFile, MappedWeights
from rekindle._src.models.loading.known_models import KnownModel
from rekindle._src.models.loading.load_progress import ByteMeter, Report
from rekindle._src.models.loading.manifest import one
from rekindle._src.models.roles import LeafParts
from rekindle.errors import CheckpointError, StoreError
from rekindle_kernels import private_files, unavailable_reason

MIN_BYTES = kept_weights.MIN_BYTES
MAX_ENTRIES = 4  # sets of weights kept per cache folder; the least recently used is removed first
MAX_COPY = 4 << 30  # bytes; larger checkpoints are only kept if they were converted, not just to be mapped
# Seconds before weights are written: a user waits for the first answer, and programs are compiled meanwhile.
DELAY = 5.0
PIECE, PAUSES = 4 << 20, 3  # bytes written at once, and the pause after each write, in multiples of its time
IN_ALL = 3.0  # seconds of pauses: other writes to the cache wait meanwhile
AT_EXIT = 4.0  # seconds that a process stays to finish writing; a notebook's kernel is killed after 5
_SUMS = "checksums.json"
MODEL = "model.json"
_DESCRIPTION = f"{ITEM}/{MODEL}"
_saving: set[threading.Thread] = set()
hurry = threading.Event()
_one_at_a_time = threading.Lock()
_registered = False
Leaf = Array | np.ndarray[Any, Any] | LeafParts
Checked = Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]
_log = logging.getLogger(__name__)


def slot(cache_dir: str | Path, fingerprint: str, *asked: object, folder: str = kept_weights.FOLDER) -> Path:
    """Return where the weights of a checkpoint are kept for these options, on this platform, by these sources.

    With another `folder` it is the place of something else that depends on the same.
    """
    native = unavailable_reason("cpu") is None
    return kept_weights.place(
        cache_dir, fingerprint, *asked,
        platform=jax.default_backend(), native=native, digest=kept_weights.sources(), folder=folder,
    )  # fmt: skip


def known(kept: Path) -> KnownModel | None:
    """Return the model that is kept there, or None.

    Raise `StoreError` if it can't be read now, or if it is damaged; then it is set aside.
    """
    store = _store(kept)
    if store.distrusted is not None:
        return None
    if not kept.is_dir():
        model = known_models.fetched(kept)
        if model is not None:
            return model  # `load` fetches the weights, while programs are loaded
    if not store.holds(kept.name):
        return None
    try:
        return known_models.decode(store.content(kept.name, _DESCRIPTION))
    except FileNotFoundError:
        return None
    except Exception as error:
        raise _in_words(kept, store.unusable(kept.name, error)) from error


def _store(kept: Path) -> Store:
    """Return the store that `kept` is an entry of."""
    return Store(kept.parent, most=MAX_ENTRIES, kept_damaged=1)  # they are large


def _in_words(kept: Path, unusable: Unusable) -> StoreError:
    outcome = "can't be read now, and stay" if unusable.passing else "are damaged and were set aside"
    return StoreError(f"the laid-out weights in {kept} {outcome} ({unusable.error})")


def load(
    kept: Path,
    graph: Graph,
    shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    place: reading.Place = reading.place_on_default_device,
    placement: Placement = ALONE,
    report: Report | None = None,
    brought: Callable[[Path], MappedWeights | None] = lambda kept: None,
) -> tuple[Array, ...] | None:
    """Return the leaves, or None if nothing is kept.

    Raise `StoreError` if they can't be read now, or if they are damaged; then they are set aside. `brought` returns
    the file if it was brought into memory before.
    """
    store = _store(kept)
    if not store.holds(kept.name):
        return None
    expected = dict(zip(graph.paths, shapes, strict=True))

    def arrays(path: Path) -> tuple[Array, ...]:
        private_files.check(path / ITEM / kept_weights.FILE, inside=kept.parent)
        ahead = brought(kept) if not placement.divided and maps(place) else None
        try:
            return _read(path / ITEM / kept_weights.FILE, expected, place, placement, report, ahead)
        finally:
            if ahead is not None:
                ahead.mapped.release()

    try:
        leaves = store.read(kept.name, arrays, (CheckpointError, OSError, ValueError, KeyError))
    except Unusable as unusable:  # the checkpoint itself is still there
        raise _in_words(kept, unusable) from unusable.error
    with contextlib.suppress(OSError):
        known_models.keep(kept, store.content(kept.name, _DESCRIPTION))
    return leaves


def save(
    kept: Path, graph: Graph, dtype: str, leaves: Sequence[Array] | Sequence[LeafParts], *, name: str = ""
) -> None:
    """Keep the model. A thread writes it after a while, so that the model can be used at once; `wait` waits for that.

    A failure costs the next start some time and nothing else, so it is only logged.
    """
    global _registered
    if _store(kept).distrusted is not None:
        return
    if not _registered:
        # Orbax writes in thread pools, which take no more work once threading's own exit functions have run. Those
        # run before the functions of `atexit` and before threads are joined, so no public way is in time. A Python
        # without the private one saves what it can: a failure is logged and costs the next start its time.
        getattr(threading, "_register_atexit", atexit.register)(_finish)
        _registered = True
    # On CPU a view holds the memory: the session may delete its leaves while they are being written, or before.
    on_host = all(is_on_host(leaf) for leaf in leaves)
    arrays = [np.asarray(leaf) if on_host and isinstance(leaf, Array) else leaf for leaf in leaves]
    arguments = kept, graph, dtype, arrays, name, *((DELAY, PAUSES) if on_host else (0.0, 0))
    thread = threading.Thread(target=save_weights, args=arguments, name="rekindle-keep", daemon=True)
    _saving.add(thread)
    thread.start()


def is_on_host(leaf: Array | LeafParts) -> bool:
    if isinstance(leaf, LeafParts):
        return leaf.on_host
    return leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())


def wait(timeout: float | None = None) -> bool:
    """Wait until everything that is to be kept is on disk; False if that takes longer than `timeout` seconds."""
    end = None if timeout is None else time.monotonic() + timeout
    hurry.set()
    for thread in list(_saving):
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    hurry.clear()
    return not _saving


def _finish() -> None:
    """Wait a moment for unfinished writes before the process ends, then remove any still unfinished."""
    if not wait(AT_EXIT):
        hurry.set()  # programs are written after it, before the interpreter ends
        abandon()


def save_weights(
    kept: Path, graph: Graph, dtype: str, leaves: Sequence[Leaf], name: str, delay: float, pauses: int
) -> None:
    yield_to_others()
    hurry.wait(delay)
    try:
        with _one_at_a_time:
            write_once(kept, graph, dtype, leaves, name, pauses)
    except Exception as error:
        _log.warning("laid-out weights not kept in %s: %s", kept, error)
    finally:
        _saving.discard(threading.current_thread())


def write_once(kept: Path, graph: Graph, dtype: str, leaves: Sequence[Leaf], name: str, pauses: int) -> None:
    if kept.is_dir():  # another session was faster
        return
    size, store = sum(leaf.nbytes for leaf in leaves), _store(kept)
    private_files.make_folder(kept.parent)
    store.prune(room=1)
    free = shutil.disk_usage(kept.parent).free
    if free < 2 * size:
        _log.warning("laid-out weights not kept: they need %d MB, %d MB are free", size >> 20, free >> 20)
        return
    specs = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
    model = known_models.encode(graph, specs, dtype, name)
    by_path = dict(zip(graph.paths, leaves, strict=True))
    store.write(kept.name, functools.partial(write_item, model, by_path, pauses=pauses))
    known_models.keep(kept, model)


def write_item(model: bytes, leaves: Mapping[str, Leaf], folder: Path, *, pauses: int = 0) -> None:
    sums = dict[str, str]()
    # Arrays are adopted where they begin on a cache line: those that would shift their successors come last.
    ordered = dict(sorted(leaves.items(), key=lambda leaf: leaf[1].nbytes % tensor_files.ALIGNMENT != 0))

    def arrays() -> Iterator[np.ndarray[Any, Any]]:  # one at a time: they may come from an accelerator
        left = IN_ALL
        for path, leaf in ordered.items():
            array = np.ascontiguousarray(leaf)
            sums[path] = kept_weights.checksum_of(array)
            flat = array.reshape(-1).view(np.uint8)
            for start in range(0, flat.size, PIECE):
                began = time.monotonic()
                yield flat[start : start + PIECE]
                pause = min(left, pauses * (time.monotonic() - began))
                left -= pause
                hurry.wait(pause)

    tensor_files.write(folder / kept_weights.FILE, ordered, arrays())
    (folder / _SUMS).write_text(json.dumps(sums))
    (folder / MODEL).write_bytes(model)


def _read(
    path: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    place: reading.Place,
    placement: Placement,
    report: Report | None,
    ahead: MappedWeights | None,
) -> tuple[Array, ...]:
    """Return the leaves of a kept file, each compared with its checksum."""
    header = tensor_files.read_header(path) if ahead is None else ahead.mapped.header
    sums = json.loads((path.parent / _SUMS).read_text())
    entries = {entry.name: entry for entry in header.entries}
    stored = {name: (entry.shape, entry.numpy_dtype) for name, entry in entries.items()}
    if stored != {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in wanted.items()}:
        raise CheckpointError(f"{path} holds other leaves than the model has.")

    def compare(name: str, found: str) -> None:
        if found != sums.get(name):
            raise CheckpointError(f"{path}: the checksum of {name} does not match.")

    def checked(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        compare(name, kept_weights.checksum_of(array))
        return array

    leaves = [
        reading.LeafPlan(name, one(name, leaf.shape[0]), tuple(leaf.shape), np.dtype(leaf.dtype))
        for name, leaf in wanted.items()
    ]
    if placement.divided:
        meter = ByteMeter(reading.bytes_to_read(leaves, entries, placement), report)
        arrays = reading.read_leaves(
            leaves, entries, place=place, meter=meter, placement=placement,
            check=lambda leaf: compare(leaf.path, _checksum_of(entries[leaf.path])),
        )  # fmt: skip
    else:
        meter = ByteMeter(sum(entry.nbytes for entry in header.entries), report)
        mapped = kept_weights.map_it(header) if ahead is None and maps(place) else None
        if ahead is not None:
            arrays = _adopted(ahead, place, compare, meter)
        elif mapped is not None:
            arrays = _brought(mapped, place, checked, meter)
        else:
            arrays = reading.read_leaves(
                leaves, entries, place=lambda name, array: place(name, checked(name, array)), meter=meter
            )
    meter.tell(final=True)
    return tuple(arrays[name] for name in wanted)


def _checksum_of(entry: tensor_files.TensorEntry) -> str:
    """Return the checksum of a tensor in its file, with one piece at a time in memory."""
    memory = np.empty(min(entry.nbytes, kept_weights.SUMMED), np.uint8)

    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        for start in range(0, entry.nbytes, kept_weights.SUMMED):
            piece = memory[: min(kept_weights.SUMMED, entry.nbytes - start)]
            tensor_files.read_into(entry, start, piece)
            yield piece

    return kept_weights.checksum_of_pieces(entry.nbytes, pieces())


def _brought(mapped: MappedFile, place: reading.Place, checked: Checked, meter: ByteMeter) -> dict[str, Array]:
    """Return the leaves in the mapping of their file, which is read meanwhile."""

    def brought(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        mmap_weights.bring(array)
        return checked(name, array)

    arrays = dict[str, Array]()
    try:
        tensors = tensor_files.views(mapped.header, mapped.content)
        with ThreadPoolExecutor(reading.workers(), thread_name_prefix="rekindle-load") as pool:
            for name, array in zip(tensors, pool.map(brought, tensors, tensors.values()), strict=True):
                arrays[name] = place(name, array)
                meter.add(array.nbytes)
                meter.tell()
        mapped.watch()
    finally:
        mapped.release()
    return arrays


def _adopted(
    ahead: MappedWeights, place: reading.Place, compare: Callable[[str, str], None], meter: ByteMeter
) -> dict[str, Array]:
    """Return the leaves in the mapping of their file, which was read before."""
    arrays = dict[str, Array]()
    for name, array in tensor_files.views(ahead.mapped.header, ahead.mapped.content).items():
        compare(name, ahead.sums[name])
        arrays[name] = place(name, array)
        meter.add(array.nbytes)
    ahead.mapped.watch()
    return arrays


def maps(place: reading.Place) -> bool:
    """True if kept weights are used in the mapping of their file."""
    return place is reading.place_on_default_device and jax.default_backend() == "cpu"
