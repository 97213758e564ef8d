"""The fleet: many sessions behind one object that takes requests as a session does."""

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
from rekindle._src.replicas.wire import Connection, Described
from rekindle._src.session.call import Call, Once
from rekindle._src.session.conversations import Conversations
from rekindle._src.session.embedding import Embedding
from rekindle._src.session.handle import Handle
from rekindle._src.session.row_mapping import RowMapping
from rekindle._src.session.serving import Serving
from rekindle._src.text.detokenizer import real_detokenizer
from rekindle.errors import ConfigError, InvalidRequest


class Parts(NamedTuple):
    """What a fleet is opened over."""

    connections: Sequence[Connection]
    described: Described  # the model, by the first replica that was open
    another: Callable[[], Connection]  # makes one more replica
    close: Callable[[], object]  # gives back what the replicas ran on
    sender: str  # names this fleet to its replicas; unique


class Fleet(RowMapping, Embedding, Conversations, Serving):
    """Replicas of an open model. Make one with `rekindle.fleet`; close it with `aclose` or a `with` block.

    It takes requests as a session does: `generate`, `stream`, `submit`, `chat`, `map`, `embed`, `serve`. Prompts become
    tokens here, and tokens become text here, so that a request goes on when the process that ran it dies: another
    replica continues from the tokens that have come, with the same seed.
    """

    _host: Host
    _engine: Engine
    _config: EngineConfig
    _prefill: int  # replicas that only compute prompts
    _router: str

    @classmethod
    def attached(cls, host: Host, engine: Engine, described: Any, router: str, prefill: int = 0) -> Self:
        """A fleet over a host that has already opened."""
        fleet = cls.__new__(cls)
        fleet._prefill = prefill
        fleet._host, fleet._engine, fleet._router = host, engine, router
        fleet._config = described.config
        fleet._servers = []
        weakref.finalize(fleet, host.close).atexit = False
        return fleet

    @property
    def config(self) -> EngineConfig:
        """What its sessions were opened with, with every default resolved."""
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
        """The options of a request that brings none: what generation_config.json asks for, or greedy."""
        return self._engine.sampling or Sampling()

    @property
    def closed(self) -> bool:
        """Whether it was closed; it takes no requests then."""
        return self._host.closing

    @property
    def router(self) -> str:
        """How it chooses a replica: "affinity", "round-robin" or "shortest"."""
        return self._router

    # Looking inside.

    def stats(self) -> FleetStats:
        """A snapshot: what each replica does, cache hits, how evenly requests are spread, what was lost and moved."""
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
                waiting=routes.waiting + sum(one.figures.get("waiting", 0) for one in replicas),
                moved=routes.counts.moved,
                handed_over=routes.counts.handed_over,
                lost=routes.counts.lost,
                follows=dispatch.size,
            )

        self._host.check()
        return wait(self._host.call(snapshot))

    def explain(self, request: Handle[Any] | Completion | str) -> Placed:
        """Which replica a request is on or was on last, why, and how often it had to move."""
        request_id = request if isinstance(request, str) else getattr(request, "request_ids", (request.id,))[0]
        self._host.check()
        scheduler: Any = self._engine.scheduler
        found: Placed | None = self._host.ask(lambda: scheduler.explain(request_id))
        if found is None:
            raise InvalidRequest(
                "request", request_id, "is not known: not submitted yet, or over for long", "Ask while it is recent"
            )
        return found

    def watch(self) -> Any:
        """A live dashboard: the replicas, their requests, tokens per second, hit rates. Show it at a cell's end."""
        self._host.check()
        from rekindle._src.replicas.fleet_dashboard import FleetDashboard

        return FleetDashboard(self)

    # Its size and its end.

    def scale(self, replicas: int | tuple[int, int], *, drain: float = 30.0) -> Call[None]:
        """Await it to have so many replicas. Those that are too many take no more requests and end after `drain` s.

        With a pair such as (1, 4) their number follows the load between the two from now on, as with
        `rekindle.fleet(replicas=(1, 4))`; with a number it no longer does. Requests that run longer than `drain` s go
        on in other replicas. New replicas are opened in the background. Where replicas have roles, it is those that
        decode that come and go.
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
        def change(dispatch: FleetDispatch, done: OneShot[None]) -> None:
            dispatch.follow_load(size if size.least < size.most else None)
            dispatch.scale(size.nearest(len(dispatch.staying)), drain, done)

        await self._changed(change)

    def swap_weights(self, weights: str | Path, *, drain: float = 30.0) -> Call[None]:
        """Await it to have all replicas go on with other weights of the same shapes, one replica after another.

        `weights` is a folder that all replicas can read, a hub id or "tiny". A replica takes no requests while it is
        given them. Those it has may end for `drain` seconds, then they go on in other replicas, or here if there are no
        others. A request that meets both has tokens of both. If the first replica can't take the weights, its error
        is raised and nothing has changed; one that can't later is replaced. New replicas have the new weights.
        """
        if not isinstance(weights, str | Path):
            raise InvalidRequest(
                "weights",
                type(weights).__name__,
                "is in this process, and the replicas are others",
                "Pass a folder or hub id that all of them can read",
            )
        return Once(self._swap, located(weights), _seconds("drain", drain), name="swap_weights")

    async def _swap(self, weights: str, drain: float) -> None:
        await self._changed(lambda dispatch, done: dispatch.swap_weights(weights, drain, done))

    async def _changed(self, change: Callable[[FleetDispatch, OneShot[None]], object]) -> None:
        """Begin a change on the fleet's loop, and wait until it is made."""
        self._host.check()
        made: OneShot[None] = OneShot()

        def begin(dispatch: Dispatch) -> None:
            assert isinstance(dispatch, FleetDispatch)
            change(dispatch, made)

        await self._host.call(begin).get()
        await made.get()

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
        """`aclose` for code without an event loop."""
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
    """Stands where a session has the runner: it has no device, and closing it ends the replicas."""

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
        router_named(router)  # what is wrong is refused now
        self._fleet: Fleet | None = None

    async def _result(self) -> Fleet:
        if self._fleet is None:
            found: list[Parts] = []

            def build() -> Engine:
                found.append(self._parts())
                return fleet_engine(found[0], self._model, self._router)

            def dispatched(engine: Engine, device: DeviceThread) -> FleetDispatch:
                parts, routes = found[0], cast(Routes, engine.scheduler)
                places = len(parts.connections) * parts.described.places
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
                engine, parts = await host.opened.get(), found[0]
                prefill = sum(connection.role == "prefill" for connection in parts.connections)
                self._fleet = Fleet.attached(host, engine, parts.described, self._router, prefill)
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


def located(model: str | Path) -> str:
    """A folder as another process finds it, or a name as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else str(model)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(name, value, "is not a number of seconds", "Use 30, or 0 to wait for none")
    return float(value)


def fleet_engine(parts: Parts, model: str, router: str) -> Engine:
    """What takes requests in and gives their text, without anything that runs a model."""
    described, tokenizer = parts.described, parts.described.tokenizer
    routes = Routes(router_named(router), parts.sender)
    # Rows of a table are sent as they can run at once.
    config = dataclasses.replace(described.config, max_requests=len(parts.connections) * described.config.max_requests)

    return Engine(
        scheduler=cast(Any, routes),
        runner=cast(Any, _Runner(parts.close)),
        tokenizer=tokenizer,
        detokenizer=real_detokenizer(tokenizer),
        config=config,
        vocab_size=described.vocab_size,
        chat=described.chat,
        model=model,
        processors=described.processors,
        characters_per_token=(lambda: tokenizer.characters_per_token) if tokenizer.has_text else None,
        longest=described.longest,
        hidden_size=described.hidden_size,
        sampling=described.sampling,
        grammars=cast(Any, RemoteGrammars()) if tokenizer.has_text else None,
        think_ids=described.think_ids,
    )
