"""`session.sleep` and `session.wake`: device memory is given back for a while, and programs stay."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any, Literal

from rekindle._src.core import html
from rekindle._src.core.records import PageMove
from rekindle._src.dispatch.threads import caller
from rekindle._src.session.call import Call, Once
from rekindle._src.session.client import Client
from rekindle.errors import InvalidRequest

MODES = ("host", "drop")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SleepReport(html.Record):
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


class Sleeping:
    """The part of a session that sleeps."""

    _client: Client
    _asleep: bool = False
    _sleeper: object = None  # the task that put it to sleep

    @property
    def asleep(self) -> bool:
        """True between `sleep` and `wake`."""
        return self._asleep

    def sleep(self, *, weights: Literal["host", "drop"] = "host") -> Call[SleepReport]:
        """Await it to give the device's memory back until `wake`, so that a trainer can have it. Programs stay.

        Weights go to host memory, or are dropped to be read again ("drop", for those of a folder). Cached pages go to
        the tiers below the device if there are any, and are forgotten otherwise. Requests that run or arrive wait for
        `wake` and go on then with the tokens they have. Weights that are the caller's own arrays are let go; they are
        freed when the caller drops them. The result says how much was freed.
        """
        if weights not in MODES:
            raise InvalidRequest("weights", weights, "is not known", f"Use one of {', '.join(map(repr, MODES))}")
        return Once(self._sleep, weights == "drop", name="sleep")

    def wake(self, weights: Any = None) -> Call[float]:
        """Await it to go on after `sleep`; the result is how many seconds that took.

        With `weights`, in any form that `swap_weights` takes, the session goes on with these, and the old ones are not
        brought back.
        """
        return Once(self._wake, weights, name="wake")

    async def _sleep(self, drop: bool) -> SleepReport:
        client = self._client
        client.host.check()
        resources, scheduler = client.engine.resources, client.engine.scheduler
        if resources.sleep is None:
            fix = "Use a session of one process that rekindle.open has made"
            raise InvalidRequest("session", repr(self), "can't sleep", fix)
        if self._asleep:
            raise InvalidRequest("session", repr(self), "sleeps already", "Await session.wake() first")
        pinned = client.ask(lambda: getattr(scheduler.cache, "pinned_pages", 0))
        if pinned:
            raise InvalidRequest("session", repr(self), f"has {pinned} pinned pages", "Unpin them first")
        start = time.perf_counter()
        self._asleep = True
        try:
            await client.pause()
            try:
                moves: list[PageMove] = []
                await client.between_steps(lambda: moves.extend(scheduler.vacate()))
                freed = await client.exclusive(partial(resources.sleep, moves, drop), lambda _: scheduler.vacated())
            except BaseException:
                client.resume()
                raise
        except BaseException:
            self._asleep = False
            raise
        self._sleeper = caller()
        client.host.paused_by.append(self._sleeper)
        return SleepReport(freed.weights, freed.pages, len(moves), time.perf_counter() - start)

    async def _wake(self, weights: Any) -> float:
        client = self._client
        client.host.check()
        resources, scheduler = client.engine.resources, client.engine.scheduler
        if not self._asleep or resources.wake is None:
            raise InvalidRequest("session", repr(self), "does not sleep", "Await session.sleep() first")
        start = time.perf_counter()

        def woken(root: bytes | None) -> None:
            if root is not None:
                scheduler.flush_cache(root, recompute=True)

        await client.exclusive(partial(resources.wake, weights), woken)
        self._asleep = False
        if self._sleeper in client.host.paused_by:
            client.host.paused_by.remove(self._sleeper)
        client.resume()
        return time.perf_counter() - start
