"""The fleet: many sessions behind one object with a session's methods for requests."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

from rekindle._src.core import html
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.interrupts import interrupted
from rekindle._src.core.records import Completion
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.device import DeviceThread
from rekindle._src.dispatch.dispatch import Dispatch
from rekindle._src.dispatch.host import Host, wait
from rekindle._src.dispatch.mailbox import OneShot
from rekindle._src.dispatch.messages import Engine
from rekindle._src.dispatch.wakeups import run_sync
from rekindle._src.replicas.autoscaling import Range
from rekindle._src.replicas.fleet_dispatch import FleetDispatch
from rekindle._src.replicas.fleet_stats import FleetStats, replica_stats
from rekindle._src.replicas.link import HANG
from rekindle._src.replicas.remote_grammars import RemoteGrammars
from rekindle._src.replicas.routes import Placed, Routes
from rekindle._src.replicas.routing import router as router_named
from rekindle._src.replicas.wire import Connection, ReplicaInfo
from rekindle._src.session.call import Call, Once
from rekindle._src.session.conversations import Conversations
from rekindle._src.session.embedding import Embedding
from rekindle._src.session.handle import Handle
from rekindle._src.session.row_mapping import RowMapping
from rekindle._src.session.serving import Serving
from rekindle._src.text.detokenizer import real_detokenizer
from rekindle.errors import ConfigError, InvalidRequest


class Parts(NamedTuple):
    """The replicas under a fleet, and functions to add and end them."""

    connections: Sequence[Connection]
    info: ReplicaInfo  # the model, from the first open replica
    another: Callable[[], Connection]  # starts one more replica
    close: Callable[[], object]  # ends the replicas and releases their resources
    sender: str  # names this fleet to its replicas; unique


class Fleet(RowMapping, Embedding, Conversations, Serving):
    """Replicas of an open model. Make one with `rekindle.fleet`; close it with `aclose` or a `with` block.

    It takes requests as a session does: `generate`, `stream`, `submit`, `chat`, `map`, `embed`, `serve`. This process
    tokenizes prompts and detokenizes results, so a request survives the death of its replica: another replica
    continues behind the tokens so far, with the same seed.
    """

    _host: Host
    _engine: Engine
    _config: EngineConfig
    _prefill: int  # replicas that only compute prompts
    _router: str

    @classmethod
    def attached(cls, host: Host, engine: Engine, info: Any, router: str, prefill: int = 0) -> Self:
        """Return a fleet over an open host."""
        fleet = cls.__new__(cls)
        fleet._prefill = prefill
        fleet._host, fleet._engine, fleet._router = host, engine, router
        fleet._config = info.config
        fleet._servers = []
        weakref.finalize(fleet, host.close).atexit = False
        return fleet

    @property
    def config(self) -> EngineConfig:
        """The configuration of its sessions, with every default resolved."""
        return self._config

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: `encode(text)` and `decode(ids)`."""
        return self._engine.tokenizer

    @property
    def model(self) -> str:
        """The name or folder it was opened with."""
        return self._engine.model

    @property
    def sampling(self) -> Sampling:
        """The default options of a request: those of generation_config.json, or greedy."""
        return self._engine.sampling or Sampling()

    @property
    def closed(self) -> bool:
        """True if it was closed. It takes no requests then."""
        return self._host.closing

    @property
    def router(self) -> str:
        """The router that chooses a replica: "affinity", "round-robin" or "shortest"."""
        return self._router

    # Looking inside.

    def stats(self) -> FleetStats:
        """Return a snapshot: the replicas' work, cache hits, the spread of requests, losses and moves."""
        limiter = self._host.limiter

        def snapshot(dispatch: Dispatch) -> FleetStats:
            assert isinstance(dispatch, FleetDispatch)
            routes = dispatch.routes
            replicas = tuple(replica_stats(link, routes) for link in dispatch.links.values())
            return FleetStats(
                model=self._engine.model,
                router=self._router,
                replicas=replicas,
                live=limiter.inside,
                places=limiter.places,
                waiting_for_a_place=limiter.waiting,
                waiting=routes.waiting + sum(replica.figures.get("waiting", 0) for replica in replicas),
                moved=routes.counts.moved,
                handed_over=routes.counts.handed_over,
                lost=routes.counts.lost,
                follows=dispatch.size,
            )

        self._host.check()
        return wait(self._host.call(snapshot))

    def explain(self, request: Handle[Any] | Completion | str) -> Placed:
        """Return the current or last replica of a request, the reason for it, and the number of moves."""
        request_id = request if isinstance(request, str) else getattr(request, "request_ids", (request.id,))[0]
        self._host.check()
        scheduler: Any = self._engine.scheduler
        placed: Placed | None = self._host.ask(lambda: scheduler.explain(request_id))
        if placed is None:
            raise InvalidRequest(
                "request", request_id, "is not known: not submitted yet, or over for long", "Ask while it is recent"
            )
        return placed

    def watch(self) -> Any:
        """Return a live dashboard: replicas, requests, tokens per second, hit rates. Show it at a cell's end."""
        self._host.check()
        from rekindle._src.replicas.fleet_dashboard import FleetDashboard

        return FleetDashboard(self)

    # Its size and its end.

    def scale(self, replicas: int | tuple[int, int], *, drain: float = 30.0) -> Call[None]:
        """Change the number of replicas when awaited. Surplus replicas take no more requests and end after `drain` s.

        With a pair such as (1, 4) their number follows the load between the two from now on, as with
        `rekindle.fleet(replicas=(1, 4))`; with a number it no longer does. Requests that run longer than `drain` s
        continue in other replicas. New replicas are opened in the background. In a fleet with roles, the number of
        decoding replicas changes.
        """
        size, prefill = Range.of(replicas), self._prefill
        if prefill and size.least < size.most:
            raise ConfigError("replicas", replicas, "can't follow the load where they have roles", "Pass a number")
        if prefill and size.least <= prefill:
            raise ConfigError(
                "replicas",
                replicas,
                f"leaves none to decode beside {prefill} that prefill",
                f"Use {prefill + 1} or more",
            )
        return Once(self._scale, size, _seconds("drain", drain), name="scale")

    async def _scale(self, size: Range, drain: float) -> None:
        def change(dispatch: FleetDispatch, result: OneShot[None]) -> None:
            dispatch.follow_load(size if size.least < size.most else None)
            dispatch.scale(size.nearest(len(dispatch.staying)), drain, result)

        await self._changed(change)

    def swap_weights(self, weights: str | Path, *, drain: float = 30.0) -> Call[None]:
        """Swap the weights of all replicas for others of the same shapes when awaited, one replica after another.

        `weights` is a folder that all replicas can read, a hub id or "tiny". A replica takes no requests during its
        swap. Those it has may end for `drain` seconds; then they continue in other replicas, or there if there are no
        others. A request that runs before and after has tokens of both weights. If the first replica can't take the
        weights, its error is raised and nothing has changed; a later one that can't is replaced. New replicas have the
        new weights.
        """
        if not isinstance(weights, str | Path):
            raise InvalidRequest(
                "weights",
                type(weights).__name__,
                "is in this process, and the replicas are others",
                "Pass a folder or hub id that all of them can read",
            )
        return Once(self._swap, absolute(weights), _seconds("drain", drain), name="swap_weights")

    async def _swap(self, weights: str, drain: float) -> None:
        await self._changed(lambda dispatch, result: dispatch.swap_weights(weights, drain, result))

    async def _changed(self, change: Callable[[FleetDispatch, OneShot[None]], object]) -> None:
        """Begin a change on the fleet's loop, and wait for its end."""
        self._host.check()
        completed: OneShot[None] = OneShot()

        def begin(dispatch: Dispatch) -> None:
            assert isinstance(dispatch, FleetDispatch)
            change(dispatch, completed)

        await self._host.call(begin).get()
        await completed.get()

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Close the fleet: requests may go on for `drain` seconds, then they end with `SessionClosed`.

        Its processes end. Closing it again is harmless.
        """
        if self._host.forked:
            return
        for server in self._servers:
            await server.aclose(drain=drain)
        self._host.close(drain)
        await self._host.ended.get()
        self._host.join(1.0)

    def close(self, *, drain: float = 0.0) -> None:
        """Call `aclose` from code without an event loop."""
        run_sync(self.aclose(drain=drain))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"<Fleet over {self.model}: closed>"
        stats = self.stats()
        return f"<Fleet over {self.model}: {stats.ready} of {html.count(len(stats.replicas), 'replica')} ready>"

    def _repr_html_(self) -> str:
        return str(html.line(repr(self))) if self.closed else self.stats()._repr_html_()


class _Runner:
    """The runner of a fleet's engine: it has no device, and closing it ends the replicas."""

    programs = None

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close

    def close(self) -> None:
        self._close()


