"""Writes captures into files, in a thread for each request, so that a slow disk delays that request alone.

A request's parts are written in the order of their arrival, then its files are completed or removed. The dispatch
loop waits for none of this. The request's `Backlog` bounds the waiting captures: the scheduler plans no step for a
request with a full backlog.

A thread can't be stopped while its disk hangs. How many threads work for requests that do not run, because they have
not begun or are over, is bounded by `Doors`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from rekindle._src.capabilities.captures.files import CaptureFiles
from rekindle._src.core.captured import Backlog, Captured, CapturedPart
from rekindle._src.core.own_failure import close_each, one_line
from rekindle._src.dispatch.threads import OneShot, Wakeup, until
from rekindle.errors import Busy, RequestFailed

LINGER = 1.0  # seconds for which a thread without work waits for the next step before it ends
MOST_UNATTENDED = 8  # threads of a session that work for requests which have not begun, or are over
Job = Callable[[], object]


class Doors:
    """The threads that work for no running request: they make a request's folder, or finish a request that is over.

    There are at most `most` of them; further requests that capture into folders wait for one to end.
    """

    def __init__(self, most: int = MOST_UNATTENDED) -> None:
        self._most = most
        self._since: dict[CaptureWriter, float] = {}  # when each of these threads began to work for no running request
        self._wakeups: list[Wakeup] = []

    def __len__(self) -> int:
        return len(self._since)

    def try_enter(self, writer: CaptureWriter) -> bool:
        """Take a place for a writer that is about to make its folder, if there is one. Called on the loop."""
        if len(self._since) < self._most:
            self.add(writer)
        return writer in self._since

    async def place(self) -> None:
        """Wait until there may be a place."""
        await until(lambda: len(self._since) < self._most, self._wakeups)

    def stuck(self, patience: float) -> bool:
        """True if no place was taken or given back within the last `patience` seconds, and none is left."""
        since = tuple(self._since.values())
        return len(since) >= self._most and time.monotonic() - max(since) > patience

    def refusal(self, patience: float) -> Busy:
        """Return the error of a request that found no place."""
        folders = [writer.folder for writer in tuple(self._since)]
        such_as = f", such as {folders[0]!r}," if folders else ""
        return Busy(
            f"{len(folders)} folders of other requests' captures{such_as} do not answer, so no folder is made for this "
            "one. Check their disks, and send it again when they answer.",
            patience,
        )

    def add(self, writer: CaptureWriter) -> None:
        """Count the thread of a writer from now on."""
        self._since.setdefault(writer, time.monotonic())

    def leave(self, writer: CaptureWriter) -> None:
        """Count the thread of a writer no longer: its request runs, or it has ended. Called in any thread."""
        if self._since.pop(writer, None) is not None:
            for wakeup in tuple(self._wakeups[: self._most]):
                wakeup.wake()


class CaptureWriter:
    """Writes the captures of one request. Its methods return at once and are called on the dispatch loop."""

    def __init__(self, files: CaptureFiles, backlog: Backlog, doors: Doors) -> None:
        self.failure: RequestFailed | None = None  # of a write; the request ends with it
        self._files, self._backlog, self._doors = files, backlog, doors
        self._jobs: deque[Job] = deque()
        self._awake = threading.Condition()
        self._working = False  # there is a thread
        self._begun = False
        self._ended = False  # no job comes after the waiting ones

    @property
    def folder(self) -> str:
        """The folder that the request names."""
        return str(self._files.into)

    def begin(self) -> OneShot[None]:
        """Make the request's folder. The reply fails with `InvalidRequest` if it can't be made."""
        reply: OneShot[None] = OneShot()
        self._begun = True
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
        """Complete the files with the positions before `end`, or remove them if it is None; does not wait."""
        if not self._begun:
            return
        with self._awake:
            if self._working or not self._ended:
                self._doors.add(self)  # until the thread has ended
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
                    if self._ended:
                        self._doors.leave(self)
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
            self._doors.leave(self)
            raise
