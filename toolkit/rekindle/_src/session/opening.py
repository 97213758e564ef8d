"""`rekindle.open` and `open_sync`. Everything slow about opening happens in the session's own threads."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from rekindle._src.core.activity import Activity
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.gc_pause import gc_paused
from rekindle._src.core.interrupts import interrupted
from rekindle._src.dispatch import forked
from rekindle._src.dispatch.device import capture_contexts
from rekindle._src.dispatch.host import Host
from rekindle._src.dispatch.messages import Engine
from rekindle._src.session.call import Call
from rekindle._src.session.opening_progress import OpeningProgress
from rekindle._src.session.signatures import takes_options
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from typing import Unpack

    from rekindle._src.core.options import OpenOptions
    from rekindle._src.models.base import LoadedModel
    from rekindle._src.models.loading.load_progress import LoadProgress
    from rekindle._src.programs.processors import LogitsProcessor
    from rekindle._src.session.head_start import HeadStart
    from rekindle._src.session.session import Session


class Opening(Call["Session"]):
    """`session = await rekindle.open(...)`, or `async with rekindle.open(...) as session`."""

    def __init__(
        self, build: Callable[[], Engine], progress: Activity | None = None, given_up: threading.Event | None = None
    ) -> None:
        self._build, self._progress, self._given_up = build, progress, given_up or threading.Event()
        # Captured here, in the caller's thread and inside its `with` blocks.
        self._contexts = capture_contexts()
        self._session: Session | None = None

    async def _result(self) -> Session:
        if self._session is None:
            host = Host(self._build, contexts=self._contexts)
            host.start()
            try:
                with self._progress or contextlib.nullcontext():
                    engine = await host.opened.get()
                    self._session = _session().attached(host, engine)
            except BaseException as error:
                self._given_up.set()
                host.close()  # an interrupt does not wait until a compilation ends
                interrupted(error, "stopped while it opened")
                raise
        return self._session

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report its use

        def __getattr__(self, name: str) -> Any:
            message = f"rekindle.open(…) has no {name!r}"
            if hasattr(_session(), name):
                message += (
                    ": it is not open yet. Write session = await rekindle.open(…), or session = rekindle.open_sync(…)"
                )
            raise AttributeError(message)

        def __enter__(self) -> NoReturn:
            raise TypeError(
                "rekindle.open(…) opens asynchronously: write `async with rekindle.open(…) as session:`, or "
                "`with rekindle.open_sync(…) as session:` in code without an event loop"
            )

    def __repr__(self) -> str:
        return "<rekindle.open: ready>" if self._session else "<rekindle.open: write session = await rekindle.open(…)>"

    async def __aenter__(self) -> Session:
        return await self._result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.aclose()


@takes_options(EngineConfig)
def open(
    model: str | Path | LoadedModel = "tiny",
    *,
    processors: Sequence[LogitsProcessor] | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    **options: Unpack[OpenOptions],
) -> Opening:
    """Open a model: `session = await rekindle.open(model)`, or `async with rekindle.open(model) as session`.

    `model` is a local Hugging Face folder, a GGUF file, a hub id, a model that `rekindle.models` loaded, or "tiny" for
    the embedded one. `processors` are `LogitsProcessor`s that requests may name. `progress` is called in another thread
    with the share of the weights that was read.
    """
    forked.opening()  # before an event loop is asked for anything
    config, shown, given_up = EngineConfig.of(options), OpeningProgress(model), threading.Event()
    build = functools.partial(_build, model, config, _listed(processors), progress, given_up, shown)
    first = "jax" not in sys.modules  # its import takes a second, in which other threads hardly run
    return Opening(build, Activity(shown.look, quiet=config.quiet, at_once=first), given_up)


@takes_options(EngineConfig)
def open_sync(
    model: str | Path | LoadedModel = "tiny",
    *,
    processors: Sequence[LogitsProcessor] | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    **options: Unpack[OpenOptions],
) -> Session:
    """Open a model in code without an event loop: `with rekindle.open_sync(model) as session`. See `open`."""
    return open(model, processors=processors, progress=progress, **options).result_sync()


def _listed(processors: Any) -> tuple[Any, ...]:
    if processors is None:
        return ()
    try:
        return tuple(processors)
    except TypeError:
        fix = "Pass a list of rekindle.LogitsProcessor(function, name='…')"
        raise ConfigError("processors", processors, "is not a list", fix) from None


def _session() -> type[Session]:
    """Return the class. Its modules import slowly, so a thread of the opening session imports them beforehand."""
    from rekindle._src.session.session import Session

    return Session


def _build(
    model: Any,
    config: EngineConfig,
    processors: Any,
    progress: Any,
    given_up: threading.Event,
    shown: OpeningProgress,
) -> Engine:
    # Modules are imported on the session's thread: `import rekindle` and the caller's loop stay quick.
    first, ahead = "jax" not in sys.modules, None
    try:
        with gc_paused(stays=first):
            if first:
                ahead = _head_start(model, config)
            _session()  # before JAX, whose library is loaded meanwhile
            from rekindle._src.programs.processors import check_processors
            from rekindle._src.session.builder import build
            from rekindle._src.session.parts import OpenRequest

        checked = check_processors(processors)
        return build(OpenRequest(model, config, checked, progress, capture_contexts(), given_up.is_set, shown, ahead))
    finally:
        if ahead is not None:
            ahead.close()


def _head_start(model: Any, config: EngineConfig) -> HeadStart | None:
    """Begin the work on a checkpoint that needs no JAX. Return None where several devices share a model."""
    if config.processes > 1 or config.mesh is not None or not isinstance(model, str | Path):
        return None
    from rekindle._src.session.head_start import HeadStart

    return HeadStart(model, config)
