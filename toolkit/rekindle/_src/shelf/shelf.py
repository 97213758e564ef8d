"""`rekindle.shelf`: several models in one process, by name, which are loaded when a request needs them."""

from __future__ import annotations

import atexit
import dataclasses
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from rekindle._src.calls.call import Call, Once
from rekindle._src.core import words
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.drawable import Drawable, Record
from rekindle._src.core.names import checked_name, name_of_model
from rekindle._src.core.options import Size, takes_options
from rekindle._src.dispatch.threads import run_sync
from rekindle._src.session.opening import SessionOptions
from rekindle._src.session.session import Session
from rekindle._src.shelf.checkpoint_model import CheckpointModel, default_memory
from rekindle._src.shelf.keeper import Keeper, KeptModel, Lease, Waiter
from rekindle._src.shelf.policy import ShelfLimits
from rekindle._src.views import html
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.serve.server import Server

MOST_MODELS = 1_000
LONGEST_IDLE = 30 * 86_400.0  # seconds
EXIT_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ShelfModelStats(Record):
    """The figures of one model of a shelf."""

    name: str
    state: str  # unloaded, loading, loaded, unloading or sleeping
    device_bytes: int | None  # of weights and pages while it is loaded; None until its first request
    users: int  # requests and `use` blocks that have it now
    waiting: int  # requests that wait for it
    loads: int  # times that it was opened
    wakes: int  # times that it was woken
    waits: int  # requests that had to wait for it
    mean_wait: float  # seconds, of those
    longest_wait: float

    _seconds = ("mean_wait", "longest_wait")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ShelfStats(Record):
    """A snapshot of a shelf."""

    models: tuple[ShelfModelStats, ...]
    memory: int | None  # bytes that loaded models may take; None: no limit, or not known before the first request
    max_loaded: int | None
    idle_unload: float | None  # seconds

    @property
    def device_bytes(self) -> int:
        """Bytes of weights and pages of the models that are loaded."""
        return sum(model.device_bytes or 0 for model in self.models if model.state not in ("unloaded", "sleeping"))

    def __repr__(self) -> str:
        return f"<ShelfStats: {', '.join(f'{model.name} {model.state}' for model in self.models)}>"

    def _repr_html_(self) -> str:
        bound = "" if self.memory is None else f" of {words.mebibytes(self.memory)}"
        head = html.line(f"{words.mebibytes(self.device_bytes)}{bound} of weights and pages")
        rows = [
            (
                model.name,
                model.state,
                "" if model.device_bytes is None else words.mebibytes(model.device_bytes),
                model.users,
                model.waiting,
                model.loads,
                model.wakes,
                model.waits,
                words.seconds(model.mean_wait) if model.waits else "",
                words.seconds(model.longest_wait) if model.waits else "",
            )
            for model in self.models
        ]
        names = ["model", "state", "memory", "in use", "waiting", "loads", "wakes", "waits", "mean wait", "longest"]
        return str(html.block(head, html.table(names, rows), title="rekindle shelf"))


class Use(Drawable):
    """`async with shelf["name"].use() as session`, or `with`: the model is loaded, and does not sleep in the block."""

    def __init__(self, shelf: Shelf, keeper: Keeper, name: str) -> None:
        self._shelf, self._keeper, self._name = shelf, keeper, name  # a shelf without references is closed
        self._leases: list[Lease] = []

    async def __aenter__(self) -> Session:
        lease = await self._keeper.lease(self._name)
        self._leases.append(lease)
        session: Session = lease.session
        return session

    async def __aexit__(self, *details: object) -> None:
        self._leases.pop().release()

    def __enter__(self) -> Session:
        return run_sync(self.__aenter__())

    def __exit__(self, *details: object) -> None:
        self._leases.pop().release()

    def __repr__(self) -> str:
        return f"<Use of {self._name!r}: write async with shelf[{self._name!r}].use() as session>"


