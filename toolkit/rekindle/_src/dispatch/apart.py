"""Long jobs of callers: each in a thread of its own, a few at a time, within a limit of seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rekindle._src.dispatch.threads import OneShot, Wakeup, until, wake

T = TypeVar("T")


class JobThreads:
    """Threads for jobs that may be slow, so that nothing else waits for them. Jobs beyond `most` at a time wait."""

    def __init__(self, most: int, seconds: float, name: str) -> None:
        """Give each job `seconds`, including its wait. Threads are named `name`."""
        self._most, self._seconds, self._name = most, seconds, name
        self._busy = 0
        self._lock = threading.Lock()
        self._waiting: list[Wakeup] = []

    @property
    def busy(self) -> int:
        """The number of threads that are at work."""
        return self._busy

    async def run(self, job: Callable[[Callable[[], bool]], T], late: Callable[[float], BaseException]) -> T:
        """Call `job(wanted)` in a thread. Return its result, or raise its error, or `late(seconds)` if it is not done.

        `wanted()` is False once the caller has left or the limit is over: the job should then end soon. A job that does
        not, such as one on a disk that hangs, keeps its thread.
        """
        reply: OneShot[T] = OneShot()
        over = threading.Event()
        entered = False

        def ready() -> bool:
            nonlocal entered
            entered = not reply.filled and self._enter()
            return entered or reply.filled

        def give_up() -> None:
            over.set()
            reply.fail(late(self._seconds))

        timer = threading.Timer(self._seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            await until(ready, self._waiting, reply.wakeups)
            if entered:
                self._start(partial(job, lambda: not over.is_set()), reply)
            return await reply.get()
        finally:
            over.set()
            timer.cancel()

    def _start(self, job: Callable[[], T], reply: OneShot[T]) -> None:
        try:
            threading.Thread(target=self._work, args=(job, reply), name=self._name, daemon=True).start()
        except BaseException:  # the system has no thread left
            self._leave()
            raise

    def _work(self, job: Callable[[], T], reply: OneShot[T]) -> None:
        def leaving() -> T:
            try:
                return job()
            finally:
                self._leave()  # before the caller hears of it, who may look or come back at once

        reply.run(leaving)

    def _enter(self) -> bool:
        with self._lock:
            entered = self._busy < self._most
            self._busy += entered
            return entered

    def _leave(self) -> None:
        with self._lock:
            self._busy -= 1
        wake(self._waiting)
