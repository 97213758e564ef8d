"""The encoder of a session's pictures: its programs, and its weights, which a sleeping session gives back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.capabilities.pictures.encoding_programs import Cancellation, EncodingPrograms
from rekindle._src.capabilities.pictures.reading import EncoderPlan
from rekindle._src.images.processor import PicturePatches
from rekindle._src.models.vision.inputs import ImagePatches, PatchGrid
from rekindle._src.models.vision.weights import read_tower
from rekindle._src.programs.plan import ProgramPlan
from rekindle._src.programs.store import ExecutableStore, ProgramStore, digest
from rekindle._src.programs.warming import finish_at_exit

Rows = NDArray[Any]  # [1 + levels, tokens, E]
_LOOK_SECONDS = 0.25  # how often a picture that waits for a sleeping session looks whether it is still wanted


class PictureEncoder:
    """Encodes pictures, one at a time. Its weights are read when the first one comes, and again after each sleep.

    Of a mesh, it has one device. Methods may be called in any thread. A picture that is being encoded when the session
    falls asleep is begun anew when it wakes.
    """

    def __init__(self, plan: EncoderPlan, programs: EncodingPrograms, device: jax.Device | None = None) -> None:
        self._plan, self.programs, self._device = plan, programs, device  # None: the default one
        self._leaves: tuple[Any, ...] = ()
        self._busy = threading.Lock()
        self._change = threading.Condition()  # of the two below
        self._asleep = self._closed = False
        self._making: threading.Thread | None = None

    @classmethod
    def open(cls, plan: EncoderPlan, programs: ProgramPlan) -> PictureEncoder:
        """Return the encoder of a session; its programs are stored with the programs of the session's steps."""
        kept = ExecutableStore(programs.config.cache_folder / "programs")
        key = digest({**programs.fields, "pictures": repr(plan.tower.graph)})
        name = programs.name or programs.model.model_type
        device = next(iter(programs.placement.devices), None)
        store = ProgramStore(kept, name, key, () if device is None else (device,))
        return cls(plan, EncodingPrograms(plan.tower, store), device)

    def make_ahead(self, precompile: str) -> None:
        """Make the programs as the option `precompile` says: before this returns, in a thread, or with a picture."""
        if precompile == "all":
            self._make()
        elif precompile == "background":
            self._making = threading.Thread(target=self._make, name="rekindle warming pictures", daemon=False)
            finish_at_exit(self)
            self._making.start()

    def _make(self) -> None:
        view = self._plan.processor.plan(512, 512).views[0]
        with self._placed():
            self.programs.make(PatchGrid(view.rows, view.columns), lambda: self._closed)

    def __call__(self, patches: PicturePatches, wanted: Callable[[], bool]) -> Rows:
        """Return the rows of a picture [1 + levels, tokens, E]. Raise `Cancellation` once it is not `wanted`."""
        images = [ImagePatches(part, PatchGrid(view.rows, view.columns)) for view, part in patches.views()]
        while True:
            with self._change:
                while not self._change.wait_for(lambda: self._closed or not self._asleep, timeout=_LOOK_SECONDS):
                    if not wanted():
                        raise Cancellation
            with self._busy:
                try:
                    return self._encoded(images, lambda: wanted() and not (self._closed or self._asleep))
                except Cancellation:
                    if self._closed or not wanted():
                        raise

    def _encoded(self, images: list[ImagePatches], wanted: Callable[[], bool]) -> Rows:
        if not self._leaves and wanted():
            self._leaves = read_tower(self._plan.tower, self._plan.tensors, place=self._place)
        with self._placed():
            return self.programs.encode(self._leaves, images, wanted)

    def _place(self, path: str, array: NDArray[Any]) -> jax.Array:
        return jax.device_put(array, self._device, may_alias=True)

    def _placed(self) -> AbstractContextManager[object]:
        return nullcontext() if self._device is None else jax.default_device(self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights on the device."""
        return sum(leaf.nbytes for leaf in self._leaves)

    @property
    def token_bytes(self) -> int:
        """Bytes of the rows of one token, those for deeper layers included."""
        graph = self._plan.tower.graph
        return (1 + len(graph.config.deepstack)) * graph.config.out_size * np.dtype(graph.precision.stream).itemsize

    def sleep(self) -> int:
        """Give the memory of its weights back; the step that runs ends before. Return their bytes."""
        self._say("_asleep", True)
        return self._let_go()

    def wake(self) -> None:
        """Go on. Weights are read when the next picture comes."""
        self._say("_asleep", False)

    def close(self) -> None:
        """Encode nothing more, and give all memory back."""
        self._say("_closed", True)
        self._let_go()

    def stop(self, timeout: float | None = 0.5) -> None:
        """Make no further program; wait up to `timeout` seconds for the one that is being compiled."""
        self._say("_closed", True)
        if self._making is not None:
            self._making.join(timeout)

    def flush(self) -> None:
        """Programs are stored as soon as they are made."""

    def _say(self, name: str, value: bool) -> None:
        with self._change:
            setattr(self, name, value)
            self._change.notify_all()

    def _let_go(self) -> int:
        with self._busy:
            freed = self.nbytes
            for leaf in self._leaves:
                leaf.delete()
            self._leaves = ()
        return freed
