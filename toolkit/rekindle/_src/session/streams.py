"""Iterators over the deltas of a handle, for code with an event loop and without one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from rekindle._src.core import html
from rekindle._src.core.records import TextDelta
from rekindle._src.dispatch.mailbox import Mailbox, fresh
from rekindle._src.dispatch.wakeups import run_sync

if TYPE_CHECKING:
    from rekindle._src.session.handle import Handle


class Stream(AsyncIterator[TextDelta]):
    """An iterator over the deltas of a handle; several can read the same handle, each at its own pace."""

    # Any: the signature of a public class names no private type.
    def __init__(self, handle: Handle[Any], mailbox: Any, following: Any, *, scoped: bool) -> None:
        self._handle = handle
        self._mailbox: Mailbox = mailbox
        self._following: Callable[[int], Awaitable[None]] = following  # waits for more deltas than this number
        self._scoped = scoped  # the request ends with the loop over it
        self._seen = 0
        self._ended = False

    def __repr__(self) -> str:
        return f"<Stream of {self._handle!r}, {self._seen} deltas read>"

    def _repr_html_(self) -> str:
        return str(html.line(repr(self)))

    async def __anext__(self) -> TextDelta:
        """Wait for the next delta and return it."""
        mailbox, seen = self._mailbox, self._seen
        if seen >= len(mailbox.deltas):
            await self._following(seen)
        if seen < len(mailbox.deltas):
            self._seen = seen + 1
            return mailbox.deltas[seen]
        self._ended = True
        if mailbox.error is not None:
            raise fresh(mailbox.error)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading. The request of `session.stream` is aborted, as it is by `break`."""
        self._leave()

    def _leave(self) -> None:
        if not self._ended and self._scoped:
            self._ended = True
            self._handle.cancel()

    def __del__(self) -> None:
        self._leave()


class SyncStream(Iterator[TextDelta]):
    """A stream for code without an event loop: `for` over it blocks this thread."""

    # Any: a `ToolLoop` has such a stream, too.
    def __init__(self, handle: Any) -> None:
        self._stream: Any = aiter(handle)

    def __repr__(self) -> str:
        return f"<Sync{repr(self._stream)[1:]}"

    def _repr_html_(self) -> str:
        return str(html.line(repr(self)))

    def __next__(self) -> TextDelta:
        """Return the next delta. Blocks this thread until it is there."""
        try:
            delta: TextDelta = run_sync(self._stream.__anext__())
            return delta
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Stop reading. The request of `session.stream` is aborted, as it is by `break`."""
        self._stream._leave()

    if not TYPE_CHECKING:

        def __aiter__(self) -> NoReturn:
            raise TypeError("stream_sync(…) is for plain `for`; with `async for` use session.stream(…)")
