"""Calls: what session methods return to be awaited, without the warning when they are not."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from rekindle._src.core import html
from rekindle._src.dispatch.wakeups import run_sync

T = TypeVar("T")


class Call(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine object in every respect but one: nothing complains when it is never awaited.

    `await`, asyncio.create_task, asyncio.gather, nursery.start_soon and TaskGroup.start_soon take it. Nothing happens
    before that. It may be awaited again for the same result.
    """

    _running: Coroutine[Any, Any, T] | None = None

    async def _result(self) -> T:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, Any, T]:
        return self._result().__await__()

    def result_sync(self) -> T:
        """The same result, blocking this thread; for code without an event loop."""
        return run_sync(self._result())

    def send(self, value: Any) -> Any:
        if self._running is None:
            self._running = self._result()
        return self._running.send(value)

    def throw(self, *error: Any) -> Any:
        if self._running is None:
            self._running = self._result()
        return self._running.throw(*error)

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: await it>"

    def _repr_html_(self) -> str:
        return html.line(repr(self))


class Once(Call[T]):
    """A call whose result is what a coroutine function returns."""

    def __init__(self, function: Any, *arguments: Any, name: str = "") -> None:
        self._function, self._arguments = function, arguments
        self._name = name or function.__name__

    async def _result(self) -> T:
        result: T = await self._function(*self._arguments)
        return result

    def __repr__(self) -> str:
        return f"<Call of {self._name}: nothing happens until it is awaited>"
