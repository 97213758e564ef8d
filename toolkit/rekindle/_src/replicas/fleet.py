"""`rekindle.fleet`: many sessions used as one object, with a session's methods for requests."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from rekindle._src.calls.call import Call, Once
from rekindle._src.calls.handle import Handle
from rekindle._src.capabilities import ENTRIES, capabilities_of, checked
from rekindle._src.capabilities.adapters.request import ADAPTERS
from rekindle._src.capabilities.additions import SharedAdditions, split
from rekindle._src.core import words
from rekindle._src.core.config import EngineConfig, OpenOptions, ResolvedConfig
from rekindle._src.core.names import checked_name, checked_path
from rekindle._src.core.options import takes_options
from rekindle._src.core.own_failure import interrupted
from rekindle._src.core.records import Completion
from rekindle._src.dispatch.backend import Front, SessionService
from rekindle._src.dispatch.host import Host, note_opening
from rekindle._src.dispatch.threads import OneShot
from rekindle._src.models.adapters.reading import arrays_of
from rekindle._src.replicas.adapters import FleetAdapters
from rekindle._src.replicas.autoscaling import Range
from rekindle._src.replicas.fleet_backend import FleetBackend, FleetParts
from rekindle._src.replicas.fleet_stats import FleetStats, replica_stats
from rekindle._src.replicas.link import HANG
from rekindle._src.replicas.routes import Placed
from rekindle._src.replicas.routing import Role, RouterName, roles_of
from rekindle._src.replicas.routing import router as router_named
from rekindle._src.session.open_model import OpenModel, with_source
from rekindle._src.text.detokenizers import real_detokenizer
from rekindle._src.views import html
from rekindle.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.notebook.dashboard import FleetDashboard


class Fleet(OpenModel):
    """Replicas of an open model. Make one with `rekindle.fleet`; close it with `aclose` or a `with` block.

    It takes requests as a session does: `generate`, `stream`, `submit`, `chat`, `map`, `embed`, `score`, `serve`. This
    process tokenizes prompts and detokenizes results, so a request survives the death of its replica: another replica
    continues after the tokens so far, with the same seed.
    """

    _host: Host
    _front: Front
    _backend: FleetBackend
    _adapters: FleetAdapters
    _router: str

    @classmethod
    def attached(cls, host: Host, front: Front, router: str) -> Self:
        assert isinstance(front.backend, FleetBackend), "a fleet runs its requests in replicas"
        adapters = ADAPTERS.of(front)
        assert isinstance(adapters, FleetAdapters), "its replicas load them"
        fleet = cls.__new__(cls)
        fleet._router = router
        fleet._host, fleet._front, fleet._backend, fleet._adapters = host, front, front.backend, adapters
        fleet._servers = []
        weakref.finalize(fleet, host.close).atexit = False
        return fleet

    @property
    def config(self) -> ResolvedConfig:
        """The configuration of its sessions, with every default resolved."""
        return self._backend.info.config

    @property
    def router(self) -> str:
        """The router that chooses a replica: "affinity", "round-robin" or "shortest"."""
        return self._router

    # Looking inside.

    def stats(self) -> FleetStats:
        """Return a snapshot: the replicas' work, cache hits, the spread of requests, losses and moves."""
        limiter, routes = self._host.limiter, self._backend

        def snapshot() -> FleetStats:
            replicas = tuple(replica_stats(link, routes) for link in routes.replicas.values())
            return FleetStats(
                model=self._front.model,
                router=self._router,
                replicas=replicas,
                live=limiter.inside,
                places=limiter.places,
                waiting_for_a_place=limiter.waiting,
                waiting=routes.waiting + sum(replica.figures.get("waiting", 0) for replica in replicas),
                moved=routes.counts.moved,
                handed_over=routes.counts.handed_over,
                lost=routes.counts.lost,
                follows=routes.size,
            )

        self._host.check()
        return self._host.ask(snapshot)

    def explain(self, request: Handle[object] | Completion | str) -> Placed:
        """Return the current or last replica of a request, the reason for it, and the number of moves."""
        return self._explained(request, self._backend.explain)

    def watch(self) -> FleetDashboard:
        """Return a live dashboard: replicas, requests, tokens per second, hit rates. Show it at a cell's end."""
        self._host.check()
        from rekindle._src.notebook.dashboard import FleetDashboard

        return FleetDashboard(self)

    # Its size and its end.

    def scale(self, replicas: int | tuple[int, int], *, drain: float = 30.0) -> Call[None]:
        """Change the number of replicas when awaited. Surplus replicas take no more requests and end after `drain` s.

        With a pair such as (1, 4) their number follows the load between the two from now on, as with
        `rekindle.fleet(replicas=(1, 4))`; with a number it no longer does. Requests that run longer than `drain` s
        continue in other replicas. New replicas are opened in the background. In a fleet with roles, the number of
        decoding replicas changes.
        """
        size, prefill = Range.of(replicas), self._backend.prefill
        if prefill and size.least < size.most:
            raise ConfigError("replicas", replicas, "can't follow the load where they have roles", "Pass a number")
        if prefill and size.least <= prefill:
            raise ConfigError(
                "replicas",
                replicas,
                f"leaves none to decode in addition to {prefill} that prefill",
                f"Use {prefill + 1} or more",
            )
        drain = _seconds("drain", drain)

        def change(result: OneShot[None]) -> None:
            self._backend.follow_load(size if size.least < size.most else None)
            self._backend.scale(size.nearest(len(self._backend.staying)), drain, result)

        return Once(self._changed, change, name="scale")

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
        swap = partial(self._backend.swapping.run, absolute(weights), _seconds("drain", drain))
        return Once(self._changed, partial(self._backend.run, swap), name="swap_weights")

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may use."""
        return self._adapters.names

    @with_source
    def load_adapter(self, name: str, source: object, *, alpha: float | None = None) -> Call[None]:
        """Await it to load an adapter (LoRA) in all replicas, for `generate(…, adapter=name)`.

        `source` is a PEFT folder or a GGUF file that all replicas can read, or a trainer's arrays, as
        `session.load_adapter` takes them. If the first replica refuses it, its error is raised and nothing has changed.
        A name that is in use means the new weights from now on; requests that run keep the old ones, also where they go
        on in another replica. New replicas load it before they take requests.
        """
        checked_name("adapter", name)
        sent: Any = absolute(checked_path("source", source)) if isinstance(source, str | Path) else arrays_of(source)
        load = partial(self._adapters.load, name, sent, alpha)
        return Once(self._changed, partial(self._backend.run, load), name="load_adapter")

    def unload_adapter(self, name: str) -> Call[None]:
        """Await it to forget an adapter and its cached pages. Requests that run with it go on."""
        unload = partial(self._adapters.unload, name)
        return Once(self._changed, partial(self._backend.run, unload), name="unload_adapter")

    async def _changed(self, change: Callable[[OneShot[None]], object]) -> None:
        """Begin a change on the fleet's loop, and wait for its end."""
        self._host.check()
        completed: OneShot[None] = OneShot()
        await self._host.call(lambda dispatch: change(completed)).get()
        await completed.get()

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Close the fleet: requests may go on for `drain` seconds, then they end with `SessionClosed`.

        Its processes end. Closing it again is harmless.
        """
        await super().aclose(drain=drain)

    def __repr__(self) -> str:
        if self.closed:
            return f"<Fleet over {self.model}: closed>"
        stats = self.stats()
        return f"<Fleet over {self.model}: {stats.ready} of {words.count(len(stats.replicas), 'replica')} ready>"

    def _repr_html_(self) -> str:
        return str(html.line(repr(self))) if self.closed else self.stats()._repr_html_()


class FleetOpening(Call[Fleet]):
    """`fleet = await rekindle.fleet(...)`, or `async with rekindle.fleet(...) as fleet`."""

    def __init__(
        self, parts: Callable[[], FleetParts], model: str, router: str, hang: float = HANG, size: Range | None = None
    ) -> None:
        self._parts, self._model, self._router, self._hang, self._size = parts, model, router, hang, size
        router_named(router)  # refuses an unknown router now
        self._fleet: Fleet | None = None

    async def _result(self) -> Fleet:
        if self._fleet is None:
            host = Host(self._build, capabilities_of)
            host.start()
            try:
                self._fleet = Fleet.attached(host, await host.opened.get(), self._router)
            except BaseException as error:
                host.close()
                interrupted(error, "stopped while it opened")
                raise
        return self._fleet

    def _build(self) -> Front:
        """Return the front of a fleet: it takes requests in and returns their text, but runs no model."""
        parts = self._parts()
        info, tokenizer = parts.info, parts.info.tokenizer
        # `map` sends as many rows of a table as can run at once.
        config = dataclasses.replace(info.config, max_requests=len(parts.connections) * info.config.max_requests)
        backend = FleetBackend(parts, router_named(self._router), hang=self._hang, size=self._size)
        services: dict[SessionService[Any], Any] = {ADAPTERS: FleetAdapters(backend)}
        for entry in ENTRIES:
            services |= entry.remote(info.facts[type(entry).__name__], tokenizer)
        return Front(
            backend=backend,
            tokenizer=tokenizer,
            detokenizer=real_detokenizer(tokenizer),
            config=config,
            vocab_size=info.vocab_size,
            chat=info.chat,
            model=self._model,
            processors=info.processors,
            characters_per_token=(lambda: tokenizer.characters_per_token) if tokenizer.has_text else None,
            longest=info.longest,
            embedder=info.embedder,
            sampling=info.sampling,
            chat_sampling=info.chat_sampling,
            services=services,
        )

    def __repr__(self) -> str:
        return "<rekindle.fleet: ready>" if self._fleet else "<rekindle.fleet: write fleet = await rekindle.fleet(…)>"

    async def __aenter__(self) -> Fleet:
        return await self._result()

    async def __aexit__(self, *details: object) -> None:
        if self._fleet is not None:
            await self._fleet.aclose()


def absolute(model: str | Path) -> str:
    """Return a folder as an absolute path for other processes, or a name unchanged."""
    path = Path(model).expanduser()
    return str(path.resolve()) if os.path.exists(path) else str(model)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(name, value, "is not a number of seconds", "Use 30, or 0 to wait for none")
    return float(value)


class FleetOptions(SharedAdditions, OpenOptions, total=False):
    """Keyword options of `fleet`: of its sessions, and arguments of capabilities that other processes can take."""


@takes_options(EngineConfig, also=SharedAdditions)
def fleet(
    model: str | Path = "tiny",
    *,
    replicas: int | tuple[int, int] | None = None,
    router: RouterName = "affinity",
    roles: Mapping[Literal["prefill", "decode"], int] | None = None,
    resources: Mapping[str, object] | None = None,
    **options: Unpack[FleetOptions],
) -> FleetOpening:
    """Open a model in several processes: `fleet = await rekindle.fleet(model, replicas=2)`, or with `async with`.

    Each replica is a session in its own process on Ray. The cluster is the one that this process is connected to, that
    `$RAY_ADDRESS` names, or that `ray start` has begun on this machine. Otherwise Ray is started here, quietly, and
    listens to this machine only. The fleet takes requests as a session does. They survive the death of a replica,
    which Ray replaces. `replicas` is a number, or a pair such as (1, 4): then the number follows the load between
    them, by the live requests and the waiting prompt tokens.

    `router` chooses the replica of a request: "affinity" keeps conversations and system prompts together, so that the
    prefix cache has their beginnings, as long as no replica has a quarter more requests than the mean; "shortest"
    takes the one with the fewest requests; "round-robin" takes each in turn. `roles` divides the work: with
    {"prefill": 1, "decode": 2} one replica computes prompts up to their first token, and two continue with the pages
    that they take from it, so long prompts don't delay streams. `resources` are options of Ray for each process, such
    as {"num_gpus": 1}; on one machine without GPUs the replicas divide its cores. `steering` and the other options work
    as in `open()`. With `mesh` and `processes` each replica is a group of processes that share the model, placed
    near each other; they end together and are replaced together. Needs the extra `ray`.
    """
    note_opening()
    parts_of, size = roles_and_range(roles, replicas)
    if not isinstance(model, str | Path):
        raise ConfigError("model", model, "can't be sent to other processes", "Pass a folder or a hub id")
    additions, others = split(options, SharedAdditions)
    check_options(others)
    return fleet_of(str(model), router, parts_of, resources, {**others, **checked(additions)}, size)


def roles_and_range(
    roles: Mapping[Literal["prefill", "decode"], int] | None, replicas: int | tuple[int, int] | None
) -> tuple[tuple[Role, ...], Range | None]:
    """Return the roles of the first replicas, and the range for an automatic number of replicas, or None."""
    if replicas is None or isinstance(replicas, int):
        return roles_of(roles, replicas), None
    size = Range.of(replicas)
    if roles is not None:
        problem = "can't follow the load where they have roles"
        raise ConfigError("replicas", replicas, problem, "Leave one of the two out")
    return roles_of(None, size.least), size if size.least < size.most else None


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse invalid options before a process is started."""
    if options.get("processes", 1) == 1:
        EngineConfig.of(options)
        return
    if options.get("coordinator") is not None:
        problem = "is found by each replica of a fleet for itself"
        raise ConfigError("coordinator", options["coordinator"], problem, "Leave it out")
    EngineConfig.of({**options, "coordinator": "127.0.0.1:1"})


def fleet_of(
    model: str,
    router: RouterName,
    roles: Sequence[Role],
    resources: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    size: Range | None,
    shared: str | None = None,
) -> FleetOpening:
    """Return a fleet that is not open yet. All fleets of the cluster that share a name have the same replicas."""
    folder = absolute(model)  # now: the working directory may be another one when it is awaited
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}

    def parts() -> FleetParts:
        from rekindle._src.replicas import on_ray  # imports Ray

        most = None if size is None else size.most
        return on_ray.parts(folder, {**plain, "quiet": True}, roles, resources, shared=shared, most=most)

    return FleetOpening(parts, model, router, size=size)
