"""Results that wait for their callers: `OneShot` holds one value, `Mailbox` the output of one submission."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from rekindle._src.core.records import Completion, Embedded, FinishReason, IntArray, TextDelta
from rekindle._src.dispatch.wakeups import Wakeup, new_wakeup

T = TypeVar("T")


async def until(ready: Callable[[], bool], *places: list[Wakeup]) -> None:
    """Wait until `ready()` is true. The thread that makes it true wakes the wakeups in one of `places` afterwards."""
    if ready():
        return
    wakeup = new_wakeup()
    for wakeups in places:
        wakeups.append(wakeup)
    try:
        # Checked again after the wakeup was registered, so that a change in between is not missed.
        while not ready():
            await wakeup.wait()
    finally:
        for wakeups in places:
            wakeups.remove(wakeup)


def wake(wakeups: list[Wakeup]) -> None:
    """Wake every waiter in a list that other threads may change meanwhile."""
    for wakeup in tuple(wakeups):
        wakeup.wake()


def fresh(error: BaseException) -> BaseException:
    """Return a copy of an error for one waiter: a shared instance would collect the tracebacks of all of them."""
    try:
        copied = copy.copy(error)
    except Exception:  # its constructor takes other arguments
        return error
    copied.__cause__ = error.__cause__
    copied.__traceback__ = error.__traceback__
    return copied


class OneShot(Generic[T]):
    """A value that one thread sets once and others wait for."""

    def __init__(self) -> None:
        self._value: T
        self._error: BaseException | None = None
        self.wakeups: list[Wakeup] = []
        self.filled: bool = False

    def put(self, value: T) -> None:
        if not self.filled:
            self._value = value
            self.filled = True
            wake(self.wakeups)

    def fail(self, error: BaseException) -> None:
        if not self.filled:
            self._error = error
            self.filled = True
            wake(self.wakeups)

    def run(self, function: Callable[[], T]) -> None:
        """Call a function, and fill it with the result or the error."""
        try:
            self.put(function())
        except BaseException as error:
            self.fail(error)
            del self, function  # the error's traceback has this frame: what they hold would wait for the collector

    async def get(self) -> T:
        await until(lambda: self.filled, self.wakeups)
        if self._error is not None:
            raise fresh(self._error)
        return self._value


class Relayed(NamedTuple):
    """The result of a sequence whose events went to another process."""

    reason: FinishReason


class Mailbox:
    """The output of the `n` sequences of one submission: a log that only grows, with any number of readers.

    The host thread writes, any thread reads. Readers keep their own place in the log, so that a slow one costs nothing
    but the log itself, which `max_tokens` bounds.
    """

    def __init__(self, count: int) -> None:
        self.deltas: list[TextDelta] = []
        self.results: list[Completion | Embedded | Relayed | BaseException | None] = [None] * count
        self.request_ids: list[str] = []  # sequences that intake handed on
        self.prompt: str | None = None  # a rendered chat, set by intake
        self.prompt_ids: IntArray | None = None  # set by intake
        self.abandoned = False  # its caller cancelled; set on the host's loop
        self.ended: bool = False
        self.failure: OneShot[BaseException] | None = None  # gets the first error; the mailboxes of a `Batch` share it
        self.on_sequence_end: Callable[[], object] | None = None  # called after each sequence
        self.on_complete: Callable[[Mailbox], object] | None = None  # called after all of them
        self._remaining = count
        self._stream_wakeups: list[Wakeup] = []
        self._wakeups: list[Wakeup] = []

    def put(self, delta: TextDelta) -> None:
        self.deltas.append(delta)
        if self._stream_wakeups:
            wake(self._stream_wakeups)

    def complete(self, index: int, result: Completion | Embedded | Relayed | BaseException) -> None:
        """Set the result of one sequence; only the first call counts."""
        if self.results[index] is not None:
            return
        self.results[index] = result
        self._remaining -= 1
        if self.on_sequence_end is not None:
            self.on_sequence_end()
        if self.failure is not None and isinstance(result, BaseException):
            self.failure.put(result)
        if self._remaining == 0:
            self.ended = True
            if self.on_complete is not None:
                self.on_complete(self)
            wake(self._stream_wakeups)
            wake(self._wakeups)

    def complete_all(self, result: BaseException) -> None:
        for index in range(len(self.results)):
            self.complete(index, result)

    @property
    def error(self) -> BaseException | None:
        return next((result for result in self.results if isinstance(result, BaseException)), None)

    async def wait_all(self) -> None:
        """Wait until every sequence ended, or `failure` was filled."""
        failure = self.failure
        if failure is None:
            await until(lambda: self.ended, self._wakeups)
        else:
            await until(lambda: self.ended or failure.filled, self._wakeups, failure.wakeups)

    @staticmethod
    async def wait_any(mailboxes: Sequence[Mailbox]) -> None:
        """Wait until one of several is complete."""
        await until(lambda: any(mailbox.ended for mailbox in mailboxes), *(mailbox._wakeups for mailbox in mailboxes))

    async def wait_beyond(self, length: int) -> None:
        """Wait until the log is longer than `length`, or complete."""
        await until(lambda: len(self.deltas) > length or self.ended, self._stream_wakeups)
