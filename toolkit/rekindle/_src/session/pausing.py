"""A session that does nothing for a while: one that runs no steps, and one that has given the device's memory back."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from rekindle._src.core.drawable import Drawable, Record
from rekindle._src.core.records import PageMove
from rekindle._src.dispatch.backend import Exclusive
from rekindle._src.dispatch.host import Dispatch
from rekindle._src.dispatch.threads import OneShot, caller, run_sync
from rekindle._src.session.client import Client
from rekindle.errors import Busy, InvalidRequest, RekindleError, RequestFailed

log = logging.getLogger("rekindle.engine")
RETRY_AFTER = 1.0  # seconds after which a session with a training may be asked to sleep again


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


OnRequest = Callable[[], object]


async def sleep(
    client: Client, session: str, drop: bool, on_request: OnRequest | None = None, on_wait: OnRequest | None = None
) -> SleepReport:
    """Give the device's memory back until `wake`. `session` is its name for messages.

    With `on_request`, requests may be awaited by anyone meanwhile. It is called on the session's loop for each request
    that comes, and once for those that are there already; it sees to it that the session wakes. `on_wait` is called in
    the thread of a caller that is about to wait for one, and may raise; with it, a training raises `Busy`.
    """
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
    client.asleep = True  # from here on, no training begins
    try:
        if on_wait is not None and client.trainings:
            raise Busy(f"{session} has a training that runs. Await it, or cancel it", RETRY_AFTER)
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
    if on_request is None:
        client.sleeper = caller()
        client.host.paused_by.append(client.sleeper)
    else:
        client.host.on_wait = on_wait
        await client.host.call(partial(_answer_requests, client, on_request)).get()
    return SleepReport(freed.weights, freed.pages, len(moves), time.perf_counter() - start)


def _answer_requests(client: Client, on_request: OnRequest, dispatch: Dispatch) -> None:
    """Call `on_request` for each request from now on, and now if requests are there already."""
    client.host.on_request = on_request
    if dispatch.mailboxes:
        on_request()


async def wake(client: Client, session: str, weights: Any) -> float:
    """Go on after `sleep`, with other weights unless they are None. Return how many seconds that took."""
    client.host.check()
    device = client.engine.device
    if not client.asleep:
        raise InvalidRequest("session", session, "does not sleep", "Await session.sleep() first")
    start = time.perf_counter()

    def bring_back() -> _Woken:
        if client.asleep:
            return _Woken(True, device.wake(weights))
        if weights is not None:
            fix = "Use swap_weights(weights)"
            raise InvalidRequest("session", session, "was woken by a request in the meantime", fix)
        return _Woken(False)

    await client.exclusive(bring_back, partial(_go_on, client))
    return time.perf_counter() - start


class _Woken(NamedTuple):
    """How an attempt to wake ended, on the device thread."""

    here: bool  # False if another attempt came first
    root: bytes | None = None  # of the cache, for other weights
    error: Exception | None = None


def _go_on(client: Client, woken: _Woken) -> None:
    """Let steps begin again. Called on the session's loop."""
    if not woken.here:
        return
    if woken.root is not None:
        client.engine.scheduler.flush_cache(woken.root, recompute=True)
    client.host.on_request = client.host.on_wait = None
    client.asleep = False
    if client.sleeper in client.host.paused_by:
        client.host.paused_by.remove(client.sleeper)
    client.resume()


class FirstRequest:
    """Wakes a sleeping session at the first request, as `sleep` calls it.

    If that fails, the requests that wait end with the error, and the next one tries again.
    """

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)  # the host holds this object, and must not keep the session open

    def __call__(self) -> None:
        client = self._client()
        if client is not None:
            client.host.on_request = None
            reply: OneShot[_Woken] = OneShot()
            client.host.send(Exclusive(partial(self._wake, client), partial(self._woken, client), reply), reply)

    def _wake(self, client: Client) -> _Woken:
        if not client.asleep:
            return _Woken(False)
        try:
            return _Woken(True, client.engine.device.wake(None))
        except Exception as error:
            return _Woken(True, None, error)

    def _woken(self, client: Client, woken: _Woken) -> None:
        error = woken.error
        if error is None:
            _go_on(client, woken)
            return
        log.error("a session could not wake for a request: %s", error)
        failed = error if isinstance(error, RekindleError) else RequestFailed(f"the session could not wake: {error}")
        client.host.call(partial(self._end_requests, client, failed))

    def _end_requests(self, client: Client, error: RekindleError, dispatch: Dispatch) -> None:
        dispatch.abort_all(error)
        client.host.on_request = self


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
