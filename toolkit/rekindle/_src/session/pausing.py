"""Pausing: no step runs but those that are asked for one by one."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rekindle._src.core import html
from rekindle._src.dispatch.mailbox import OneShot
from rekindle._src.dispatch.messages import Pause, Resume
from rekindle._src.dispatch.wakeups import caller, run_sync

if TYPE_CHECKING:
    from rekindle._src.session.session import Session


class Paused:
    """No step runs inside the block but those that `step()` asks for; entering waits for the steps in flight."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._by: object = None

    def __repr__(self) -> str:
        return f"<Paused {self._session!r}: use it in `async with` or `with`>"

    def _repr_html_(self) -> str:
        return html.line(repr(self))

    async def __aenter__(self) -> Session:
        session = self._session
        session._host.check()
        slot: OneShot[None] = OneShot()
        session._host.send(Pause(slot), slot)
        session._pauses += 1
        try:
            await slot.get()
        except BaseException:
            self._resume()
            raise
        self._by = caller()
        session._host.paused_by.append(self._by)
        return session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resume()

    def _resume(self) -> None:
        if self._by is not None:
            self._session._host.paused_by.remove(self._by)
            self._by = None
        self._session._pauses -= 1
        self._session._host.send(Resume(), OneShot())

    def __enter__(self) -> Session:
        return run_sync(self.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resume()
