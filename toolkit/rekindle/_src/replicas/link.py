"""A fleet's link to one replica: it opens it, sends requests, reads mail, and detects its death or hang."""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import anyio
from anyio.abc import TaskGroup

from rekindle._src.core.own_failure import root_cause
from rekindle._src.dispatch.engine import ON_DEVICE
from rekindle._src.kvcache.sharing import PageAddress
from rekindle._src.replicas.routes import Routes
from rekindle._src.replicas.routing import Role
from rekindle._src.replicas.wire import (
    Connection,
    ReplicaGone,
    ReplicaInfo,
    RequestMessage,
    SessionChange,
    WeightsVersion,
)
from rekindle.errors import ReplicaLost

log = logging.getLogger("rekindle.fleet")
PATIENCE = 1.0  # seconds that a call for mail waits
HANG = 15.0  # seconds of silence after which a replica is replaced
SOONEST, LATEST = 0.1, 0.5  # seconds between two attempts to open a replica
FAILURES = 3  # consecutive failures to open a session after which a replica is given up
LOOK = 0.05  # seconds between two searches for a replica that lacks something
FULL = 1000  # undelivered events above which no more mail is read

# Counts that continue after a replacement, although the new replica begins at 0.
GROWING = (
    "submitted", "finished", "aborted", "failed", "prompt_tokens", "cached_tokens", "prefill_tokens",
    "generated_tokens", "accepted_tokens", "drafted_tokens", "preemptions", "steps", "slow_steps", "compilations",
    "pulled_pages", "pulled_bytes", "failed_pulls", "tokens",
)  # fmt: skip


class ReplicaState(enum.StrEnum):
    OPENING = "opening"  # its process starts, or its session is being opened
    READY = "ready"
    SWAPPING = "swapping"  # takes no requests until it has other weights
    DRAINING = "draining"  # takes no more requests; it ends after those it has
    FAILED = "failed"  # its session could not be opened
    CLOSED = "closed"


OVER = (ReplicaState.DRAINING, ReplicaState.FAILED, ReplicaState.CLOSED)