class FleetOpening(Call[Fleet]):
    """`fleet = await rekindle.fleet(...)`, or `async with rekindle.fleet(...) as fleet`."""

    def __init__(
        self, parts: Callable[[], Parts], model: str, router: str, hang: float = HANG, size: Range | None = None
    ) -> None:
        self._parts, self._model, self._router, self._hang, self._size = parts, model, router, hang, size
        router_named(router)  # refuses an unknown router now
        self._fleet: Fleet | None = None

    async def _result(self) -> Fleet:
        if self._fleet is None:
            fleet_parts: list[Parts] = []

            def build() -> Engine:
                fleet_parts.append(self._parts())
                return fleet_engine(fleet_parts[0], self._model, self._router)

            def dispatched(engine: Engine, device: DeviceThread) -> FleetDispatch:
                parts, routes = fleet_parts[0], cast(Routes, engine.scheduler)
                places = len(parts.connections) * parts.info.places
                return FleetDispatch(
                    engine,
                    device,
                    places,
                    routes,
                    parts.connections,
                    another=parts.another,
                    hang=self._hang,
                    size=self._size,
                    resize=lambda places: host.limiter.resize(places),
                )

            host = Host(build, dispatched=dispatched)
            host.start()
            try:
                engine, parts = await host.opened.get(), fleet_parts[0]
                prefill = sum(connection.role == "prefill" for connection in parts.connections)
                self._fleet = Fleet.attached(host, engine, parts.info, self._router, prefill)
            except BaseException as error:
                host.close()
                interrupted(error, "stopped while it opened")
                raise
        return self._fleet

    def __repr__(self) -> str:
        return "<rekindle.fleet: ready>" if self._fleet else "<rekindle.fleet: write fleet = await rekindle.fleet(…)>"

    async def __aenter__(self) -> Fleet:
        return await self._result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fleet is not None:
            await self._fleet.aclose()


