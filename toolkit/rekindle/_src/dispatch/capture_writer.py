"""Writing captures into files, in a thread of each request's own, so that a slow disk delays that request alone.

A request's parts are written in the order in which they came, then its files are completed or removed. The dispatch
loop waits for none of this. How much may wait is bounded by the request's `Backlog`: the scheduler plans no step for a
request whose backlog is full.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from rekindle._src.core.capture_files import CaptureFiles
from rekindle._src.core.own_failure import close_each, one_line
from rekindle._src.core.tapped import Backlog, CapturedPart
from rekindle._src.core.taps import Captured
from rekindle._src.dispatch.threads import OneShot
from rekindle.errors import RequestFailed

LINGER = 1.0  # seconds for which a thread without work waits for the next step before it ends
Job = Callable[[], object]


class CaptureWriter:
    """Writes the captures of one request. Its methods return at once and are called on the dispatch loop."""

    def __init__(self, files: CaptureFiles, backlog: Backlog) -> None:
        self.failure: RequestFailed | None = None  # of a write; the request ends with it
        self._files, self._backlog = files, backlog
        self._jobs: deque[Job] = deque()
        self._awake = threading.Condition()
        self._working = False  # there is a thread
        self._ended = False  # no job comes after those that wait

    @property
    def folder(self) -> str:
        """The folder that the request names."""
        return str(self._files.into)

    def begin(self) -> OneShot[None]:
        """Make the request's folder. The reply fails with `InvalidRequest` if it can't be made."""
        reply: OneShot[None] = OneShot()
        self._put(lambda: reply.run(self._files.begin))
        return reply

    def add(self, part: CapturedPart) -> None:
        """Write a part of the captures. Raises the error of an earlier write, or that no thread can be started."""
        if self.failure is not None:
            raise self.failure
        size = sum(array.nbytes for array in part.arrays.values())
        self._backlog.add(size)
        self._put(partial(self._write, part, size))

    def finish(self, end: int) -> OneShot[Captured]:
        """Complete the files with the positions before `end`. The reply fails if that, or an earlier write, failed."""
        reply: OneShot[Captured] = OneShot()
        self._end(lambda: reply.run(lambda: self._finish(end)))
        return reply

    def leave(self, end: int | None = None) -> None:
        """Complete the files with the positions before `end`, or without one remove them; nobody waits for it."""
        if not self._ended:
            self._end(self._files.discard if end is None else lambda: self._finish(end))

    # In the thread.

    def _write(self, part: CapturedPart, size: int) -> None:
        try:
            if self.failure is None:
                self._files.add(part)
        except BaseException as error:
            self._fail(error)
        finally:
            self._backlog.add(-size)

    def _finish(self, end: int) -> Captured:
        if self.failure is None:
            try:
                return self._files.finish(end)
            except BaseException as error:
                self._fail(error)
        assert self.failure is not None, "it was set above"
        raise self.failure

    def _fail(self, error: BaseException) -> None:
        self._files.discard()  # other requests may need its room on the disk
        failure = RequestFailed(f"the captures could not be written to {self.folder}: {one_line(error)}")
        failure.__cause__ = error
        self.failure = failure

    def _work(self) -> None:
        while True:
            with self._awake:
                if not self._jobs and not self._ended:
                    self._awake.wait(LINGER)
                if not self._jobs:
                    self._working = False
                    return
                job = self._jobs.popleft()
            close_each(f"a capture in {self.folder}", job)
            del job  # it has arrays

    # Its queue.

    def _end(self, job: Job) -> None:
        self._ended = True
        self._put(job)

    def _put(self, job: Job) -> None:
        with self._awake:
            self._jobs.append(job)
            if self._working:
                self._awake.notify()
                return
            self._working = True
        try:
            threading.Thread(target=self._work, name="rekindle captures", daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._working = False
            raise
