"""A checkpoint as a shelf's keeper changes it: planned, opened, put to sleep, woken and closed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle._src.capabilities.additions import split
from rekindle._src.core import memory
from rekindle._src.core.config import EngineConfig
from rekindle._src.dispatch.threads import capture_contexts
from rekindle._src.opening.open_request import OpenRequest
from rekindle._src.session import pausing
from rekindle._src.session.opening import open
from rekindle._src.session.session import Session, client_of

if TYPE_CHECKING:
    from rekindle._src.models.loading.load_progress import LoadProgress

SHARE = 0.9  # of a device's memory, for weights and pages


class CheckpointModel:
    """A model that is opened from a checkpoint with the options of `rekindle.open`."""

    def __init__(self, model: str | Path, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, dict(options)
        self._request()  # refuses wrong options now
        self._fitted: dict[str, Any] = {}  # options that make it fit the shelf
        self._contexts = capture_contexts()
        self._read: LoadProgress | None = None
        self._begun = False  # True once it may hold memory
        self.session: Session | None = None

    @property
    def source(self) -> str:
        """The name or folder that it is opened from."""
        return str(self._model)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters. While it is not loaded, they are the adapters of its options."""
        session = self.session
        return tuple(self._options.get("adapters") or ()) if session is None else session.adapters

    def _request(self, **more: Any) -> OpenRequest:
        additions, others = split({**self._options, **more})
        processors = others.pop("processors", None)
        others.pop("progress", None)
        config = EngineConfig.of(others)
        return OpenRequest.of(
            self._model, config, processors=processors, additions=additions, progress=None, given_up=lambda: False
        )

    def plan(self, memory: int | None) -> int:
        """Return the bytes that it takes. Its pages take what its weights leave of `memory`, unless options say."""
        from rekindle._src.opening.sizes import planned_memory  # imports JAX

        with self._contexts():
            planned = planned_memory(self._request())
            sized = any(self._options.get(name) is not None for name in ("device_memory", "device_pages"))
            if memory is not None and planned.total > memory > planned.weights and not sized:
                self._fitted = {"device_memory": memory - planned.weights}
                planned = planned_memory(self._request(**self._fitted))
        return planned.total

    async def open(self) -> None:
        told: Any = self._options.get("progress")

        def report(progress: LoadProgress) -> None:
            self._read = progress
            if told is not None:
                told(progress)

        self._begun = True
        try:
            with self._contexts():
                opening = open(self._model, **{**self._options, **self._fitted, "progress": report})
            self.session = await opening
        finally:
            self._read = None

    async def sleep(self, on_request: Callable[[], object], on_wait: Callable[[], object]) -> None:
        import jax

        # A CPU computes in host memory, so that only weights which are read again give any back.
        session, drop = self._opened, jax.default_backend() == "cpu"
        await pausing.sleep(client_of(session), repr(session), drop, on_request, on_wait)
        gc.collect(0)  # JAX lets go of arrays that were deleted
        memory.give_back()

    async def wake(self) -> None:
        await self._opened.wake()

    async def close(self) -> None:
        session, self.session = self.session, None
        begun, self._begun = self._begun, False
        try:
            if session is not None:
                await session.aclose()
        finally:
            del session
            if begun:
                gc.collect()  # programs are parts of cycles, and so are weights of an opening that failed
                memory.give_back()

    # Other threads read these while the keeper's sets the session to None.

    @property
    def ended(self) -> bool:
        session = self.session
        return session is not None and session.closed

    @property
    def live(self) -> int:
        session = self.session
        if session is None:
            return 0
        client = client_of(session)
        return client.host.limiter.inside + client.trainings

    @property
    def admitted(self) -> int:
        session = self.session
        return 0 if session is None else client_of(session).host.limiter.admitted

    @property
    def progress(self) -> str:
        read = self._read
        return "" if read is None else f"weights {read.share}"

    @property
    def _opened(self) -> Session:
        assert self.session is not None, "it is open"
        return self.session


def default_memory() -> int | None:
    """Return the memory for all models: three quarters of a CPU's available memory, or most of another device."""
    import jax

    if jax.default_backend() == "cpu":
        free = memory.available()
        return None if free is None else int(free * memory.SHARE)
    limits = [int((device.memory_stats() or {}).get("bytes_limit") or 0) for device in jax.local_devices()]
    return int(min(limits) * SHARE) or None