def absolute(model: str | Path) -> str:
    """Return a folder as an absolute path for other processes, or a name unchanged."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else str(model)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(name, value, "is not a number of seconds", "Use 30, or 0 to wait for none")
    return float(value)


def fleet_engine(parts: Parts, model: str, router: str) -> Engine:
    """Return the engine of a fleet: it takes requests in and returns their text, but runs no model."""
    info, tokenizer = parts.info, parts.info.tokenizer
    routes = Routes(router_named(router), parts.sender)
    # `map` sends as many rows of a table as can run at once.
    config = dataclasses.replace(info.config, max_requests=len(parts.connections) * info.config.max_requests)

    return Engine(
        scheduler=cast(Any, routes),
        runner=cast(Any, _Runner(parts.close)),
        tokenizer=tokenizer,
        detokenizer=real_detokenizer(tokenizer),
        config=config,
        vocab_size=info.vocab_size,
        chat=info.chat,
        model=model,
        processors=info.processors,
        characters_per_token=(lambda: tokenizer.characters_per_token) if tokenizer.has_text else None,
        longest=info.longest,
        hidden_size=info.hidden_size,
        sampling=info.sampling,
        grammars=cast(Any, RemoteGrammars()) if tokenizer.has_text else None,
        think_ids=info.think_ids,
    )
