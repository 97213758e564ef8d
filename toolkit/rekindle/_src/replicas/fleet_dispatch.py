"""The dispatch of a fleet: intake and detokenize as in a session, and between them routes instead of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from rekindle._src.core.records import FinishReason, Request
from rekindle._src.dispatch.device import DeviceThread
from rekindle._src.dispatch.dispatch import Dispatch, Task
from rekindle._src.dispatch.mailbox import Mailbox, OneShot
from rekindle._src.dispatch.messages import Abort, Drain, Engine, Events, Finish, ScheduleMessage, Submission
from rekindle._src.replicas.keys import keys_of_messages, keys_of_tokens
from rekindle._src.replicas.link import HANG, Link, ReplicaState
from rekindle._src.replicas.routes import Routes
from rekindle._src.replicas.routing import Keys
from rekindle._src.replicas.wire import Connection


class FleetDispatch(Dispatch):
    """Requests go to replicas, and what comes back becomes text here, where it stays when a replica dies."""

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
    ) -> None:
        super().__init__(engine, device, places)
        self.routes, self._another, self._hang = routes, another, hang
        self.links: dict[str, Link] = {}
        self._keys: dict[str, Keys] = {}  # of live submissions that are chats
        self._happened = anyio.Event()
        self._todo: list[Callable[[], Coroutine[Any, Any, None]]] = []  # to be started
        self._draining = False
        routes.wake, routes.began = self._wake, self._began
        for connection in connections:
            self.add(connection)

    def add(self, connection: Connection) -> Link:
        """Take in a replica; it is opened soon."""
        link = Link(connection, self.routes, hang=self._hang)
        self.links[link.name] = self.routes.links[link.name] = link
        self.routes.broken = None
        self._todo.append(link.run)
        self._wake()
        return link

    def scale(self, replicas: int, drain: float, done: OneShot[None]) -> None:
        """Add replicas, or let the newest ones end; `done` is filled when those have."""
        staying = [link for link in self.links.values() if link.state in (ReplicaState.OPENING, ReplicaState.READY)]
        for _ in range(replicas - len(staying)):
            self.add(self._another())
        leaving = staying[replicas:]

        async def end() -> None:
            async with anyio.create_task_group() as group:
                for link in leaving:
                    group.start_soon(link.drain, drain)
            for link in leaving:
                del self.links[link.name], self.routes.links[link.name]
            done.put(None)

        self._todo.append(end)
        self._wake()

    def submit(self, submission: Submission) -> None:
        super().submit(submission)
        if submission.messages is None:
            return
        self._keys[submission.id] = keys_of_messages(submission.messages, submission.sampling.salt)

        def over(mailbox: Mailbox) -> None:
            self.mailboxes.discard(mailbox)
            del self._keys[submission.id]

        submission.mailbox.on_complete = over

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
                keys = self._keys.get(message.group)
                self.routes.submit(message, keys or keys_of_tokens(message.token_ids, message.sampling.salt))
            case Abort(request_id):
                self.routes.end(request_id, FinishReason.ABORTED)
            case Finish(request_id, reason):
                self.routes.end(request_id, reason)
            case Drain():
                self._draining = True
                self._wake()
            case other:
                raise AssertionError(f"a fleet has no steps, so that it can't {other}")

    async def _tell(self, group: TaskGroup) -> None:
        """Hand on what came out, and start what was added, until everything has drained."""
        while True:
            await self._happened.wait()
            self._happened = anyio.Event()
            while self._todo:
                group.start_soon(self._todo.pop(0))
            while self.routes.events:
                await self._events.send(Events(self.routes.take_events(), (), time.perf_counter()))
            if self._draining and not self.routes.live:
                group.cancel_scope.cancel()
