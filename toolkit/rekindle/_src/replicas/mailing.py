"""News of sequences for a fleet, merged while they wait."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import time

import anyio

from rekindle._src.core.own_failure import one_line
from rekindle._src.core.records import FinishReason, TokenEvent
from rekindle._src.dispatch.mailbox import Mailbox, until, wake
from rekindle._src.dispatch.wakeups import Wakeup
from rekindle._src.replicas.wire import News
from rekindle.errors import ProcessLost, RequestFailed, SessionClosed

TOGETHER = 0.01  # seconds between two mails at least: tokens of this time travel together


class Box:
    """The news for one fleet, and its running requests. `put` may be called in any thread."""

    def __init__(self) -> None:
        self.running: dict[str, Mailbox] = {}
        self.beginning: set[str] = set()  # requests being taken in that were not aborted
        self.called = time.monotonic()  # time of the fleet's last call
        self._pending: dict[str, News] = {}
        self._lock = threading.Lock()
        self._wakeups: list[Wakeup] = []
        self._urgent = False  # a first token or an end is sent at once
        self._sent_at = 0.0

    def put(self, news: News) -> None:
        """Add the news of a sequence."""
        request_id = news.event.request_id
        with self._lock:
            first, earlier = not self._pending, self._pending.get(request_id)
            if earlier is not None:
                waited = news.waited if earlier.waited is None else earlier.waited
                news = News(earlier.event.merged_with(news.event), waited)
            self._pending[request_id] = news
            self._urgent = self._urgent or news.waited is not None or news.event.finish_reason is not None
            rouse = first or self._urgent
        if rouse:  # merged news changes nothing for the reader, and waking it costs the session time
            wake(self._wakeups)

    async def collect(self, patience: float) -> tuple[News, ...]:
        """Wait for news and return it, or an empty tuple after `patience` seconds."""
        self.called = time.monotonic()
        with anyio.move_on_after(patience):
            await until(lambda: bool(self._pending), self._wakeups)
            with anyio.move_on_after(max(0.0, self._sent_at + TOGETHER - time.monotonic())):
                await until(lambda: self._urgent, self._wakeups)
        with self._lock:
            news, self._pending, self._urgent = tuple(self._pending.values()), {}, False
        self.called = self._sent_at = time.monotonic()
        return news


def sendable(event: TokenEvent) -> TokenEvent:
    """Return the event with an error that another process can unpickle. Of its cause, only the message is sent.

    If a step failed because a process that shares the model is gone, the whole session has ended.
    """
    error = event.error
    if error is None:
        return event
    if _lost_process(error):
        return dataclasses.replace(event, error=SessionClosed(f"a process of the replica is gone: {one_line(error)}"))
    try:
        return dataclasses.replace(event, error=_readable(error))
    except Exception:  # users' exception classes may raise anything
        return dataclasses.replace(event, error=RequestFailed(one_line(error)))


def _readable(error: BaseException) -> BaseException:
    cause = error.__cause__
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RequestFailed(str(error))
    if cause is not None:
        plain = type(error).__init__ is Exception.__init__
        error = type(error)(f"{error} The cause: {one_line(cause)}"[:2000]) if plain else error
    return error


def _lost_process(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ProcessLost):
        error = error.__cause__
    return error is not None


def failed(request_id: str, error: BaseException) -> TokenEvent:
    """Return the event for a sequence that ended by an error."""
    return sendable(TokenEvent(request_id, finish_reason=FinishReason.FAILED, error=error))
