"""Calls: the awaitable results of session methods."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from rekindle._src.core.drawable import Drawable
from rekindle._src.dispatch.threads import run_sync
from rekindle.errors import NotPicklable

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_PROTOCOL = frozenset({"send", "throw", "close"})  # called by event loops


class Call(Drawable, Coroutine[object, object, T_co], Generic[T_co]):
    """A coroutine object that may be awaited more than once, for the same result.

    `await`, asyncio.create_task, asyncio.gather, nursery.start_soon and TaskGroup.start_soon take it. Nothing happens
    before that. Dropping a generation that was never awaited is silent; dropping a call that would have changed the
    session warns, as Python does for coroutines.
    """

    _awaited: str = "await …"  # the source text of awaiting it, for messages
    _running: Coroutine[object, object, T_co] | None = None

    async def _result(self) -> T_co:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._result().__await__()

    def result_sync(self) -> T_co:
        """Return the same result, blocking this thread; for code without an event loop."""
        return run_sync(self._result())

    def send(self, value: object) -> object:
        """Advance it by one step; event loops do this."""
        if self._running is None:
            self._running = self._result()
        return self._running.send(value)

    def throw(self, *error: object) -> object:
        """Raise an exception where it waits; event loops do this."""
        if self._running is None:
            self._running = self._result()
        throw: Callable[..., object] = self._running.throw
        return throw(*error)

    def close(self) -> None:
        """End it where it waits, if it was started."""
        if self._running is not None:
            self._running.close()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _PROTOCOL]

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(f"a {type(self).__name__}")

    if not TYPE_CHECKING:  # for a type checker these don't exist, so that it marks their use

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # looked up by libraries, not written by people
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(
                f"{name!r} is asked of a call, not of its result: write done = {self._awaited} and done.{name}"
            )

        def __iter__(self) -> NoReturn:
            raise TypeError(f"a call has no items: write done = {self._awaited}, and iterate over done")

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(f"a call has no items: write done = {self._awaited} and done[{index!r}]")

        def __len__(self) -> NoReturn:
            raise TypeError(f"a call has no length: write done = {self._awaited} and len(done)")

        def __add__(self, other: object) -> NoReturn:
            raise TypeError(f"a call is no text: write done = {self._awaited} and done.text")

        __radd__ = __add__

        def __contains__(self, item: object) -> NoReturn:
            raise TypeError(f"a call holds nothing: write done = {self._awaited}, and look into done")

        def __enter__(self) -> NoReturn:
            raise TypeError(f"{self!r} is no context manager: await it")

        def __exit__(self, *details: object) -> None: ...

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: await it>"


class Once(Call[T]):
    """A call of a coroutine function that changes the session; a RuntimeWarning is issued if it was never awaited."""

    _started = False

    def __init__(self, function: Callable[..., Coroutine[object, None, T]], *arguments: object, name: str = "") -> None:
        self._function, self._arguments = function, arguments
        self._name = name or function.__name__
        self._awaited = f"await ….{self._name}(…)"

    async def _result(self) -> T:
        self._started = True
        return await self._function(*self._arguments)

    def throw(self, *error: object) -> object:
        """Raise an exception where it waits; event loops do this."""
        self._started = True
        return super().throw(*error)

    def close(self) -> None:
        """End it where it waits. If it was not started, it never will be, and there is no warning."""
        self._started = True
        super().close()

    def __del__(self) -> None:
        if not self._started and sys is not None and not sys.is_finalizing():  # modules are cleared at the end
            warnings.warn(
                f"{self._name}(…) was never awaited, so it did nothing: write await ….{self._name}(…), or "
                f"….{self._name}(…).result_sync() in code without an event loop",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        return f"<Call of {self._name}: nothing happens until it is awaited>"
