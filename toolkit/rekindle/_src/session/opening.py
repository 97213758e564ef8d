"""`rekindle.open` and `open_sync`, and the call that they return. `opening/entry.py` does the work on the session's
thread."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from rekindle._src.calls.call import Call
from rekindle._src.capabilities import capabilities_of
from rekindle._src.capabilities.additions import Additions, split
from rekindle._src.core.activity import Activity, in_notebook
from rekindle._src.core.cell_errors import explain_cell_errors
from rekindle._src.core.config import EngineConfig, OpenOptions
from rekindle._src.core.options import takes_options
from rekindle._src.core.own_failure import interrupted
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.host import Host, note_opening
from rekindle._src.dispatch.threads import capture_contexts
from rekindle._src.opening.entry import open_front
from rekindle._src.opening.open_request import OpenRequest
from rekindle.errors import ConfigError
from rekindle_kernels.private_files import KINDS

if TYPE_CHECKING:
    from rekindle._src.models.base import LoadedModel
    from rekindle._src.models.loading.load_progress import LoadProgress
    from rekindle._src.programs.user_functions import LogitsProcessor
    from rekindle._src.session.session import Session

log = logging.getLogger("rekindle.cache")
OTHER_MEMORY = 4 << 30  # bytes that a cache folder is meant to hold in addition to pages and snapshots
LOOK_AFTER = 2.0  # seconds after a session has opened: its first text comes before a look at the size of the cache


class SessionOptions(Additions, OpenOptions, total=False):
    """Keyword options of `open`: of the session, and the arguments of capabilities."""


class Opening(Call["Session"]):
    """`session = await rekindle.open(...)`, or `async with rekindle.open(...) as session`."""

    def __init__(
        self, build: Callable[[], Front], progress: Activity | None = None, given_up: threading.Event | None = None
    ) -> None:
        self._build, self._progress, self._given_up = build, progress, given_up or threading.Event()
        # Captured here, in the caller's thread and inside its `with` blocks.
        self._contexts = capture_contexts()
        self._session: Session | None = None

    async def _result(self) -> Session:
        if self._session is None:
            host = Host(self._build, capabilities_of, contexts=self._contexts)
            host.start()
            try:
                with self._progress or contextlib.nullcontext():
                    front = await host.opened.get()
                    self._session = _session().attached(host, front)
                if in_notebook():
                    look = threading.Timer(LOOK_AFTER, say_if_large, [front.config])
                    look.daemon = True
                    look.start()
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

    async def __aexit__(self, *details: object) -> None:
        if self._session is not None:
            await self._session.aclose()


@takes_options(EngineConfig, also=Additions)
def open(
    model: str | Path | LoadedModel = "tiny",
    *,
    processors: Sequence[LogitsProcessor] | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    **options: Unpack[SessionOptions],
) -> Opening:
    """Open a model: `session = await rekindle.open(model)`, or `async with rekindle.open(model) as session`.

    `model` is a local Hugging Face folder, a GGUF file, a hub id, a name of `rekindle.local_models()` such as
    "ollama:qwen3:0.6b", a model that `rekindle.models` loaded, "tiny" for the embedded one, or "tiny-vision" for the
    embedded one that reads pictures. `processors` are `LogitsProcessor`s that requests may name, `taps` are `Tap`s, and
    `steering` maps names to `Steer`s, lists of them, or safetensors files of vectors. `adapters` are LoRAs by name,
    each as `session.load_adapter` takes it; one more, `merge`, is added to the weights, which have to be floats, and
    then costs nothing. `progress` is called in another thread with the share of the weights that was read.
    """
    if not (isinstance(model, str | os.PathLike) or hasattr(model, "leaves")):  # a LoadedModel's
        fix = "Pass a folder, a GGUF file, a hub id, 'tiny', or the result of rekindle.models.load"
        raise ConfigError("model", model, "is not a model", fix)
    if isinstance(model, str) and not model.strip():
        raise ConfigError("model", model, "is an empty name", "Pass a folder, a GGUF file, a hub id, or 'tiny'")
    note_opening()  # before an event loop is asked for anything
    explain_cell_errors()
    given_up = threading.Event()
    additions, others = split(options)
    request = OpenRequest.of(
        model,
        EngineConfig.of(others),
        processors=processors,
        additions=additions,
        progress=progress,
        given_up=given_up.is_set,
    )
    build = functools.partial(open_front, request, _session)
    first = "jax" not in sys.modules  # its import takes a second, and other threads hardly run meanwhile
    return Opening(build, Activity(request.shown.look, quiet=request.config.quiet, at_once=first), given_up)


@takes_options(EngineConfig, also=Additions)
def open_sync(
    model: str | Path | LoadedModel = "tiny",
    *,
    processors: Sequence[LogitsProcessor] | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    **options: Unpack[SessionOptions],
) -> Session:
    """Open a model in code without an event loop: `with rekindle.open_sync(model) as session`. See `open`."""
    return open(
        model,
        processors=processors,
        progress=progress,
        **options,
    ).result_sync()


def _session() -> type[Session]:
    """Return the class. Its modules import slowly, so a thread of the opening session imports them beforehand."""
    from rekindle._src.session.session import Session

    return Session


_said: set[Path] = set()  # cache folders that this process has said to be large


def say_if_large(config: EngineConfig) -> None:
    """Log that the cache folder has grown beyond its bound, once in a process, with the commands that show and trim it.

    Each kind of entry has a bound of its own. For weights it is a number of models, which differ in size, so the folder
    as a whole is looked at: `disk_memory` for pages and snapshots, and `OTHER_MEMORY` for everything else.
    """
    folder = config.cache_folder
    if folder in _said:
        return
    size, bound = size_of_cache(folder), config.disk_memory + OTHER_MEMORY
    if size > bound:
        _said.add(folder)
        log.warning(
            "the cache %s has grown to %.1f GiB, beyond its bound of %.1f GiB: `rekindle cache ls` shows it by model, "
            "`rekindle cache rm NAME` removes a model's, `rekindle cache prune --to %.0fGiB` what was used longest ago",
            folder, size / 2**30, bound / 2**30, max(1, bound >> 30),
        )  # fmt: skip


def size_of_cache(folder: Path) -> int:
    """Return the bytes of the files that rekindle keeps in a cache folder. Links are not followed."""
    size = 0
    for kind in KINDS:
        for parent, _, names in os.walk(folder / kind):
            for name in names:
                with contextlib.suppress(OSError):  # another process removed it meanwhile
                    size += os.lstat(os.path.join(parent, name)).st_size
    return size
