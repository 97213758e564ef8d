"""Admission: how many sequences may be in the session at once, which bounds every queue behind it; and fair turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from rekindle._src.dispatch.wakeups import Wakeup, new_wakeup
from rekindle.errors import SessionClosed


class _Waiter:
    __slots__ = ("admitted", "count", "wakeup")

    def __init__(self, count: int, wakeup: Wakeup) -> None:
        self.count, self.wakeup, self.admitted = count, wakeup, False


class AdmissionLimiter:
    """Counts free places and admits waiting callers first come, first served. Usable from any thread."""

    def __init__(self, places: int) -> None:
        self.places: int = places
        self.closed: BaseException | None = None
        self._free = places
        self._line: deque[_Waiter] = deque()
        # Reentrant: the garbage collector may close a waiting coroutine in a thread that holds the lock already.
        self._lock = threading.RLock()

    @property
    def inside(self) -> int:
        """Places that are taken."""
        return self.places - self._free

    @property
    def waiting(self) -> int:
        """Callers that wait for places."""
        return len(self._line)

    def try_enter(self, count: int) -> bool:
        """Take `count` places if they are free and no caller waits; false if not. Raises `SessionClosed`."""
        with self._lock:
            if self.closed is not None:
                raise self._refusal()
            if self._line or self._free < count:
                return False
            self._free -= count
            return True

    async def enter(self, count: int, unless: Callable[[], bool] = lambda: False) -> bool:
        """Take `count` places, in turn; false if `unless()` turned true meanwhile; see `recheck`."""
        if self.try_enter(count):
            return True
        waiter = _Waiter(count, new_wakeup())
        with self._lock:
            self._line.append(waiter)
            self._admit()
        try:
            while not waiter.admitted:
                if self.closed is not None:
                    raise self._refusal()
                if unless():
                    self._give_up(waiter)
                    return False
                await waiter.wakeup.wait()
        except BaseException:
            self._give_up(waiter)
            raise
        return True

    def _give_up(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter.admitted:
                self.leave(waiter.count)
            else:
                self._line.remove(waiter)
                self._admit()

    def recheck(self) -> None:
        """Make every waiting caller evaluate its `unless` again."""
        for waiter in tuple(self._line):
            waiter.wakeup.wake()

    def leave(self, count: int = 1) -> None:
        """Give `count` places back."""
        with self._lock:
            self._free += count
            assert self._free <= self.places, "more places were given back than taken"
            self._admit()

    def resize(self, places: int) -> None:
        """Change the number of places. If more are taken, no caller is admitted until enough were given back."""
        with self._lock:
            self._free += places - self.places
            self.places = places
            self._admit()

    def close(self, error: BaseException) -> None:
        """Refuse every caller from now on, those that wait included."""
        with self._lock:
            if self.closed is None:
                self.closed = error
        self.recheck()

    def _admit(self) -> None:
        while self._line and self._line[0].count <= self._free and self.closed is None:
            waiter = self._line.popleft()
            self._free -= waiter.count
            waiter.admitted = True
            waiter.wakeup.wake()

    def _refusal(self) -> SessionClosed:
        assert self.closed is not None
        refusal = SessionClosed(str(self.closed))
        refusal.__cause__ = self.closed.__cause__
        return refusal


class Turns:
    """Lets `places` tasks of one loop work at a time. Waiting callers take turns, each with its oldest task first."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[anyio.Event]] = {}  # the caller whose turn is next stands first

    @asynccontextmanager
    async def turn(self, caller: str = "") -> AsyncIterator[None]:
        """Work within the block, when there is a place. A task that is cancelled while it waits leaves the line."""
        await self._enter(caller)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, caller: str) -> None:
        if self._free:
            self._free -= 1
            return
        begin = anyio.Event()
        line = self._waiting.setdefault(caller, deque())
        line.append(begin)
        try:
            await begin.wait()
        except BaseException:
            if begin.is_set():  # its turn came in the meantime
                self._leave()
            else:
                line.remove(begin)
                if not line and self._waiting.get(caller) is line:
                    del self._waiting[caller]
            raise

    def _leave(self) -> None:
        if not self._waiting:
            self._free += 1
            return
        caller = next(iter(self._waiting))
        line = self._waiting.pop(caller)
        line.popleft().set()
        if line:
            self._waiting[caller] = line  # behind all others
