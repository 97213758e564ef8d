"""A session that does nothing for a while: one that runs no steps, and one that has given the device's memory back."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any, Generic, TypeVar

from rekindle._src.core.drawable import Drawable, Record
from rekindle._src.core.records import PageMove
from rekindle._src.dispatch.threads import caller, run_sync
from rekindle._src.session.client import Client
from rekindle.errors import InvalidRequest


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SleepReport(Record):
    """The device memory that a sleeping session has given back."""

    weights_bytes: int  # 0 where the weights are the caller's own arrays
    page_bytes: int  # of KV pages and the state of requests
    pages_kept: int  # that went to host memory or disk on the way
    seconds: float

    _seconds = ("seconds",)

    @property
    def freed_bytes(self) -> int:
        """Weights and pages together."""
        return self.weights_bytes + self.page_bytes


async def sleep(client: Client, session: str, drop: bool) -> SleepReport:
    """Give the device's memory back until `wake`. `session` is its name for messages."""
    client.host.check()
    device, scheduler = client.engine.device, client.engine.scheduler
    if not (device.has_weights and device.is_alone):
        fix = "Use a session of one process that rekindle.open has made"
        raise InvalidRequest("session", session, "can't sleep", fix)
    if client.asleep:
        raise InvalidRequest("session", session, "sleeps already", "Await session.wake() first")
    pinned = client.ask(lambda: getattr(scheduler.cache, "pinned_pages", 0))
    if pinned:
        raise InvalidRequest("session", session, f"has {pinned} pinned pages", "Unpin them first")
    start = time.perf_counter()
    client.asleep = True
    try:
        await client.pause()
        try:
            moves: list[PageMove] = []
            await client.between_steps(lambda: moves.extend(scheduler.vacate()))
            freed = await client.exclusive(partial(device.sleep, moves, drop), lambda _: scheduler.vacated())
        except BaseException:
            client.resume()
            raise
    except BaseException:
        client.asleep = False
        raise
    client.sleeper = caller()
    client.host.paused_by.append(client.sleeper)
    return SleepReport(freed.weights, freed.pages, len(moves), time.perf_counter() - start)


async def wake(client: Client, session: str, weights: Any) -> float:
    """Go on after `sleep`, with other weights unless they are None. Return how many seconds that took."""
    client.host.check()
    device, scheduler = client.engine.device, client.engine.scheduler
    if not client.asleep:
        raise InvalidRequest("session", session, "does not sleep", "Await session.sleep() first")
    start = time.perf_counter()

    def woken(root: bytes | None) -> None:
        if root is not None:
            scheduler.flush_cache(root, recompute=True)

    await client.exclusive(partial(device.wake, weights), woken)
    client.asleep = False
    if client.sleeper in client.host.paused_by:
        client.host.paused_by.remove(client.sleeper)
    client.resume()
    return time.perf_counter() - start


S = TypeVar("S")


class PausedSession(Drawable, Generic[S]):
    """A block that runs no step except by `step()`. Entering waits for the steps in flight.

    Entering returns the session.
    """

    # Any: the signature of a public class names no private type.
    def __init__(self, client: Any, session: S) -> None:
        self._client: Client = client
        self._session = session
        self._caller: object = None

    def __repr__(self) -> str:
        return f"<Paused {self._session!r}: use it in `async with` or `with`>"

    async def __aenter__(self) -> S:
        self._client.pauses += 1
        try:
            await self._client.pause()
        except BaseException:
            self._client.pauses -= 1
            raise
        self._caller = caller()
        self._client.host.paused_by.append(self._caller)
        return self._session

    async def __aexit__(self, *details: object) -> None:
        self._resume()

    def _resume(self) -> None:
        self._client.pauses -= 1
        self._client.resume()
        self._client.host.paused_by.remove(self._caller)

    def __enter__(self) -> S:
        return run_sync(self.__aenter__())

    def __exit__(self, *details: object) -> None:
        self._resume()
