"""Ways to wake somebody in another thread or on another event loop: `Port` (one per loop), `Bell` (one per waiter)."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")
Callback = Callable[[], object]

# ipykernel turns an interrupt into a cancellation that it schedules without waking the loop, so that an idle asyncio
# loop would sleep through it. While somebody waits, the loop therefore turns ten times a second (5 µs each time).
KEEP_ALIVE = 0.1


class Port:
    """Runs callbacks on one event loop, from any thread; at most one wake-up is on its way however many are posted."""

    def __init__(self, loop: object, wake: str) -> None:
        # Weak, because ports are kept per loop: a strong reference would keep every finished loop alive.
        self._loop = weakref.ref(loop)
        self._wake = wake
        self._posted: deque[Callback] = deque()
        self._woken = False
        self._waiting = 0
        self._ticking = False

    def post(self, callback: Callback) -> None:
        """Run `callback`, which must not raise, on the loop soon. Never blocks; does nothing on a finished loop."""
        self._posted.append(callback)
        if self._woken:
            return
        self._woken = True
        loop = self._loop()
        try:
            if loop is None:
                raise RuntimeError("the loop is gone")
            getattr(loop, self._wake)(self._run)
        except RuntimeError:  # closed asyncio loop, or trio.RunFinishedError
            self._posted.clear()

    def _run(self) -> None:
        # The flag falls before the callbacks are taken: one that is posted meanwhile wakes the loop once more at worst.
        self._woken = False
        while self._posted:
            self._posted.popleft()()

    async def wait(self, event: anyio.Event) -> None:
        """Wait on this port's loop."""
        self._waiting += 1
        if not self._ticking and self._wake == "call_soon_threadsafe":
            self._ticking = True
            asyncio.get_running_loop().call_later(KEEP_ALIVE, self._tick)
        try:
            await event.wait()
        finally:
            self._waiting -= 1

    def _tick(self) -> None:
        self._ticking = self._waiting > 0
        if self._ticking:
            asyncio.get_running_loop().call_later(KEEP_ALIVE, self._tick)


_port: anyio.lowlevel.RunVar[Port] = anyio.lowlevel.RunVar("rekindle_port")


def current_port() -> Port:
    """The port of the event loop that runs now."""
    try:
        return _port.get()
    except LookupError:
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_run():
            port = Port(trio.lowlevel.current_trio_token(), "run_sync_soon")
        else:
            port = Port(asyncio.get_running_loop(), "call_soon_threadsafe")
        _port.set(port)
        return port


class Bell(Protocol):
    """Wakes its one waiter; ringing is safe from any thread, never blocks, and rings before the wait are kept."""

    def ring(self) -> None: ...
    async def wait(self) -> None: ...


class LoopBell:
    """The bell of a coroutine."""

    def __init__(self) -> None:
        self._port = current_port()
        self._event = anyio.Event()
        self._rung = False

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._port.post(self._set)

    def _set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._port.wait(self._event)
        # Made ready again before the waiter looks at what changed, so that a ring during that look is not lost.
        self._event = anyio.Event()
        self._rung = False


class ThreadBell:
    """The bell of a thread without a loop: its wait blocks the thread, so the awaiting coroutine is never suspended."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        while not self._event.wait(KEEP_ALIVE):  # in slices: Windows has no interruptible wait without a timeout
            pass
        self._event.clear()


class _Blocking(threading.local):
    depth = 0


_blocking = _Blocking()


def new_bell() -> Bell:
    """The kind that suits who calls: a coroutine on its loop, or a thread inside `run_sync`."""
    return ThreadBell() if _blocking.depth else LoopBell()


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the client in this thread, blocking it; this is all that the sync client consists of.

    The client awaits nothing but bells, and in here a bell blocks the thread. No loop is needed, and one that runs in
    this thread already, as in a notebook cell, does no harm.
    """
    _blocking.depth += 1
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        _blocking.depth -= 1
    coroutine.close()
    raise AssertionError("a client coroutine awaited something other than a bell")
