"""The dispatch of a fleet: intake and detokenize as in a session, with routes between them instead of an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from rekindle._src.core.own_failure import own_failure
from rekindle._src.core.records import FinishReason, Request
from rekindle._src.dispatch.device import DeviceThread
from rekindle._src.dispatch.dispatch import Dispatch, Task
from rekindle._src.dispatch.mailbox import Mailbox, OneShot
from rekindle._src.dispatch.messages import Abort, Drain, Engine, Events, Finish, ScheduleMessage, Submission
from rekindle._src.replicas.autoscaling import Autoscaler, Range, Room, replicas_for
from rekindle._src.replicas.keys import keys_of_messages, keys_of_tokens
from rekindle._src.replicas.link import HANG, Link, ReplicaState
from rekindle._src.replicas.rolling_swap import RollingSwap
from rekindle._src.replicas.routes import Routes
from rekindle._src.replicas.routing import Keys
from rekindle._src.replicas.wire import Connection
from rekindle.errors import SessionClosed

log = logging.getLogger("rekindle.fleet")
LOOK = 0.5  # seconds between two checks of the load
DRAIN = 30.0  # seconds for the requests of a replica that the load no longer needs
_MESSAGES = 1 << 20  # of the tasks' queues: more than the places of any fleet


class FleetDispatch(Dispatch):
    """Sends requests to replicas, and detokenizes their results here, where they survive a replica's death."""

    def __init__(
        self,
        engine: Engine,
        device: DeviceThread,
        places: int,
        routes: Routes,
        connections: Sequence[Connection],
        *,
        another: Callable[[], Connection],
        hang: float = HANG,
        size: Range | None = None,
        resize: Callable[[int], object] = lambda places: None,
    ) -> None:
        """Make a dispatch. `places` is the sum over all replicas, and `resize` is called when it changes."""
        super().__init__(engine, device, _MESSAGES)
        self.places = places
        self._places_of_one = places // len(connections)
        self.routes, self._another, self._hang, self._resize = routes, another, hang, resize
        self.links: dict[str, Link] = {}
        self.swapping = RollingSwap(self.links)
        self._autoscaler: Autoscaler | None = None
        self._keys: dict[str, Keys] = {}  # of live chats, by submission
        self._happened = anyio.Event()
        self._todo: list[Callable[[], Coroutine[Any, Any, None]]] = []  # jobs to start
        self._draining = False
        routes.wake, routes.began = self._wake, self._began
        for connection in connections:
            self.add(connection)
        self.follow_load(size)

    def add(self, connection: Connection) -> Link:
        """Add a replica. It is opened soon."""
        link = Link(connection, self.routes, hang=self._hang)
        link.target_weights = self.swapping.weights
        self.links[link.name] = self.routes.links[link.name] = link
        self.routes.broken = None
        self._start(link.run)
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
                del self.links[link.name], self.routes.links[link.name]

        self._resize(replicas * self._places_of_one)
        self._start(partial(_run_for_caller, end, result))

    def swap_weights(self, name: str, drain: float, result: OneShot[None]) -> None:
        """Swap the weights of all replicas, one after another. `result` is filled when all have them."""
        self._start(partial(_run_for_caller, partial(self.swapping.run, name, drain), result))

    @property
    def staying(self) -> list[Link]:
        """The replicas that are not ending."""
        lasting = (ReplicaState.OPENING, ReplicaState.READY, ReplicaState.SWAPPING)
        return [link for link in self.links.values() if link.state in lasting]

    @property
    def size(self) -> Range | None:
        """The range in which the number of replicas follows the load; None if it is fixed."""
        return None if self._autoscaler is None else self._autoscaler.size

    def follow_load(self, size: Range | None) -> None:
        """Let the number of replicas follow the load within `size` from now on; None keeps the current number."""
        scaler = self._autoscaler = None if size is None else Autoscaler(size)
        if scaler is not None:
            self._start(partial(self._follow_load, scaler))

    async def _follow_load(self, scaler: Autoscaler) -> None:
        while scaler is self._autoscaler:
            await anyio.sleep(LOOK)
            room = next((_room(link) for link in self.links.values() if link.takes), None)
            if room is None or self._draining or scaler is not self._autoscaler:
                continue
            count = len(self.staying)
            target = scaler.look(time.monotonic(), replicas_for(self.routes.demand, room), count)
            if target != count:
                log.info("the load asks for %d replicas, and there are %d", target, count)
                try:
                    self.scale(target, DRAIN, OneShot())
                except Exception as error:  # the existing replicas go on
                    log.warning("the number of replicas could not be changed to %d: %s", target, error)

    def _start(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._todo.append(job)
        self._wake()

    def submit(self, submission: Submission) -> None:
        if submission.messages is None:
            super().submit(submission)
            return
        keys = keys_of_messages(submission.messages, submission.sampling.salt)

        def over(mailbox: Mailbox) -> None:
            self.mailboxes.discard(mailbox)
            self._keys.pop(submission.id, None)

        super().submit(submission)
        self._keys[submission.id], submission.mailbox.on_complete = keys, over

    def _wake(self) -> None:
        self._happened.set()

    def _began(self, request_id: str, at: float) -> None:
        output = self.outputs.get(request_id)
        if output is not None:
            output.started = output.started or at

    def _engine_tasks(self, device: DeviceThread) -> tuple[Task, ...]:
        return (self._route,)

    async def _route(self) -> None:
        async with self._inbox, self._events, anyio.create_task_group() as group:
            group.start_soon(self._tell, group)
            async for message in self._inbox:
                self._take(message)

    def _take(self, message: ScheduleMessage) -> None:
        match message:
            case Request():
                self._change_one(message.id, partial(self._submit, message))
            case Abort(request_id):
                self._change_one(request_id, partial(self.routes.end, request_id, FinishReason.ABORTED))
            case Finish(request_id, reason):
                self._change_one(request_id, partial(self.routes.end, request_id, reason))
            case Drain():
                self._draining = True
                self._wake()
            case unknown:
                raise AssertionError(f"a fleet has no steps, so that it can't {unknown}")

    def _submit(self, request: Request) -> None:
        keys = self._keys.get(request.group)
        self.routes.submit(request, keys or keys_of_tokens(request.token_ids, request.sampling.salt))

    def _change_one(self, request_id: str, change: Callable[[], object]) -> None:
        """Make a change for one request. If it raises, the request fails."""
        try:
            change()
        except BaseException as error:
            self.routes.fail(request_id, own_failure(error, f"request {request_id} could not be routed"))

    async def _tell(self, group: TaskGroup) -> None:
        """Hand events on, and start new jobs, until all requests have drained."""
        while True:
            await self._happened.wait()
            self._happened = anyio.Event()
            while self._todo:
                group.start_soon(self._todo.pop(0))
            while self.routes.events:
                await self._events.send(Events(self.routes.take_events(), (), time.perf_counter()))
            if self._draining and not self.routes.live:
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
