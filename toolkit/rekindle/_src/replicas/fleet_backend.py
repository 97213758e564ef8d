"""The backend of a fleet: the links to its replicas, their number, their weights and the other changes of all."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rekindle._src.dispatch.backend import Control, Drain, Events, ScheduleMessage, take
from rekindle._src.dispatch.threads import DeviceThread, OneShot
from rekindle._src.replicas.autoscaling import Autoscaler, Range, Room, replicas_for
from rekindle._src.replicas.link import HANG, OVER, Link, ReplicaState, roll_out
from rekindle._src.replicas.routes import Routes
from rekindle._src.replicas.routing import Router
from rekindle._src.replicas.wire import Connection, ReplicaInfo, SessionChange, WeightsVersion
from rekindle.errors import SessionClosed

log = logging.getLogger("rekindle.fleet")
LOOK = 0.5  # seconds between two checks of the load
DRAIN = 30.0  # seconds for the requests of a replica that the load no longer needs
_BOUND = 1 << 17  # more places than any fleet has


class FleetParts(NamedTuple):
    """The replicas under a fleet, and functions to add and end them."""

    connections: Sequence[Connection]
    info: ReplicaInfo  # the model, from the first open replica
    another: Callable[[], Connection]  # starts one more replica
    close: Callable[[], object]  # ends the replicas and releases their resources
    sender: str  # names this fleet to its replicas; unique


class FleetBackend(Routes):
    """Sends requests to replicas. Their events come back here, where the text survives a replica's death."""

    def __init__(self, parts: FleetParts, router: Router, *, hang: float = HANG, size: Range | None = None) -> None:
        super().__init__(router, parts.sender)
        self.info: ReplicaInfo = parts.info
        self.prefill: int = sum(connection.role == "prefill" for connection in parts.connections)
        self.places: int = len(parts.connections) * parts.info.places
        self.bound: int = _BOUND
        self._another, self._close, self._hang = parts.another, parts.close, hang
        self._resize: Callable[[int], object] = lambda places: None
        self.replicas: dict[str, Link] = {}
        self.swapping = RollingSwap(self.replicas)
        self.changes: dict[str, SessionChange] = {}  # that the session of every replica has to go through, by name
        self._autoscaler: Autoscaler | None = None
        self._happened = anyio.Event()
        self._todo: list[Callable[[], Coroutine[Any, Any, None]]] = []  # jobs to start
        self._draining = False
        for connection in parts.connections:
            self.add(connection)
        self.follow_load(size)

    def add(self, connection: Connection) -> Link:
        """Add a replica. It is opened soon."""
        link = Link(connection, self, hang=self._hang)
        link.target_weights, link.target_changes = self.swapping.weights, self.changes
        self.replicas[link.name] = self.links[link.name] = link
        self.broken = None
        self.start(link.run)
        return link

    def scale(self, replicas: int, drain: float, result: OneShot[None]) -> None:
        """Add replicas, or end the newest ones. `result` is filled when those have ended."""
        staying = self.staying
        for _ in range(replicas - len(staying)):
            self.add(self._another())
        leaving = staying[replicas:]

        async def end() -> None:
            async with anyio.create_task_group() as group:
                for link in leaving:
                    group.start_soon(link.drain, drain)
            for link in leaving:
                del self.replicas[link.name], self.links[link.name]

        self.places = replicas * self.info.places
        self._resize(self.places)
        self.run(end, result)

    def run(self, job: Callable[[], Awaitable[None]], result: OneShot[None]) -> None:
        """Run a job, such as a swap. `result` is filled at its end, or with its error."""
        self.start(partial(_run_for_caller, job, result))

    @property
    def staying(self) -> list[Link]:
        lasting = (ReplicaState.OPENING, ReplicaState.READY, ReplicaState.SWAPPING)
        return [link for link in self.replicas.values() if link.state in lasting]

    @property
    def size(self) -> Range | None:
        """The range of the number of replicas when it follows the load; None if it is fixed."""
        return None if self._autoscaler is None else self._autoscaler.size

    def follow_load(self, size: Range | None) -> None:
        """Let the number of replicas follow the load within `size` from now on; None keeps the current number."""
        scaler = self._autoscaler = None if size is None else Autoscaler(size)
        if scaler is not None:
            self.start(partial(self._follow_load, scaler))

    async def _follow_load(self, scaler: Autoscaler) -> None:
        while scaler is self._autoscaler:
            await anyio.sleep(LOOK)
            room = next((_room(link) for link in self.replicas.values() if link.takes), None)
            if room is None or self._draining or scaler is not self._autoscaler:
                continue
            count = len(self.staying)
            target = scaler.look(time.monotonic(), replicas_for(self.demand, room), count)
            if target != count:
                log.info("the load asks for %d replicas, and there are %d", target, count)
                try:
                    self.scale(target, DRAIN, OneShot())
                except Exception as error:  # the existing replicas go on
                    log.warning("the number of replicas could not be changed to %d: %s", target, error)

    def start(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a job on the fleet's loop, soon."""
        self._todo.append(job)
        self.wake()

    # A backend of the dispatch.

    def wake(self) -> None:
        """Have events delivered and jobs started."""
        self._happened.set()

    def control(self, message: Control | Drain) -> None:
        """End after the last request; a fleet has no steps that could be controlled."""
        assert isinstance(message, Drain), f"a fleet has no steps, so that it can't {message}"
        self._draining = True
        self.wake()

    def attach(self, lost: Callable[[BaseException], object], resize: Callable[[int], object]) -> None:
        """Take the host's callbacks. `lost` is never called: requests move to other replicas."""
        self._resize = resize

    def close(self) -> None:
        self._close()

    async def serve(
        self,
        inbox: MemoryObjectReceiveStream[ScheduleMessage],
        post: MemoryObjectSendStream[ScheduleMessage],
        outbox: MemoryObjectSendStream[Events],
        device: DeviceThread,
    ) -> None:
        """Take messages and send events until a `Drain` has come and no request is left."""
        async with inbox, post, outbox, anyio.create_task_group() as group:
            group.start_soon(self._deliver, outbox, group)
            async for message in inbox:
                assert not isinstance(message, OneShot), "a fleet has no steps"
                take(self, message)

    async def _deliver(self, outbox: MemoryObjectSendStream[Events], group: TaskGroup) -> None:
        """Hand events on, and start new jobs, until all requests have drained."""
        while True:
            await self._happened.wait()
            self._happened = anyio.Event()
            while self._todo:
                group.start_soon(self._todo.pop(0))
            while (events := self.events()) is not None:
                await outbox.send(events)
            if self._draining and not self.live:
                group.cancel_scope.cancel()


def _room(link: Link) -> Room:
    assert link.info is not None, "it takes requests"
    config = link.info.config
    return Room(config.max_requests, config.max_tokens_per_step)


async def _run_for_caller(job: Callable[[], Awaitable[None]], result: OneShot[None]) -> None:
    """Run a job, and pass its end or error to the caller that waits for it."""
    try:
        await job()
    except Exception as error:
        result.fail(error)
    except BaseException:
        result.fail(SessionClosed("the fleet was closed meanwhile. Open another one"))
        raise
    else:
        result.put(None)


class RollingSwap:
    """The swap of weights, owned by the fleet's loop; once the first replica has taken them, they are the fleet's."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links
        self.weights: WeightsVersion = WeightsVersion(0, "")  # the fleet's; a new replica begins with them
        self._turn = anyio.Lock()

    async def run(self, name: str, drain: float) -> None:
        """Swap the weights of all replicas. A replica's requests may end for `drain` seconds; then others take them."""
        async with self._turn:
            weights = WeightsVersion(self.weights.number + 1, name)

            async def give(link: Link) -> None:
                await link.swap(weights, drain)
                self._decided(weights)

            await roll_out(f"the weights {name!r}", lambda: self._left(weights), give, lambda: self.weights == weights)

    def _left(self, weights: WeightsVersion) -> list[Link]:
        return [link for link in self._links.values() if link.state not in OVER and link.weights != weights]

    def _decided(self, weights: WeightsVersion) -> None:
        if self.weights != weights:
            log.info("the fleet goes on with the weights %r", weights.name)
            self.weights = weights
        for link in self._links.values():
            link.target_weights = weights
