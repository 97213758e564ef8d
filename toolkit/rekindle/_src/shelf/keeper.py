"""The owner of a shelf's models: one thread that makes one change at a time, as `policy.next_step` says.

Requests come from any thread and event loop. One that finds its model loaded takes a lease under a lock, without the
thread. The others stand in the model's line; the thread wakes them when the model is loaded, or with the error that
kept it from loading. A request that leaves the line changes nothing for the others: loading goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import anyio

from rekindle._src.core.error_frames import forget_frames
from rekindle._src.dispatch.threads import LoopWaker, OneShot, caller, current_waker, fresh
from rekindle._src.shelf.policy import (
    ModelRow,
    ModelState,
    NextChange,
    ShelfLimits,
    Transition,
    admits,
    head_of_line,
    next_step,
)
from rekindle.errors import Busy, InvalidRequest, OutOfMemory, QueueFull, RequestAborted, SessionClosed

log = logging.getLogger("rekindle.shelf")
MOST_WAITING = 4096  # requests in the line of one model
LOOK_AGAIN = 0.05  # seconds between two looks at requests that end without a word: a session's own
RETRY_AFTER = 1.0  # seconds after a failed loading, at least, in which requests get its error


class Loadable(Protocol):
    """One model as its keeper changes it. All methods are called in the keeper's thread, properties in any."""

    session: Any  # while it is open, awake or asleep

    def plan(self, memory: int | None) -> int:
        """Return the bytes that it takes on the device. It will fit into `memory`, if it can. Called in a thread."""
        ...

    async def open(self) -> None: ...
    async def sleep(self, on_request: Callable[[], object], on_wait: Callable[[], object]) -> None:
        """Give its device memory back. Raise `Busy` if something has begun to use it.

        `on_request` is called, in any thread, when its session gets a request; `on_wait` in the thread of a caller that
        is about to wait for one, and may raise.
        """
        ...

    async def wake(self) -> None: ...
    async def close(self) -> None: ...

    @property
    def ended(self) -> bool:
        """True if its session takes no requests any more, though `close` was not called: it crashed, for example."""
        ...

    @property
    def live(self) -> int:
        """The number of requests and trainings in its session."""
        ...

    @property
    def admitted(self) -> int:
        """The number of requests that its session ever had."""
        ...

    @property
    def progress(self) -> str:
        """How far its opening is, in words; empty if there is nothing to say."""
        ...


@dataclasses.dataclass(slots=True)
class Waits:
    """How long the requests of one model waited for it."""

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    loads: int = 0
    wakes: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


class KeptModel:
    """A model with its row of the table, its line, and its users."""

    def __init__(self, name: str, model: Loadable) -> None:
        self.model = model
        self.row: ModelRow = ModelRow(name)
        self.line: list[Waiter] = []
        self.leases: set[Lease] = set()
        self.wanted_since: float | None = None  # by requests in its session, which sleeps
        self.failure: BaseException | None = None  # of the last loading
        self.failed_until: float = 0.0
        self.gone: dict[OneShot[None], bool] = {}  # filled when it is unloaded; True shuts it for new requests
        self.waits: Waits = Waits()
        self._admitted = 0

    def refresh(self, now: float) -> None:
        """Bring what the rule reads up to date."""
        row = self.row
        there = row.state in (ModelState.LOADED, ModelState.SLEEPING)
        row.ended = there and self.model.ended
        row.busy = not row.ended and (bool(self.leases) or (there and self.model.live > 0))
        if row.busy or self.model.admitted != self._admitted:
            row.used_at, self._admitted = now, self.model.admitted
        times = [waiter.since for waiter in self.line] + ([] if self.wanted_since is None else [self.wanted_since])
        row.waiting_since = min(times, default=None)


class Lease:
    """The use of a loaded model, until `release`. It does not sleep meanwhile."""

    def __init__(self, keeper: Keeper, entry: KeptModel, holder: object, waiter: Waiter | None = None) -> None:
        self._keeper, self._entry = keeper, entry
        self.holder: object = holder
        self.waiter: Waiter | None = waiter
        self.session: Any = entry.model.session

    def release(self) -> None:
        """End the use. Harmless a second time, and in any thread."""
        self._keeper.give_back(self._entry, self)


class Waiter:
    """A request in the line of a model: await it for a lease."""

    def __init__(self, keeper: Keeper, entry: KeptModel, since: float, holder: object) -> None:
        self._keeper, self._entry = keeper, entry
        self.since: float = since
        self.holder: object = holder
        self.granted: OneShot[Lease] = OneShot()
        self._cancelled = False

    @property
    def done(self) -> bool:
        return self.granted.filled

    def cancel(self) -> None:
        """Leave the line; the task that awaits it gets `RequestAborted`."""
        self._cancelled = True
        self.granted.fail(_aborted())
        self._keeper.leave(self._entry, self)

    def __await__(self) -> Generator[Any, Any, Lease]:
        return self._wait().__await__()

    async def _wait(self) -> Lease:
        try:
            lease = await self.granted.get()
            if self._cancelled:
                raise _aborted()
        except BaseException:
            self._keeper.leave(self._entry, self)
            raise
        return lease