class ShelfModel:
    """One model of a shelf: `shelf["name"]`."""

    def __init__(self, shelf: Shelf, keeper: Keeper, entry: KeptModel, model: CheckpointModel) -> None:
        self._shelf = shelf  # one without references is closed: a server may have its models alone
        self._keeper, self._entry, self._model = keeper, entry, model

    @property
    def name(self) -> str:
        return self._entry.row.name

    @property
    def model(self) -> str:
        """The name or folder that it is opened from."""
        return self._model.source

    @property
    def state(self) -> str:
        """One of "unloaded", "loading", "loaded", "unloading" and "sleeping"."""
        return str(self._entry.row.state)

    @property
    def closed(self) -> bool:
        """True once the shelf is closed."""
        return self._keeper.closed

    @property
    def progress(self) -> str:
        """How far its loading is, in words; empty if there is nothing to say."""
        return self._model.progress

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        return self._model.adapters

    @property
    def open_session(self) -> Session | None:
        """Its session, awake or asleep; None while it is unloaded."""
        return self._model.session

    def session(self) -> Call[Session]:
        """Await it for the model's session, loaded. The session may sleep later, and wakes at its next request."""
        return Once(self._session, name="session")

    async def _session(self) -> Session:
        async with self.use() as session:
            return session

    def use(self) -> Use:
        """Use the session within a block: `async with shelf["name"].use() as session`. It does not sleep meanwhile.

        A block within a block is refused where there is no room for both models, and so is awaiting a request of
        another model's session that sleeps: it would wait for the end of the block.
        """
        return Use(self._shelf, self._keeper, self.name)

    def unload(self) -> Call[None]:
        """Await it to close the model's session, once no request uses it. The next request loads the model again."""
        return Once(self._keeper.unload, self.name, name="unload")

    # For servers.

    def lease_now(self) -> Lease | None:
        """Return a lease of the model if a request may use it at once, or None."""
        return self._keeper.lease_now(self.name)

    def wait(self) -> Waiter:
        """Stand in line for a lease."""
        return self._keeper.wait(self.name)

    async def unload_in_turn(self) -> None:
        """Unload the model once no request uses it and it has stayed for as long as its loading took."""
        await self._keeper.unload(self.name, stay=True)

    def stats(self) -> ShelfModelStats:
        """Return a snapshot of its figures."""
        entry, waits = self._entry, self._entry.waits
        return ShelfModelStats(
            name=self.name,
            state=self.state,
            device_bytes=entry.row.nbytes,
            users=max(len(entry.leases), self._model.live),
            waiting=len(entry.line),
            loads=waits.loads,
            wakes=waits.wakes,
            waits=waits.count,
            mean_wait=waits.seconds / waits.count if waits.count else 0.0,
            longest_wait=waits.longest,
        )

    def __repr__(self) -> str:
        return f"<ShelfModel {self.name}: {self.state}>"

    def _repr_html_(self) -> str:
        return str(html.line(self.name, self.state, self.progress))


