"""Work on the model that a process opens first while JAX is being imported, in a thread that releases the GIL.

The thread reads and checks the weights that an earlier process has laid out. Their place follows from the checkpoint,
the options and the platform, which is guessed to be the CPU. Where there are none, it touches memory for them.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from pathlib import Path

from rekindle import tiny
from rekindle._src.core import memory
from rekindle._src.core.config import EngineConfig
from rekindle._src.drafts.plan import reads_own_head
from rekindle._src.models.loading import kept_weights, stored
from rekindle._src.models.loading.hub import on_disk
from rekindle._src.models.loading.hugepages import PrefaultArena
from rekindle._src.models.loading.kept_weights import MappedFile, MappedWeights, WeightForm
from rekindle._src.models.loading.rope_override import with_scaling
from rekindle._src.models.loading.stored import StoredCheckpoint

MOST = 1 << 30  # bytes of weights; larger files are read by several threads later, with a progress bar
LEAST = 32 << 20  # bytes of weights that memory is touched for


class HeadStart:
    """A thread that begins at once. Its errors are ignored: opening the model afterwards meets them again."""

    def __init__(self, model: str | Path, config: EngineConfig) -> None:
        self.seen: StoredCheckpoint | None = None  # the checkpoint as it lies on disk; None if not examined
        self._kept: Path | None = None
        self._mapped: MappedFile | None = None  # the weights that are kept there
        self._brought: MappedWeights | None = None
        self.memory: PrefaultArena | None = None  # for weights that are not kept
        self._lock = threading.Lock()  # of the two below
        self._read = self._over = False
        self._thread: threading.Thread | None = None
        # In this thread: in the other one, each file access would wait for the GIL while JAX is imported.
        with contextlib.suppress(Exception):
            folder = tiny.located(model)
            if on_disk(folder) is not None:  # nothing is downloaded before JAX is there
                self._look(folder, config)
            if self._mapped is not None:
                name, arguments = "rekindle head start", (self._mapped,)
                thread = threading.Thread(target=self._bring, args=arguments, name=name, daemon=True)
                thread.start()
                self._thread = thread

    def weights(self, kept: Path) -> MappedWeights | None:
        """Return the weights kept at `kept`, if they were read; None otherwise. The caller releases them."""
        if self._thread is not None:
            self._thread.join()
        if kept != self._kept or self._brought is None:
            return None
        brought, self._brought, self._mapped = self._brought, None, None
        return brought

    def close(self) -> None:
        """Release weights that were not taken, now or when the thread has read them."""
        with self._lock:
            self._over = True
            release = self._read or self._thread is None
        if release:
            self._release()
        if self.memory is not None:
            self.memory.close()

    def _release(self) -> None:
        mapped, self._mapped, self._brought = self._mapped, None, None
        if mapped is not None:
            mapped.release()

    def _look(self, folder: str | Path, config: EngineConfig) -> None:
        if not (os.environ.get("JAX_PLATFORMS") or "cpu").startswith("cpu"):
            return
        checkpoint = stored.look(folder, config.projector, drafts=reads_own_head(config))
        checkpoint = self.seen = with_scaling(checkpoint, config.rope_scaling)
        form = WeightForm(config.dtype, config.quantize)
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        for native in (True, False):
            unpacked = not native and kept_weights.has_room(checkpoint, dtype, config.device_memory)
            options = form.slot_options(checkpoint, resolved=dtype, unpacked=unpacked)
            self._kept = kept_weights.place(
                config.cache_folder, checkpoint.fingerprint, *options,
                platform="cpu", native=native, digest=kept_weights.sources(),
            )  # fmt: skip
            self._mapped = kept_weights.find(self._kept, MOST)
            if self._mapped is not None or self._kept.exists():
                return
        size = _size(checkpoint)
        if config.quantize is None and LEAST <= size <= MOST and (os.cpu_count() or 1) > 1 and memory.fits(size):
            self.memory = PrefaultArena(size)

    def _bring(self, mapped: MappedFile) -> None:
        with contextlib.suppress(Exception):
            self._brought = kept_weights.bring(mapped)
        with self._lock:
            self._read = True
            release = self._over
        if release:
            self._release()


def _size(checkpoint: StoredCheckpoint) -> int:
    """Return about how many bytes the weights take: at most two for each number."""
    entries = (entry for header in checkpoint.headers for entry in header.entries)
    return sum(min(entry.nbytes, 2 * math.prod(entry.shape)) for entry in entries)
