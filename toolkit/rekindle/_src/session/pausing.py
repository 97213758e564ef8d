"""Pausing: no step runs but those requested one by one."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, TypeVar

from rekindle._src.core import html
from rekindle._src.dispatch.mailbox import OneShot
from rekindle._src.dispatch.messages import Pause, Resume
from rekindle._src.dispatch.wakeups import caller, run_sync
from rekindle._src.session.client import Client

S = TypeVar("S")


class Paused(Generic[S]):
    """A block in which no step runs but those of `step()`. Entering waits for the steps in flight.

    Entering returns the session.
    """

    # Any: the signature of a public class names no private type.
    def __init__(self, client: Any, session: S) -> None:
        self._client: Client = client
        self._session = session
        self._caller: object = None

    def __repr__(self) -> str:
        return f"<Paused {self._session!r}: use it in `async with` or `with`>"

    def _repr_html_(self) -> str:
        return str(html.line(repr(self)))

    async def __aenter__(self) -> S:
        host = self._client.host
        host.check()
        quiet: OneShot[None] = OneShot()
        host.send(Pause(quiet), quiet)
        self._client.pauses += 1
        try:
            await quiet.get()
        except BaseException:
            self._resume()
            raise
        self._caller = caller()
        host.paused_by.append(self._caller)
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resume()

    def _resume(self) -> None:
        host = self._client.host
        if self._caller is not None:
            host.paused_by.remove(self._caller)
            self._caller = None
        self._client.pauses -= 1
        host.send(Resume(), OneShot())

    def __enter__(self) -> S:
        return run_sync(self.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resume()