def _aborted() -> RequestAborted:
    return RequestAborted("the request was cancelled before its model was loaded")


class Keeper:
    """Keeps the models of a shelf within its limits. Any thread may call its public methods."""

    def __init__(
        self,
        models: Mapping[str, Loadable],
        limits: ShelfLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        default_memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Without a limit of memory, `default_memory` is called for one, once, before the first model is loaded."""
        self.limits: ShelfLimits = limits
        self.clock: Callable[[], float] = clock
        self._default_memory: Callable[[], int | None] | None = default_memory if limits.memory is None else None
        self.entries: dict[str, KeptModel] = {name: KeptModel(name, model) for name, model in models.items()}
        self.rows: tuple[ModelRow, ...] = tuple(entry.row for entry in self.entries.values())
        self.ended: OneShot[None] = OneShot()
        self._lock = threading.RLock()  # the collector may drop a waiting coroutine in a thread that holds it
        self._closing = False
        self._thread: threading.Thread | None = None
        self._waker: LoopWaker | None = None
        self._changed: anyio.Event | None = None
        self._opening: anyio.CancelScope | None = None

    # For requests.

    @property
    def closed(self) -> bool:
        return self._closing

    def check(self) -> None:
        """Raise `SessionClosed` if no model is loaded any more."""
        if self._closing:
            raise SessionClosed("the shelf was closed. Make another one")

    def lease_now(self, name: str) -> Lease | None:
        """Return a lease if the model is loaded and its turn lasts; None if the request has to wait."""
        entry = self.entries[name]
        with self._lock:
            self.check()
            now = self.clock()
            if entry.line or not admits(entry.row, self._refreshed(now), self.limits, now):
                return None
            return self._lease(entry, now, Lease(self, entry, caller()))

    def wait(self, name: str) -> Waiter:
        """Stand in the line of a model. Raise `QueueFull` if it is too long, and the error of a recent loading."""
        entry, holder = self.entries[name], caller()
        with self._lock:
            self.check()
            now = self.clock()
            self._refreshed(now)
            if entry.failure is not None and now < entry.failed_until and entry.row.state is ModelState.UNLOADED:
                raise fresh(entry.failure)
            if len(entry.line) >= MOST_WAITING:
                raise QueueFull(f"{MOST_WAITING:,} requests wait for {name!r} already. Send it again later")
            self._check_holder(entry, holder)
            waiter = Waiter(self, entry, now, holder)
            entry.line.append(waiter)
        self._look()
        return waiter

    def _check_holder(self, entry: KeptModel, holder: object) -> None:
        """Refuse to wait for a model that another one, which the same task uses, leaves no room for."""
        others = [other for other in self.entries.values() if not other.row.ended]
        own = [other for other in others if any(lease.holder == holder for lease in other.leases)]
        if not own or entry in own:
            return
        count = len(own) + 1
        size = sum(other.row.nbytes or 0 for other in (*own, entry))
        if (self.limits.max_loaded or count) < count or (self.limits.memory or size) < size:
            names = ", ".join(repr(other.row.name) for other in own)
            problem = f"is awaited by the task that uses {names}, and there is no room for both"
            raise InvalidRequest("name", entry.row.name, problem, "End that use first, or raise max_loaded or memory")

    def _check_holders(self, entry: KeptModel) -> None:
        """Check a line again, now that the size of its model is known."""
        self._refreshed(self.clock())
        for waiter in tuple(entry.line):
            try:
                self._check_holder(entry, waiter.holder)
            except InvalidRequest as error:
                entry.line.remove(waiter)
                waiter.granted.fail(error)

    async def lease(self, name: str) -> Lease:
        """Return a lease once the model is loaded."""
        return self.lease_now(name) or await self.wait(name)

    def give_back(self, entry: KeptModel, lease: Lease) -> None:
        with self._lock:
            if lease not in entry.leases:
                return
            entry.leases.discard(lease)
            entry.row.used_at = self.clock()
        self._look()

    def leave(self, entry: KeptModel, waiter: Waiter) -> None:
        """Take a request out of its line; if it was granted, and nobody got the lease, end that."""
        with self._lock:
            if waiter in entry.line:
                entry.line.remove(waiter)
            lease = next((lease for lease in entry.leases if lease.waiter is waiter), None)
        if lease is not None:
            lease.release()
        self._look()

    def want(self, name: str) -> None:
        """Note that the session of a sleeping model has a request. Called in any thread; returns at once."""
        entry = self.entries[name]
        with self._lock:
            if entry.wanted_since is None:
                entry.wanted_since = self.clock()
        self._look()

    def check_wait(self, name: str) -> None:
        """Raise `InvalidRequest` if the caller's own use of another model keeps a sleeping one from waking."""
        with self._lock:
            self._check_holder(self.entries[name], caller())

    # For the owner of the shelf.

    async def unload(self, name: str, *, stay: bool = False) -> None:
        """Unload a model once no request uses it, and let new ones wait.

        With `stay`, for clients: it stays as long as it has to, and takes new requests until it leaves. As long as
        others use it without a pause this does not return.
        """
        entry = self.entries[name]
        with self._lock:
            self.check()
            if entry.row.state is ModelState.UNLOADED:
                return
            now = self.clock()
            at = max(now, entry.row.stays_until) if stay else now
            entry.row.leaves_at = at if entry.row.leaves_at is None else min(at, entry.row.leaves_at)
            gone: OneShot[None] = OneShot()
            entry.gone[gone] = not stay
            entry.row.shut = any(entry.gone.values())
        self._look()
        try:
            await gone.get()
        except BaseException:  # cancelled: a model in use takes requests again
            with self._lock:
                if gone in entry.gone:
                    del entry.gone[gone]
                    entry.row.leaves_at = entry.row.leaves_at if entry.gone else None
                    entry.row.shut = any(entry.gone.values())
            self._look()
            raise

    def close(self) -> None:
        """Begin the end: lines end with `SessionClosed`, loading is given up, sessions are closed. Returns at once."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._thread is None:
                self.ended.put(None)
            for entry in self.entries.values():
                self._fail_line(entry, SessionClosed("the shelf was closed. Make another one"))
        if self._waker is not None:
            self._waker.post(self._give_up)
        self._look()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    # Under the lock.

    def _refreshed(self, now: float) -> tuple[ModelRow, ...]:
        for entry in self.entries.values():
            entry.refresh(now)
        return self.rows

    def _lease(self, entry: KeptModel, now: float, lease: Lease) -> Lease:
        entry.leases.add(lease)
        entry.row.used_at = now
        return lease

    def _grant(self, entry: KeptModel, now: float) -> None:
        """Give a lease to everyone in the line of a loaded model."""
        line, entry.line, entry.wanted_since = entry.line, [], None
        for waiter in line:
            entry.waits.add(now - waiter.since)
            waiter.granted.put(self._lease(entry, now, Lease(self, entry, waiter.holder, waiter)))

    def _fail_line(self, entry: KeptModel, error: BaseException) -> None:
        line, entry.line, entry.wanted_since = entry.line, [], None
        for waiter in line:
            waiter.granted.fail(error)

    # The thread.

    def _look(self) -> None:
        """Have the thread look at the table."""
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="rekindle shelf", daemon=True)
                self._thread.start()
            waker = self._waker
        if waker is not None:
            waker.post(self._set_changed)

    def _set_changed(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _give_up(self) -> None:
        if self._opening is not None:
            self._opening.cancel()

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except BaseException as error:  # a defect: no request may wait for ever
            log.exception("the thread of a shelf failed")
            with self._lock:
                self._closing = True
                for entry in self.entries.values():
                    self._fail_line(entry, error)
        finally:
            for entry in self.entries.values():
                for gone in tuple(entry.gone):
                    gone.put(None)
            self.ended.put(None)

    async def _main(self) -> None:
        with self._lock:
            self._waker = current_waker()
        while not self._closing:
            self._changed = anyio.Event()
            with self._lock:
                step, seconds = self._next()
            if step.action is not None:
                await self._make(step)
            else:
                with anyio.move_on_after(seconds):
                    await self._changed.wait()
        for entry in self.entries.values():
            await self._close(entry)

    def _next(self) -> tuple[NextChange, float | None]:
        """Return the next change, or the seconds to wait for one. Lines of models that may take requests are let in."""
        now = self.clock()
        rows = self._refreshed(now)
        for entry in self.entries.values():
            if (entry.line or entry.wanted_since is not None) and admits(entry.row, rows, self.limits, now):
                self._grant(entry, now)
                entry.refresh(now)
        step = next_step(rows, self.limits, now)
        seconds = None if step.at is None else max(0.0, step.at - now)
        unheard = any(entry.row.busy and not entry.leases for entry in self.entries.values())
        if unheard and (head_of_line(rows) is not None or any(row.leaves_at is not None for row in rows)):
            seconds = min(LOOK_AGAIN, LOOK_AGAIN if seconds is None else seconds)
        if unheard and self.limits.idle_unload is not None:
            seconds = min(self.limits.idle_unload, self.limits.idle_unload if seconds is None else seconds)
        return step, seconds

    async def _make(self, step: NextChange) -> None:
        entry = self.entries[step.name]
        match step.action:
            case Transition.PLAN:
                await self._plan(entry)
            case Transition.LOAD:
                await self._load(entry, entry.model.open)
            case Transition.WAKE:
                await self._load(entry, entry.model.wake)
            case Transition.SLEEP:
                await self._sleep(entry)
            case Transition.UNLOAD:
                await self._unload(entry)
            case Transition.REFUSE:
                self._refuse(entry)

    async def _plan(self, entry: KeptModel) -> None:
        with self._failing(entry):
            if self._default_memory is not None:
                self.limits = self.limits._replace(memory=await anyio.to_thread.run_sync(self._default_memory))
                self._default_memory = None
            entry.row.nbytes = await anyio.to_thread.run_sync(entry.model.plan, self.limits.memory)
            with self._lock:
                self._check_holders(entry)

    def _refuse(self, entry: KeptModel) -> None:
        needed, memory = entry.row.nbytes or 0, self.limits.memory or 0
        error = OutOfMemory(
            f"{entry.row.name!r} takes {needed / 2**20:,.0f} MiB of weights and pages, and the shelf's models may take "
            f"{memory / 2**20:,.0f}. Raise memory, or lower device_memory or quantize"
        )
        entry.row.nbytes = None  # planned anew at the next request
        with self._failing(entry):
            raise error

    @contextmanager
    def _failing(self, entry: KeptModel) -> Iterator[None]:
        """Tell an error of the block to all requests in the line."""
        began = self.clock()
        try:
            yield
        except Exception as error:
            now = self.clock()
            log.error("the model %r could not be loaded: %s", entry.row.name, error)
            forget_frames(error)  # it is kept, and they hold what was read so far
            with self._lock:
                entry.row.state = ModelState.UNLOADED
                entry.failure, entry.failed_until = error, now + max(RETRY_AFTER, now - began)
                self._fail_line(entry, error)

    async def _load(self, entry: KeptModel, bring: Callable[[], Any]) -> None:
        waking, row, began = entry.model.session is not None, entry.row, self.clock()
        row.state = ModelState.LOADING
        with self._failing(entry):
            try:
                with anyio.CancelScope() as self._opening:
                    if self._closing:
                        return
                    await bring()
                if self._closing:
                    return
            except BaseException as error:
                log.debug("the model %r could not be loaded", row.name, exc_info=error)
                forget_frames(error)  # they hold arrays of the model, which `close` collects
                await self._close(entry)  # of one that could not wake, too: its requests end
                raise
            finally:
                self._opening = None
            with self._lock:
                now = self.clock()
                row.state, row.loaded_at, row.seconds, entry.failure = ModelState.LOADED, now, now - began, None
                row.used_at = now
                entry.waits.wakes += waking
                entry.waits.loads += not waking
                self._grant(entry, now)
            log.info("%s %r in %.2f s", "woke" if waking else "loaded", row.name, row.seconds)

    async def _sleep(self, entry: KeptModel) -> None:
        if not self._claim(entry):
            return
        try:
            await entry.model.sleep(lambda: self.want(entry.row.name), lambda: self.check_wait(entry.row.name))
        except Busy:
            entry.row.state = ModelState.LOADED
        except Exception as error:  # such as pinned pages
            log.warning("%r can't sleep, so it is unloaded: %s", entry.row.name, error)
            await self._close(entry)
        else:
            entry.row.state = ModelState.SLEEPING
            log.info("%r sleeps", entry.row.name)

    async def _unload(self, entry: KeptModel) -> None:
        if not self._claim(entry):
            return
        await self._close(entry)
        log.info("%r is unloaded", entry.row.name)

    def _claim(self, entry: KeptModel) -> bool:
        """Claim a model for a change; false if a request came to it since the rule was asked."""
        with self._lock:
            entry.refresh(self.clock())
            still = not entry.row.busy
            if still:
                entry.row.state, entry.wanted_since = ModelState.UNLOADING, None
            return still

    async def _close(self, entry: KeptModel) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await entry.model.close()
        except Exception as error:
            log.warning("closing %r failed: %s", entry.row.name, error)
        with self._lock:
            entry.row.state, entry.row.leaves_at, entry.wanted_since = ModelState.UNLOADED, None, None
            entry.row.shut = False
            entry.leases.clear()  # of a session that had ended
            gone, entry.gone = entry.gone, {}
        for one in gone:
            one.put(None)