class Shelf(Mapping[str, ShelfModel]):
    """Models by their names, which `rekindle.shelf` returns. Close it with `aclose`, or with an `async with` block.

    It takes requests from any number of threads and event loops.
    """

    def __init__(self, models: Mapping[str, CheckpointModel], limits: ShelfLimits) -> None:
        self._keeper = Keeper(models, limits, default_memory=default_memory)
        entries = self._keeper.entries
        self._models = {name: ShelfModel(self, self._keeper, entries[name], model) for name, model in models.items()}
        self._servers: list[Server] = []
        _keepers.add(self._keeper)
        if not _registered:
            _registered.append(True)
            atexit.register(_close_all)
        weakref.finalize(self, self._keeper.close).atexit = False

    def __getitem__(self, name: str) -> ShelfModel:
        """Return a model. Raise `KeyError`, with the names that there are, for an unknown one."""
        model = self._models.get(name)
        if model is None:
            raise KeyError(f"{name!r} is not on the shelf. Use one of {', '.join(map(repr, self._models))}")
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return self._keeper.closed

    def stats(self) -> ShelfStats:
        """Return a snapshot: the state of each model, its memory, and how long requests waited for it."""
        limits = self._keeper.limits
        return ShelfStats(tuple(model.stats() for model in self._models.values()), *limits)

    def unload(self) -> Call[None]:
        """Await it to unload every model, each once no request uses it."""
        return Once(self._unload, name="unload")

    async def _unload(self) -> None:
        for name in self._models:
            await self._keeper.unload(name)

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | Sequence[str] | None = None,
        strict: bool = False,
        cors_origins: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        max_connections: int | None = None,
    ) -> Call[Server]:
        """Await it to serve all models over HTTP; a request loads the one that it names. See `session.serve`."""
        options = {name: value for name, value in locals().items() if name != "self"}
        return Once(self._serve, options, name="serve")

    async def _serve(self, options: Mapping[str, Any]) -> Server:
        from rekindle._src.serve.server import Server

        self._keeper.check()
        server = await Server(self, **options).start()
        self._servers.append(server)
        return server

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Close its servers and sessions. Loading is given up, and requests that wait get `SessionClosed`."""
        for server in self._servers:
            await server.aclose(drain=drain)
        self._keeper.close()
        await self._keeper.ended.get()

    def close(self) -> None:
        """Call `aclose` from code without an event loop."""
        run_sync(self.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __repr__(self) -> str:
        models = ", ".join(f"{model.name} {model.state}" for model in self._models.values())
        return f"<rekindle.Shelf {models}{', closed' if self.closed else ''}>"

    def _repr_html_(self) -> str:
        return str(html.line(repr(self))) if self.closed else self.stats()._repr_html_()


_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
_registered: list[bool] = []
_pid = os.getpid()


def _close_all() -> None:
    """Close every shelf at interpreter exit, before the sessions: it would open them again."""
    if os.getpid() != _pid:
        return
    for keeper in tuple(_keepers):
        keeper.close()
    for keeper in tuple(_keepers):
        keeper.join(EXIT_SECONDS)


@takes_options(EngineConfig)
def shelf(
    models: Sequence[str | Path] | Mapping[str, str | Path],
    *,
    memory: int | str | None = None,
    max_loaded: int | None = None,
    idle_unload: float | None = None,
    **options: Unpack[SessionOptions],
) -> Shelf:
    """Put several models on a shelf; each is loaded when a request first needs it.

        shelf = rekindle.shelf({"small": "tiny", "large": "Qwen/Qwen3-0.6B"}, max_loaded=1)
        small, large = await shelf["small"].session(), await shelf["large"].session()
        await small.generate("Once upon a time")   # wakes `small`, and `large` sleeps
        async with shelf["large"].use() as session: ...   # it does not sleep within the block

    Models that are loaded take at most `memory` bytes of weights and pages, by default three quarters of what is
    available on a CPU, and 90 % of another device's. The sizes are known before anything is loaded; a model with
    pages that would not fit gets fewer. `max_loaded` is the most models that are loaded at a time. When there is no
    room for the next one, the least recently used sleeps: its device memory comes back, its programs stay, and waking
    takes less than loading. A model in use never sleeps. One that no request has used for `idle_unload` seconds is
    unloaded; a session that is held ends with that. Models that wait for room take turns.

    `models` are by name, or are named by the last part of each. The other options are of `rekindle.open`, for all
    models; without `host_memory` they share 1 GiB of host memory for pages.
    """
    return shelf_of({name: (model, dict(options)) for name, model in _named(models).items()},
                    limits_of(memory=memory, max_loaded=max_loaded, idle_unload=idle_unload))  # fmt: skip


def limits_of(*, memory: int | str | None, max_loaded: int | None, idle_unload: float | None) -> ShelfLimits:
    """Return checked limits. Raise ConfigError."""
    size = None if memory is None else Size()("memory", memory, ConfigError)
    if size is not None and size < 1:
        raise ConfigError("memory", memory, "leaves no room for a model", 'Pass a size such as "4GiB"')
    if max_loaded is not None and (isinstance(max_loaded, bool) or not isinstance(max_loaded, int) or max_loaded < 1):
        raise ConfigError("max_loaded", max_loaded, "is not a whole number above 0", "Use 1 or more")
    if idle_unload is not None and (
        isinstance(idle_unload, bool) or not isinstance(idle_unload, int | float) or not 0 < idle_unload <= LONGEST_IDLE
    ):
        problem = f"is not a number of seconds above 0, up to {LONGEST_IDLE:,.0f}"
        raise ConfigError("idle_unload", idle_unload, problem, "Use 600")
    return ShelfLimits(size, max_loaded, None if idle_unload is None else float(idle_unload))


def shelf_of(models: Mapping[str, tuple[str | Path, Mapping[str, object]]], limits: ShelfLimits) -> Shelf:
    """Return a shelf of models by name, each with its own options of `open`."""
    if not models or len(models) > MOST_MODELS:
        raise ConfigError("models", f"{len(models)} models", f"are none, or over {MOST_MODELS:,}", "Name one or more")
    share = EngineConfig().host_memory // len(models)
    loadable = {}
    for name, (model, options) in models.items():
        given = options if options.get("host_memory") is not None else {**options, "host_memory": share}
        loadable[checked_name("models", name, colons=True)] = CheckpointModel(model, given)
    return Shelf(loadable, limits)


def _named(models: Sequence[str | Path] | Mapping[str, str | Path]) -> dict[str, str | Path]:
    if isinstance(models, str | Path):
        models = [models]
    named: dict[str, str | Path] = dict(models) if isinstance(models, Mapping) else {}
    for model in () if isinstance(models, Mapping) else models:
        name = name_of_model(Path(model).name if os.path.exists(model) else str(model))
        if name in named:
            fix = "Pass a dict with a name for each"
            raise ConfigError("models", name, "is the name of two models", fix)
        named[name] = model
    for name, model in named.items():
        if not isinstance(model, str | Path):
            problem = "is no folder, file or name, which a shelf can load again"
            raise ConfigError("models", f"{name}: {type(model).__name__}", problem, "Pass a path or a hub id")
    return named