class Link:
    """The link to one replica, owned by the fleet's loop."""

    def __init__(self, connection: Connection, routes: Routes, *, hang: float = HANG) -> None:
        self._connection, self._routes, self._hang = connection, routes, hang
        self.state: ReplicaState = ReplicaState.OPENING
        self.info: ReplicaInfo | None = None
        self.replaced = 0  # times that a new process took over
        self.reopened_after: list[float] = []  # seconds from the loss of a process until the next one was ready
        self.why = ""  # reason why it was lost, or failed
        self.weights: WeightsVersion = WeightsVersion(0, "")  # of its process
        self.target_weights: WeightsVersion = WeightsVersion(0, "")  # that a new process gets before it takes requests
        self.changes: set[str] = set()  # names of the other changes of its process
        self.target_changes: Mapping[str, SessionChange] = {}  # that a new process makes before it takes requests
        self._figures: Mapping[str, Any] = {}
        self._before: Counter[str] = Counter()  # counts of earlier processes
        self._sizes_before: Counter[int] = Counter()  # step sizes of earlier processes
        self._lives = 0
        self._lost_at: float | None = None
        self._posted: list[RequestMessage] = []
        self._dropped: list[str] = []
        self._wake: anyio.Event | None = None  # set when there are messages to send
        self._scope: anyio.CancelScope | None = None  # of `run`

    @property
    def name(self) -> str:
        return self._connection.name

    @property
    def takes(self) -> bool:
        return self.state is ReplicaState.READY

    @property
    def places(self) -> int:
        return 0 if self.info is None else self.info.places

    @property
    def rows(self) -> int:
        return 0 if self.info is None else self.info.config.max_requests

    @property
    def role(self) -> Role:
        return self._connection.role

    @property
    def pages(self) -> PageAddress | None:
        """The address where others take its pages."""
        return None if self.info is None else self.info.pages

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return 0 if self.info is None else self.info.config.max_model_len or 0

    def post(self, sent: RequestMessage) -> None:
        self._posted.append(sent)
        self._rouse()

    def drop(self, request_id: str) -> None:
        count = len(self._posted)
        self._posted = [sent for sent in self._posted if sent.id != request_id]
        if len(self._posted) == count:
            self._dropped.append(request_id)
            self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def figures(self) -> dict[str, Any]:
        """Return its session's figures. Counts continue over replacements."""
        figures = dict(self._figures)
        for name in GROWING:
            if name in figures or name in self._before:
                figures[name] = figures.get(name, 0) + self._before[name]
        figures["step_sizes"] = dict(self._sizes_before + Counter(figures.get("step_sizes", {})))
        return figures

    async def run(self) -> None:
        """Keep the replica open until it is closed or has failed."""
        failures, pause = 0, SOONEST
        with anyio.CancelScope() as self._scope:
            while self.state is not ReplicaState.CLOSED:
                try:
                    await self._live()
                except ReplicaGone as gone:
                    if self._lost(str(gone)):
                        failures, pause = 0, SOONEST
                except Exception as error:
                    failures += 1
                    self._lost(f"could not be opened: {error}")
                    if failures >= FAILURES:
                        self._fail(error)
                        return
                await anyio.sleep(pause)
                pause = min(LATEST, 2 * pause)

    async def _live(self) -> None:
        """Run one process from its start to its end, which raises."""
        info = await self._connection.open()
        self.weights, self.changes = WeightsVersion(0, ""), set()
        while self.weights != self.target_weights:
            weights = self.target_weights
            await self._connection.change(weights)
            self.weights = weights
        while missing := [name for name in self.target_changes if name not in self.changes]:
            await self._connection.change(self.target_changes[missing[0]])
            self.changes.add(missing[0])
        self.info = info
        self._lives += 1
        self._posted, self._dropped = [], []
        if self._lost_at is not None:
            self.reopened_after.append(time.monotonic() - self._lost_at)
            self._lost_at = None
        if self.state is ReplicaState.OPENING:
            self.state = ReplicaState.READY
        self._routes.place()
        self._routes.spread(self)
        sender = f"{self._routes.sender}.{self._lives}"
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._send, sender, group)
                group.start_soon(self._read, sender)
                group.start_soon(self._warm)
        except ExceptionGroup as errors:
            cause = root_cause(errors)
            raise ReplicaGone(str(cause) or type(cause).__name__) from cause

    async def _send(self, sender: str, group: TaskGroup) -> None:
        while True:
            if not self._posted and not self._dropped:
                self._wake = anyio.Event()
                await self._wake.wait()
            requests, self._posted = self._posted, []
            dropped, self._dropped = tuple(self._dropped), []
            together = tuple(sent for sent in requests if not sent.own_call)
            if together or dropped:
                await self._call(sender, together, dropped)
            for sent in requests:
                if sent.own_call:
                    group.start_soon(self._call, sender, (sent,))

    async def _call(self, sender: str, requests: tuple[RequestMessage, ...], dropped: tuple[str, ...] = ()) -> None:
        with answering(PATIENCE + self._hang):
            await self._connection.send(sender, requests, dropped)

    async def _warm(self) -> None:
        """Let it take pages from its neighbours while it serves."""
        shared = tuple(link.pages for link in self._routes.links.values() if link is not self and link.takes)
        addresses = tuple(address for address in shared if address is not None)
        if not addresses or self.pages is None:
            return
        try:
            await self._connection.warm(addresses)
        except ReplicaGone:
            raise
        except Exception as error:  # it computes the pages that it could not take
            log.debug("replica %s took no pages from its neighbours: %s", self.name, error)

    async def _read(self, sender: str) -> None:
        while True:
            with answering(PATIENCE + self._hang):
                mail = await self._connection.mail(sender, PATIENCE)
            self._figures = mail.figures
            if mail.silent > self._hang:
                raise ReplicaGone(f"has not made a turn for {mail.silent:.0f} s")
            if ON_DEVICE in str(mail.figures.get("stalled", "")):
                raise ReplicaGone(f"hangs: {mail.figures['stalled']}")
            self._routes.arrived(self, mail.news)
            while self._routes.undelivered > FULL:
                await self._routes.delivered.wait()

    def _lost(self, why: str) -> bool:
        """Record that its process is gone or useless. Return True if it was open before."""
        if self.state is ReplicaState.CLOSED:
            return False
        was_open = self.info is not None
        self.why = why
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        if was_open:
            log.warning("replica %s %s; another one takes its place", self.name, why)
            self.replaced += 1
            for name in GROWING:
                self._before[name] += self._figures.get(name, 0)
            self._sizes_before += Counter(self._figures.get("step_sizes", {}))
            self._figures = {}
            self._connection.kill()  # an unreachable process must not go on
        self.info = None
        if self.state in (ReplicaState.READY, ReplicaState.SWAPPING):
            self.state = ReplicaState.OPENING
        if was_open:
            self._routes.lost(self, why)
        return was_open

    def _fail(self, error: Exception) -> None:
        self.state = ReplicaState.FAILED
        log.error("replica %s is given up after %d attempts: %s", self.name, FAILURES, error)
        self._connection.close()
        final = (ReplicaState.FAILED, ReplicaState.CLOSED)
        if all(getattr(link, "state", None) in final for link in self._routes.links.values()):
            lost = ReplicaLost(f"no replica is left: {error}. Close the fleet and open another one")
            lost.__cause__ = error
            self._routes.fail_waiting(lost)

    async def swap(self, weights: WeightsVersion, drain: float) -> None:
        """Swap its weights. Raise `ReplicaGone`, or the session's error if it can't take them.

        It takes no requests meanwhile. Those it has may end for `drain` seconds; then others take them, or they go on
        here if there are no others.
        """
        self.state, life = ReplicaState.SWAPPING, self._lives
        try:
            with anyio.move_on_after(drain if self._others_take else 0.0):
                while self._routes.inside(self.name) and self.state is ReplicaState.SWAPPING:
                    await self._routes.delivered.wait()
            if self.state is ReplicaState.OPENING or self._lives != life:
                raise ReplicaGone("was lost before it took other weights")
            if self._others_take:
                self._routes.evict(self, f"{self.name} was given other weights", tell=True)
            await self._connection.change(weights)
            if self._lives != life:
                raise ReplicaGone("was replaced while it took other weights")
            self.weights = weights
        except ReplicaGone:
            if self.state is ReplicaState.SWAPPING:
                self.state = ReplicaState.OPENING
                self._connection.kill()  # so that `run` detects it and opens another one
            raise
        finally:
            if self.state is ReplicaState.SWAPPING:
                self.state = ReplicaState.READY
                self._routes.place()

    async def make(self, name: str, change: SessionChange) -> None:
        """Make a change while it serves, and remember it by name. Raise `ReplicaGone`, or the session's error."""
        life = self._lives
        try:
            await self._connection.change(change)
            if self._lives != life or not self.takes:
                raise ReplicaGone("was replaced while its session was changed")
        except ReplicaGone:
            if self._lives == life and self.state is ReplicaState.READY:
                self.renew("was lost while its session was changed")
            raise
        self.changes.add(name)

    async def undo(self, name: str, change: SessionChange) -> None:
        """Undo the change of that name by another one. Raise the session's error."""
        self.changes.discard(name)
        await self._connection.change(change)

    @property
    def _others_take(self) -> bool:
        return any(link.takes for link in self._routes.links.values())

    def renew(self, why: str) -> None:
        """Replace its process, which is useless, by another one."""
        if self.state is ReplicaState.READY:
            log.warning("replica %s %s; another one takes its place", self.name, why)
            self.state = ReplicaState.OPENING
            self._connection.kill()

    async def drain(self, seconds: float) -> None:
        """Take no more requests, let running ones end for `seconds`, move the others, and end the process."""
        self.state = ReplicaState.DRAINING
        with anyio.move_on_after(seconds):
            while self._routes.inside(self.name):
                await self._routes.delivered.wait()
        self._routes.evict(self, f"{self.name} was closed", tell=True)
        self.close()

    def close(self) -> None:
        """End the process for good."""
        self.state = ReplicaState.CLOSED
        if self._scope is not None:
            self._scope.cancel()
        self._connection.close()


