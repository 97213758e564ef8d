"""`rekindle.open` and `open_sync`: everything slow about opening happens in the session's own threads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.gc_pause import gc_paused
from rekindle._src.dispatch.device import capture_contexts
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.messages import Engine
from rekindle._src.session.call import Call
from rekindle._src.session.session import Session

if TYPE_CHECKING:
    from rekindle._src.models.base import LoadedModel


class Opening(Call[Session]):
    """`session = await rekindle.open(...)`, or `async with rekindle.open(...) as session`."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        # Captured here, in the caller's thread and inside its `with` blocks.
        self._contexts = capture_contexts()
        self._session: Session | None = None

    async def _result(self) -> Session:
        if self._session is None:
            host = Host(self._build, contexts=self._contexts)
            host.start()
            try:
                self._session = Session.attached(host, await host.opened.get())
            except BaseException as error:
                host.close()  # whoever interrupts does not wait for a compilation to end
                error.__traceback__ = None if not isinstance(error, Exception) else error.__traceback__
                raise
        return self._session

    def __getattr__(self, name: str) -> Any:
        where = f"rekindle.open(…) has no {name!r}"
        if hasattr(Session, name):
            where += ": it is not open yet. Write session = await rekindle.open(…), or session = rekindle.open_sync(…)"
        raise AttributeError(where)

    def __repr__(self) -> str:
        return "<rekindle.open: ready>" if self._session else "<rekindle.open: write session = await rekindle.open(…)>"

    async def __aenter__(self) -> Session:
        return await self._result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.aclose()


def open(
    model: str | Path | LoadedModel = "tiny",
    *,
    processors: Any = (),
    progress: Callable[[Any], None] | None = None,
    **options: Any,
) -> Opening:
    """A session over a local Hugging Face folder, a hub id, or "tiny"; `await` it or use it with `async with`.

    Options are the fields of `EngineConfig`. `processors` are `LogitsProcessor`s that requests may name, `progress` is
    called in another thread with how much of the weights was read.
    """
    return Opening(functools.partial(_build, model, EngineConfig.of(options), tuple(processors), progress))


def open_sync(
    model: str | Path | LoadedModel = "tiny",
    *,
    processors: Any = (),
    progress: Callable[[Any], None] | None = None,
    **options: Any,
) -> Session:
    """`open` for code without an event loop; use it with `with`."""
    return open(model, processors=processors, progress=progress, **options).result_sync()


def _build(model: Any, config: EngineConfig, processors: Any, progress: Any) -> Engine:
    # JAX is imported on the session's thread: `import rekindle` and the caller's loop stay quick.
    with gc_paused(stays="jax" not in sys.modules):
        from rekindle._src.programs.processors import check_processors
        from rekindle._src.session.builder import OpenRequest, build

    return build(OpenRequest(model, config, check_processors(processors), progress, capture_contexts()))
