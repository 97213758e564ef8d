"""Fleets with replicas in this process, over fake sessions or any others; a test decides when they die."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import anyio

from helpers.sessions import CONFIG, client_of, eventually, fake_session, host_of, result_of, writer_of
from rekindle._src.dispatch.threads import run_sync
from rekindle._src.replicas.autoscaling import Range
from rekindle._src.replicas.fleet import Fleet, FleetOpening
from rekindle._src.replicas.fleet_backend import FleetParts
from rekindle._src.replicas.replica import Replica, _info_of
from rekindle._src.replicas.routing import Role, roles_of
from rekindle._src.replicas.wire import Mail, ReplicaGone, ReplicaInfo, RequestMessage, SessionChange
from rekindle._src.session.session import Session

_names = itertools.count()


class LocalReplica:
    """A connection to a replica in this process. Each life has a session of its own."""

    def __init__(self, name: str, make: Callable[[], Session], role: Role = "both") -> None:
        self._name, self._make, self._role = name, make, role
        self.replica: Replica | None = None
        self.session: Session | None = None
        self.lives = 0
        self.killed = 0  # by the fleet
        self.hangs = False  # answers no calls until it is killed
        self.broken: Exception | None = None  # raised by the next attempts to open it
        self.closed = False
        self.poisoned = False  # dies of every request, before it tells of a token
        self.deadly: Callable[[RequestMessage], bool] = lambda sent: False  # dies of taking in such a request
        self.after: int | None = None  # dies by itself before it tells of more tokens than these
        self.refuses: Exception | None = None  # raised when its session is changed
        self.fragile = 0  # times that it dies of such a change

    @property
    def name(self) -> str:
        return self._name

    @property
    def role(self) -> Role:
        return self._role

    async def warm(self, addresses: Any) -> int:
        found: int = await self._alive(lambda: self._now.warm(addresses))
        return found

    async def open(self) -> ReplicaInfo:
        if self.closed:
            raise ReplicaGone("is closed")
        if self.broken is not None:
            raise self.broken
        if self.replica is None:

            def made() -> Session:
                session = self._make()
                if self.replica is not mine:  # it died meanwhile
                    host_of(session).close()
                self.session = session
                return session

            mine = self.replica = Replica(made, role=self._role)
            self.lives += 1
        return await self._alive(lambda: self._now.open())

    async def send(self, sender: str, requests: Any, ended: Any) -> None:
        requests = pickle.loads(pickle.dumps(requests))  # as any two processes exchange them
        if any(map(self.deadly, requests)):
            self.die()
            raise ReplicaGone("died of a request")
        await self._alive(lambda: self._now.send(sender, requests, ended))

    async def change(self, change: SessionChange) -> None:
        if self.refuses is not None:
            raise self.refuses
        if self.fragile:
            self.fragile -= 1
            self.die()
            raise ReplicaGone("died of the change")
        made = pickle.loads(pickle.dumps(change))
        await self._alive(lambda: self._now.change(made))

    async def mail(self, sender: str, patience: float) -> Mail:
        await self._alive(lambda: self._now._look())
        mail: Mail = await self._alive(lambda: self._now.mail(sender, patience))
        mail = pickle.loads(pickle.dumps(mail))._replace(silent=0.0)
        if self.poisoned and self._now._boxes and any(box.running for box in self._now._boxes.values()):
            self.die()
            raise ReplicaGone("died of a request")
        if self.after is not None:
            self.after -= sum(len(news.event.token_ids) for news in mail.news)
            if self.after < 0:
                self.after = None
                self.die()
                raise ReplicaGone("died amid its mail")
        return mail

    @property
    def _now(self) -> Replica:
        if self.replica is None:
            raise ReplicaGone("is dead")
        return self.replica

    async def _alive(self, call: Callable[[], Any]) -> Any:
        mine = self._now
        while self.hangs:
            await anyio.sleep(0.01)
            if self.replica is not mine:
                raise ReplicaGone("was killed")
        try:
            return await call()
        finally:
            if self.replica is not mine:
                raise ReplicaGone("has died")

    def die(self) -> None:
        """End it without warning, like kill -9: unsent news is lost."""
        session, self.replica, self.session = self.session, None, None
        self.hangs = False
        if session is not None:
            host_of(session).close()
            writer_of(session).stop()  # its thread would wait for ever

    def kill(self) -> None:
        self.killed += 1
        self.die()

    def close(self) -> None:
        self.closed = True
        self.die()


def local_parts(make: Callable[[], Session], roles: Sequence[Role], connections: list[LocalReplica]) -> FleetParts:
    """Return the parts of a fleet with replicas in this process, each added to `connections`."""

    def another() -> LocalReplica:
        role = roles[min(len(connections), len(roles) - 1)]
        made = LocalReplica(f"local-{len(connections)}", make, role)
        connections.append(made)
        return made

    given = [another() for _ in roles]
    session = make()
    info = _info_of(client_of(session))
    session.close()

    def close() -> None:
        for connection in connections:
            connection.close()

    return FleetParts(given, info, another, close, f"test-{next(_names)}")


@contextmanager
def local_fleet(
    make: Callable[[], Session] = lambda: fake_session(CONFIG), *, replicas: int = 2, router: str = "affinity",
    hang: float = 15.0, roles: Mapping[Literal["prefill", "decode"], int] | None = None, size: Range | None = None,
) -> Iterator[tuple[Fleet, list[LocalReplica]]]:  # fmt: skip
    """A fleet, and the connections to its replicas; checks at the end that no thread is left."""
    before = ours()
    connections: list[LocalReplica] = []
    given_roles = roles_of(roles, None) if roles else ("both",) * replicas
    replicas = len(given_roles)

    def parts() -> FleetParts:
        return local_parts(make, given_roles, connections)

    fleet = run_sync(result_of(FleetOpening(parts, "fake", router, hang, size)))
    try:
        eventually(lambda: fleet.stats().ready == replicas)
        yield fleet, connections
    finally:
        fleet.close()
    eventually(lambda: ours() <= before)


def ours() -> set[threading.Thread]:
    """Threads of sessions and fleets."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("rekindle")}