async def roll_out(
    what: str, without: Callable[[], list[Link]], give: Callable[[Link], Awaitable[object]], decided: Callable[[], bool]
) -> None:
    """Give something to all replicas, one after another, until `without` returns no replica that lacks it.

    The first replica decides: if it can't take it, its error is raised. A later one that dies or can't take it is
    replaced, and its successor takes it before it takes requests.
    """
    deaths = 0
    while remaining := without():
        link = next((link for link in remaining if link.takes), None)
        if link is None:  # the replicas are being opened
            await anyio.sleep(LOOK)
            continue
        try:
            await give(link)
        except ReplicaGone as gone:
            deaths += 1
            if not decided() and deaths >= FAILURES:
                raise ReplicaLost(
                    f"{deaths} replicas died while they took {what}, the last one because it {gone}. Nothing has "
                    "changed; try it in a session"
                ) from gone
        except Exception as error:
            if not decided():
                raise
            link.renew(f"could not take {what}: {error}")
    if not decided():
        raise ReplicaLost(f"no replica is left that could take {what}. Open another fleet")


@contextlib.contextmanager
def answering(seconds: float) -> Iterator[None]:
    """Bound a block to `seconds`. Raise `ReplicaGone` if it takes longer: the replica hangs."""
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise ReplicaGone(f"has not answered for {seconds:.0f} s")
