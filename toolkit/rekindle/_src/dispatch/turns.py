"""Turns: limited concurrent work, shared fairly between callers."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


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
