"""Ways to wake a waiter in another thread or on another event loop: `LoopWaker` per loop, `Wakeup` per waiter."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import anyio

T = TypeVar("T")
Callback = Callable[[], object]

# ipykernel turns an interrupt into a cancellation that it schedules without waking the loop, so that an idle asyncio
# loop would sleep through it. While a coroutine waits, the loop therefore wakes ten times a second (5 µs each time).
KEEP_ALIVE = 0.1


class LoopWaker:
    """Runs callbacks on one event loop, from any thread; at most one wake-up is on its way however many are posted."""

    def __init__(self, loop: Any) -> None:
        # Weak, because each thread remembers its last waker: a strong reference would keep finished loops alive.
        self.loop = weakref.ref(loop)
        self._posted: deque[Callback] = deque()
        self._woken = False

    def post(self, callback: Callback) -> None:
        """Run `callback`, which must not raise, on the loop soon. Never blocks; does nothing on a finished loop."""
        self._posted.append(callback)
        if self._woken:
            return
        self._woken = True
        loop = self.loop()
        try:
            if loop is None:
                raise RuntimeError("the loop is gone")
            self._wake(loop)
        except RuntimeError:  # closed asyncio loop, or trio.RunFinishedError
            self._posted.clear()
            self._woken = False

    def _run(self) -> None:
        # Cleared before the callbacks are taken: one that is posted meanwhile wakes the loop once more at worst.
        self._woken = False
        while self._posted:
            self._posted.popleft()()

    def _wake(self, loop: Any) -> None:
        raise NotImplementedError

    def wakeup(self) -> Wakeup:
        """Return a wakeup for a coroutine on this loop."""
        raise NotImplementedError


class AsyncioWaker(LoopWaker):
    """For asyncio. Wakes the loop every `KEEP_ALIVE` seconds while a coroutine waits on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.waiting = 0
        self._ticking = False

    def _wake(self, loop: Any) -> None:
        loop.call_soon_threadsafe(self._run)

    def wakeup(self) -> Wakeup:
        return AsyncioWakeup(self)

    def keep_alive(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._ticking:
            self._ticking = True
            loop.call_later(KEEP_ALIVE, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = False
        if self.waiting:
            self.keep_alive(loop)


class TrioWaker(LoopWaker):
    """For trio."""

    def _wake(self, loop: Any) -> None:
        loop.run_sync_soon(self._run)

    def wakeup(self) -> Wakeup:
        return TrioWakeup(self)


class _Here(threading.local):
    """This thread's last waker, and how many `run_sync` it is inside."""

    waker: LoopWaker | None = None
    blocking = 0


_here = _Here()
_wakers: weakref.WeakKeyDictionary[Any, LoopWaker] = weakref.WeakKeyDictionary()


def _trio_in_use() -> Any:
    """Return `trio.lowlevel` if this thread is inside a run of trio, or None.

    A module that another thread has begun to import lacks its names, and runs nothing yet.
    """
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)
    running = getattr(lowlevel, "in_trio_run", None)
    return lowlevel if running is not None and running() else None


def current_waker() -> LoopWaker:
    """Return the waker of the event loop that runs now."""
    # Trio first: an IPython cell under `%autoawait trio` runs trio inside a callback of the kernel's asyncio loop.
    trio = _trio_in_use()
    on_trio = trio is not None
    loop: Any = asyncio.get_running_loop() if trio is None else trio.current_trio_token()
    waker = _here.waker
    if waker is None or waker.loop() is not loop:
        waker = _wakers.get(loop)
        if waker is None:
            waker = _wakers[loop] = TrioWaker(loop) if on_trio else AsyncioWaker(loop)
        _here.waker = waker
    return waker


class Wakeup(Protocol):
    """Wakes its one waiter. `wake` may be called from any thread and never blocks.

    A call before the wait is kept. A wait may end without one, so waiters check their condition again.
    """

    def wake(self) -> None: ...
    async def wait(self) -> None: ...


class AsyncioWakeup:
    """A bare future: asyncio.Event and anyio.Event cost 3 µs more for each wake-up."""

    __slots__ = ("_future", "_signalled", "_waker")

    def __init__(self, waker: AsyncioWaker) -> None:
        self._waker = waker
        self._future: asyncio.Future[None] | None = None
        self._signalled = False

    def wake(self) -> None:
        if not self._signalled:
            self._signalled = True
            self._waker.post(self._set)

    def _set(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        if not self._signalled:
            waker = self._waker
            loop = asyncio.get_running_loop()
            self._future = loop.create_future()
            waker.waiting += 1
            waker.keep_alive(loop)
            try:
                # A wake from another thread at this point is posted, so it runs after the await has begun.
                await self._future
            finally:
                waker.waiting -= 1
                self._future = None
        # Cleared before the waiter checks its condition, so that a wake during the check is not lost.
        self._signalled = False


class TrioWakeup:
    """An event that is replaced after each wait."""

    __slots__ = ("_event", "_signalled", "_waker")

    def __init__(self, waker: TrioWaker) -> None:
        self._waker = waker
        self._event = anyio.Event()
        self._signalled = False

    def wake(self) -> None:
        if not self._signalled:
            self._signalled = True
            self._waker.post(self._set)

    def _set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = anyio.Event()
        self._signalled = False


class ThreadWakeup:
    """For a thread without a loop: its wait blocks the thread and never suspends the coroutine."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        while not self._event.wait(KEEP_ALIVE):  # in slices: Windows has no interruptible wait without a timeout
            pass
        self._event.clear()


def caller() -> object:
    """Return the asyncio or trio task that runs now, or this thread's identifier if none does."""
    trio = _trio_in_use()
    task: object = None
    with contextlib.suppress(RuntimeError):  # no loop runs in this thread
        task = asyncio.current_task() if trio is None else trio.current_task()
    return threading.get_ident() if task is None else task


def new_wakeup() -> Wakeup:
    """Return a wakeup for the caller: a coroutine on its loop, or a thread inside `run_sync`."""
    return ThreadWakeup() if _here.blocking else current_waker().wakeup()


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a client coroutine in this thread, blocking it; every `…_sync` method is made of this.

    Client coroutines await nothing but wakeups, and inside `run_sync` a wakeup blocks the thread. So no loop is needed,
    and one that already runs in this thread, as in a notebook cell, does no harm.
    """
    _here.blocking += 1
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        _here.blocking -= 1
    coroutine.close()
    raise AssertionError("a client coroutine awaited something other than a wakeup")


def blocks() -> bool:
    """True if the caller is inside `run_sync`, so that it may block this thread and can't await a loop."""
    return _here.blocking > 0
