"""What a process does for the model that it opens first while JAX is being imported, in a thread that leaves the GIL.

The thread reads and checks the weights that an earlier process has laid out. Where these lie follows from the
checkpoint, the options and the platform; that this will be the CPU is a guess.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from rekindle import tiny
from rekindle._src.core.config import EngineConfig, cache_folder
from rekindle._src.models.loading import kept_file, kept_place, stored
from rekindle._src.models.loading.kept_file import Brought, Mapped
from rekindle._src.models.loading.stored import Stored

MOST = 1 << 30  # bytes of weights; more are read by several threads, and a bar tells how far they are


class HeadStart:
    """Begins at once. What goes wrong is left to whoever opens the model afterwards, and meets it again."""

    def __init__(self, model: str | Path, config: EngineConfig) -> None:
        self.seen: Stored | None = None  # the checkpoint as it lies on disk, if it was looked at
        self._kept: Path | None = None
        self._mapped: Mapped | None = None  # what is kept there
        self._brought: Brought | None = None
        self._lock = threading.Lock()  # of the two below
        self._read = self._over = False
        self._thread: threading.Thread | None = None
        # In this thread: in the other one, each look at a file would wait for the GIL while JAX is imported.
        with contextlib.suppress(Exception):
            self._look(Path(tiny.folder() if model == "tiny" else model).expanduser(), config)
            if self._mapped is not None:
                name, arguments = "rekindle head start", (self._mapped,)
                thread = threading.Thread(target=self._bring, args=arguments, name=name, daemon=True)
                thread.start()
                self._thread = thread

    def weights(self, kept: Path) -> Brought | None:
        """The weights that are kept there, if they were brought; they are the caller's to release."""
        if self._thread is not None:
            self._thread.join()
        if kept != self._kept or self._brought is None:
            return None
        brought, self._brought, self._mapped = self._brought, None, None
        return brought

    def close(self) -> None:
        """Release what was not taken, now or when the thread has read it."""
        with self._lock:
            self._over = True
            release = self._read or self._thread is None
        if release:
            self._release()

    def _release(self) -> None:
        mapped, self._mapped, self._brought = self._mapped, None, None
        if mapped is not None:
            mapped.release()

    def _look(self, folder: Path, config: EngineConfig) -> None:
        if not folder.exists():  # nothing is downloaded before JAX is there
            return
        if not (os.environ.get("JAX_PLATFORMS") or "cpu").startswith("cpu"):
            return
        seen = self.seen = stored.look(folder)
        resolved = "bfloat16" if config.dtype == "auto" else config.dtype
        for native in (True, False):
            unpacked = not native and kept_place.has_room(seen, resolved, config.device_memory)
            asked = kept_place.options(
                seen, config.dtype, config.quantize, True, False, resolved=resolved, unpacked=unpacked
            )
            self._kept = kept_place.place(
                cache_folder(config.cache_dir), seen.fingerprint, *asked,
                platform="cpu", native=native, digest=kept_place.sources(),
            )  # fmt: skip
            self._mapped = kept_file.find(self._kept, MOST)
            if self._mapped is not None:
                return

    def _bring(self, mapped: Mapped) -> None:
        with contextlib.suppress(Exception):
            self._brought = kept_file.bring(mapped)
        with self._lock:
            self._read = True
            release = self._over
        if release:
            self._release()
