"""The thread of a session: an event loop of its own, so that notebook cells don't block it, and the tasks on it.

    submissions          requests   ┌ backend ─────────────────────────────┐
    ──────────▶ intake ──────────▶  │          turns                       │
                                    │ schedule ◀──────▶ device thread      │
                                    │          outcomes                    │
                                    └──┬───▲───────────────────────────────┘
                                events ▼   │ stop strings
                                    detokenize ──▶ mailboxes

A request goes from left to right, once. Draining goes the same way: intake ends with its inbox and tells the backend,
the backend ends after its last request and closes the stream to detokenize. The backend of the picture is an `Engine`;
a fleet's has replicas in their place.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio

from rekindle._src.core.activity import ProgramWait
from rekindle._src.core.config import spare_places
from rekindle._src.core.own_failure import close_each, own_failure, root_cause
from rekindle._src.core.records import FinishReason, Request
from rekindle._src.dispatch.backend import Abort, Control, Events, Exclusive, Front, ScheduleMessage, Submission
from rekindle._src.dispatch.threads import (
    Contexts,
    DeviceThread,
    LoopWaker,
    Mailbox,
    OneShot,
    RelayResult,
    Wakeup,
    caller,
    current_waker,
    new_wakeup,
    run_sync,
)
from rekindle.errors import QueueFull, RekindleError, SessionClosed, SessionForked

if TYPE_CHECKING:
    from rekindle._src.dispatch.capabilities import Capabilities
    from rekindle._src.dispatch.detokenize import Output, Take


class _Waiter:
    __slots__ = ("admitted", "count", "wakeup")

    def __init__(self, count: int, wakeup: Wakeup) -> None:
        self.count, self.wakeup, self.admitted = count, wakeup, False


class AdmissionLimiter:
    """Counts the places of sequences. Usable from any thread.

    Callers are those of a server, by name; all else is the caller "". Waiting callers take turns, each with its oldest
    request first. While one waits, it leaves half of the places to callers that don't. If none of these is left, a
    caller with few sequences finds one of the spare places, which are in addition to `places`.
    """

    def __init__(self, places: int) -> None:
        self.places: int = places
        self.admitted: int = 0  # sequences so far
        self.closed: BaseException | None = None
        self._free = places
        self._spare = spare_places(places)
        self._of_callers = Counter[str]()  # places by caller
        self._spare_of_callers = Counter[str]()
        self._lines: dict[str, deque[_Waiter]] = {}  # by caller; the one whose turn is next stands first
        # The garbage collector may close a waiting coroutine, or end a request, in a thread that is changing the lines
        # already: the lock is reentrant, and what gives places back then comes after that change.
        self._lock = threading.RLock()
        self._changes = False
        self._late: deque[Callable[[], None]] = deque()

    @property
    def inside(self) -> int:
        """Places that are taken, spare ones included."""
        return self.places - self._free + self._spare_of_callers.total()

    @property
    def waiting(self) -> int:
        """Requests that wait for places."""
        with self._changing():
            return sum(map(len, self._lines.values()))

    def try_enter(self, count: int, caller: str = "") -> bool:
        """Take `count` places if they are free and no one waits for them; false if not. Raises `SessionClosed`."""
        with self._changing():
            if self.closed is not None:
                raise self._refusal()
            if caller in self._lines:
                return False
            if self._free >= count and self._next() is None:
                self._free -= count
                self._of_callers[caller] += count
            elif self._is_small(caller, count) and self._spare >= count:
                self._spare -= count
                self._spare_of_callers[caller] += count
            else:
                return False
            self.admitted += count
            return True

    def _is_small(self, caller: str, count: int) -> bool:
        held = self._of_callers[caller] + self._spare_of_callers[caller]
        return bool(caller) and held + count <= max(1, spare_places(self.places) // 4)

    async def enter(self, count: int, unless: Callable[[], bool] = lambda: False, caller: str = "") -> bool:
        """Take `count` places, in turn; false if `unless()` turned true meanwhile; see `recheck`."""
        waiter = _Waiter(count, new_wakeup())
        with self._changing():
            if self.closed is not None:
                raise self._refusal()
            self._lines.setdefault(caller, deque()).append(waiter)
            self._admit()
        try:
            while not waiter.admitted:
                if self.closed is not None:
                    raise self._refusal()
                if unless():
                    self._give_up(waiter, caller)
                    return False
                await waiter.wakeup.wait()
        except BaseException:
            self._give_up(waiter, caller)
            raise
        return True

    def _give_up(self, waiter: _Waiter, caller: str) -> None:
        self._change(lambda: self._remove(waiter, caller))

    def _remove(self, waiter: _Waiter, caller: str) -> None:
        if waiter.admitted:
            self._leave(waiter.count, caller)
        else:
            self._lines[caller].remove(waiter)
            if not self._lines[caller]:
                del self._lines[caller]
            self._admit()

    def recheck(self) -> None:
        """Make every waiting caller evaluate its `unless` again."""
        with self._changing():
            waiters = [waiter for line in self._lines.values() for waiter in line]
        for waiter in waiters:
            waiter.wakeup.wake()

    def leave(self, count: int = 1, caller: str = "") -> None:
        """Give `count` places of a caller back; spare ones last, so that those who wait for places get them."""
        self._change(lambda: self._leave(count, caller))

    def _leave(self, count: int, caller: str) -> None:
        usual = min(count, self._of_callers[caller])
        for kept, number in ((self._of_callers, usual), (self._spare_of_callers, count - usual)):
            kept[caller] -= number
            assert kept[caller] >= 0, "more places were given back than taken"
            if not kept[caller]:
                del kept[caller]
        self._free += usual
        self._spare += count - usual
        self._admit()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Change something in peace; what the garbage collector gives back meanwhile is given back at the end."""
        with self._lock:
            assert not self._changes, "only places given back come in the middle of a change"
            self._changes = True
            try:
                yield
            finally:
                self._changes = False
                self._change_late()

    def _change(self, change: Callable[[], None]) -> None:
        """Make a change now, or after the one that this thread is making."""
        with self._lock:
            self._late.append(change)
            self._change_late()

    def _change_late(self) -> None:
        while self._late and not self._changes:
            self._changes = True
            try:
                self._late.popleft()()
            finally:
                self._changes = False

    def resize(self, places: int) -> None:
        """Change the number of places. If more are taken, no caller is admitted until enough were given back."""
        with self._changing():
            self._free += places - self.places
            self._spare += spare_places(places) - spare_places(self.places)
            self.places = places
            self._admit()

    def close(self, error: BaseException) -> None:
        """Refuse every caller from now on, including waiting ones."""
        with self._changing():
            if self.closed is None:
                self.closed = error
        self.recheck()

    def _next(self) -> str | None:
        """Return the waiting caller that is next; None if each has half of the places."""
        for name, line in self._lines.items():
            held = self._of_callers[name]
            if not name or not held or held + line[0].count <= self.places // 2:
                return name
        return None

    def _admit(self) -> None:
        while self.closed is None:
            caller = self._next()
            if caller is None or self._lines[caller][0].count > self._free:
                return
            line = self._lines.pop(caller)
            waiter = line.popleft()
            if line:
                self._lines[caller] = line  # to the end, after all other callers
            self._free -= waiter.count
            self._of_callers[caller] += waiter.count
            self.admitted += waiter.count
            waiter.admitted = True
            waiter.wakeup.wake()

    def _refusal(self) -> SessionClosed:
        assert self.closed is not None
        refusal = SessionClosed(str(self.closed))
        refusal.__cause__ = self.closed.__cause__
        return refusal


T = TypeVar("T")

EXIT_SECONDS = 2.0  # bound on the interpreter's exit, for all sessions together
CLOSE_SECONDS = 5.0  # how long closing waits for the steps in flight before it leaves the device thread alone


class _Job(NamedTuple):
    """A call for the host's loop, and the call to make instead if that loop has ended."""

    do: Callable[[], object]
    refuse: Callable[[BaseException], object]


class Host:
    """Owns the thread, the device thread and the backend; every method may be called from any thread."""

    def __init__(
        self,
        build: Callable[[], Front],
        capabilities: Callable[[], Capabilities],
        *,
        contexts: Contexts = contextlib.nullcontext,
        backend: str = "asyncio",
        backend_options: dict[str, object] | None = None,
    ) -> None:
        """Set up; `build` makes front and backend on the device thread. Requests may use the `capabilities`."""
        self.opened: OneShot[Front] = OneShot()
        self.ended: OneShot[None] = OneShot()
        self.limiter: AdmissionLimiter = AdmissionLimiter(0)  # replaced when the backend and so its bounds are known
        self.program_wait: ProgramWait = ProgramWait()  # replaced by the front's
        self.crash: BaseException | None = None
        self.paused_by: list[object] = []  # tasks and threads inside `with session.paused()`
        # While the session sleeps until a request comes: called on the loop for each that comes; must not raise.
        self.on_request: Callable[[], object] | None = None
        # While it sleeps until then: called in the thread of a caller that is about to wait; may raise.
        self.on_wait: Callable[[], object] | None = None
        self._build: Callable[[], Front] | None = build
        self._capabilities = capabilities
        self._contexts, self._backend, self._backend_options = contexts, backend, backend_options
        self._pid = os.getpid()
        self._jobs: deque[_Job] = deque()
        self._waker: LoopWaker | None = None
        self._dispatch: Dispatch | None = None
        self._closing: anyio.Event | None = None
        self._drain_seconds: float | None = None  # set once closing was requested; 0 aborts running requests
        self._reason = SessionClosed("the session was closed. Open another one")
        self._thread = threading.Thread(target=self._run, name="rekindle session", daemon=True)

    def start(self) -> None:
        """Start the thread, which builds the engine. Raises SessionForked in a child of a process with a session."""
        note_opening()
        _hosts.add(self)
        if not _registered:
            _registered.append(True)
            atexit.register(_close_all)
        self._thread.start()

    # For callers.

    def check(self) -> None:
        """Raise if the session can't be used: closed, crashed, or in a forked child."""
        if self.forked:
            raise forked_refusal(self._pid)
        if self.closing:
            raise self.refusal()

    def check_waiting(self, activity: str) -> None:
        """Raise if the caller keeps the session from running steps: waiting for `activity` would never end."""
        if (on_wait := self.on_wait) is not None:
            on_wait()
        if self.paused_by and caller() in self.paused_by:
            raise RekindleError(
                f"{activity} is awaited by the task that paused the session or put it to sleep, so no step would ever "
                "run. Call submit() and then step(), or await it after the paused() block, or after wake()"
            )

    @property
    def forked(self) -> bool:
        """True in a forked child of the process that the session's threads run in."""
        return os.getpid() != self._pid

    @property
    def closing(self) -> bool:
        """True if the session is closed or crashed, or about to be."""
        return self._drain_seconds is not None or self.ended.filled

    @property
    def is_over(self) -> bool:
        """True once the session has ended."""
        return self.ended.filled

    def refusal(self) -> SessionClosed:
        """Return the error of a closed session."""
        refusal = SessionClosed(str(self._reason))
        refusal.__cause__ = self.crash
        return refusal

    def submit(self, submission: Submission) -> None:
        """Hand over an admitted submission."""
        self._post_request(submission.mailbox, lambda dispatch: self._submit(dispatch, submission))

    def _submit(self, dispatch: Dispatch, submission: Submission) -> None:
        dispatch.submit(submission)
        if self.on_request is not None:
            self.on_request()

    def relay(self, request: Request, mailbox: Mailbox, take: Take) -> None:
        """Run a request that another process has taken in, and that has been admitted; see `Dispatch.relay`."""
        self._post_request(mailbox, lambda dispatch: dispatch.relay(request, mailbox, take))

    def abort(self, mailbox: Mailbox) -> None:
        """Abort a submission. Safe in finalisers, forked children and after the end: takes no lock and never raises."""
        if not mailbox.ended and not self.forked:
            self._post(lambda dispatch: dispatch.abort(mailbox), lambda error: None)

    def send(self, message: Control, reply: OneShot[T]) -> OneShot[T]:
        """Hand schedule a message that fills `reply`."""

        def send(dispatch: Dispatch) -> None:
            try:
                dispatch.send(message)
            except anyio.WouldBlock:
                reply.fail(QueueFull("too many steps, pauses or changes wait. Await them one after another"))

        self._post(send, reply.fail)
        return reply

    def call(self, function: Callable[[Dispatch], T]) -> OneShot[T]:
        """Run `function` between two turns of the host's loop, where nothing else changes."""
        reply: OneShot[T] = OneShot()
        self._post(lambda dispatch: reply.run(lambda: function(dispatch)), reply.fail)
        return reply

    def ask(self, function: Callable[[], T]) -> T:
        """Run `function` on the host's loop, as `call` does, and block this thread until it has returned."""
        return wait(self.call(lambda dispatch: function()))

    def between_steps(self, job: Callable[[], T], after: Callable[[T], object]) -> T:
        """Run `job` on the device thread while no step is in flight, then `after` with its result on the host's loop.

        Blocks this thread until then, and returns the result.
        """
        reply: OneShot[T] = OneShot()
        return wait(self.send(Exclusive(job, after, reply), reply))

    def close(self, drain: float = 0.0) -> None:
        """Ask for the end: requests may go on for `drain` seconds, then they are aborted. Returns at once."""
        if self.forked:
            return
        first = self._drain_seconds is None
        self._drain_seconds = drain if first else min(drain, self._drain_seconds or 0.0)
        self.limiter.close(self.refusal())
        self._jobs.append(_Job(self._wake_closer, lambda error: None))
        self._wake_loop()

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread itself; true if it is gone."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # Jobs on their way to the loop.

    def _post(self, do: Callable[[Dispatch], object], refuse: Callable[[BaseException], object]) -> None:
        def run() -> None:
            if self._dispatch is None:
                refuse(self.refusal())
            else:
                do(self._dispatch)

        self._jobs.append(_Job(run, refuse))
        if self.ended.filled:
            # The thread may have emptied the queue for the last time before the append, so this thread refuses the job.
            self._refuse_jobs()
        else:
            self._wake_loop()

    def _post_request(self, mailbox: Mailbox, do: Callable[[Dispatch], object]) -> None:
        """Post a job for one request; if it raises, the request ends."""

        def run(dispatch: Dispatch) -> None:
            try:
                do(dispatch)
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session is closing
                raise
            except BaseException as error:
                mailbox.complete_all(own_failure(error, "the request could not be taken in"))

        self._post(run, mailbox.complete_all)

    def _wake_loop(self) -> None:
        if self._waker is not None:
            self._waker.post(self._run_jobs)

    def _run_jobs(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            try:
                job.do()
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                job.refuse(self.refusal())
            except BaseException as error:  # such as a full stream: an invariant is broken, so the session ends
                self._crashed(error)
                job.refuse(self.refusal())

    def _refuse_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                return
            job.refuse(self.refusal())

    def _wake_closer(self) -> None:
        if self._closing is not None:
            self._closing.set()

    def _crashed(self, error: BaseException) -> None:
        if self.crash is None:
            self.crash = error
            self._reason = SessionClosed(f"the session crashed: {error!r}. Open another one")
            if self._drain_seconds is None:
                self._drain_seconds = 0.0
        self._wake_closer()

    def _on_backend_lost(self, error: BaseException) -> None:
        """End the session with `error`, even if the device never answers. Safe in every thread."""
        self._jobs.append(_Job(lambda: self._crashed(error), lambda refusal: None))
        self._wake_loop()

    # The thread.

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend=self._backend, backend_options=self._backend_options)
        except BaseException as error:
            self._crashed(root_cause(error))
        finally:
            self._dispatch = None
            self._build = None
            self.limiter.close(self.refusal())
            self.opened.fail(self.refusal())
            self.ended.put(None)
            self._refuse_jobs()
            _hosts.discard(self)

    async def _main(self) -> None:
        self._closing = anyio.Event()
        self._waker = current_waker()
        device = DeviceThread(self._contexts)
        try:
            front = await device.run(self._take_build())
        except BaseException as error:
            self._crashed(error)
            self.opened.fail(error)
            device.stop(1.0)
            return
        self._dispatch = Dispatch(front, device, self._capabilities())
        self.limiter = AdmissionLimiter(front.backend.places)
        front.backend.attach(self._on_backend_lost, self.limiter.resize)
        self.program_wait = front.program_wait
        if self._drain_seconds is not None:  # closed while it was being built
            self.limiter.close(self.refusal())
        self._run_jobs()
        self.opened.put(front)
        try:
            await self._serve(self._dispatch)
        finally:
            with anyio.CancelScope(shield=True):
                await self._end(front, device)

    def _take_build(self) -> Callable[[], Front]:
        build, self._build = self._build, None  # it may hold weights
        assert build is not None
        return build

    async def _serve(self, dispatch: Dispatch) -> None:
        """Run the dispatch loop until the session is closed or crashes."""
        closer = anyio.CancelScope()
        try:
            async with anyio.create_task_group() as group:

                async def serve() -> None:
                    await dispatch.run()
                    closer.cancel()

                group.start_soon(serve)
                with closer:
                    assert self._closing is not None
                    await self._closing.wait()
                    await self._close_down(dispatch, group.cancel_scope)
        except BaseException as error:
            if isinstance(error, Exception | BaseExceptionGroup):
                self._crashed(root_cause(error))
            else:
                raise
        finally:
            dispatch.complete_all(self.refusal())

    async def _close_down(self, dispatch: Dispatch, scope: anyio.CancelScope) -> None:
        dispatch.drain()
        deadline = time.monotonic() + (self._drain_seconds or 0.0)
        while dispatch.mailboxes and time.monotonic() < deadline and self.crash is None:
            # A second close() with a shorter drain shortens the wait.
            deadline = min(deadline, time.monotonic() + (self._drain_seconds or 0.0))
            await anyio.sleep(0.01)
        dispatch.abort_all(self.refusal())
        if self.crash is None:
            await anyio.sleep(CLOSE_SECONDS)  # `serve` cancels this as soon as the tasks have drained
        scope.cancel()

    async def _end(self, front: Front, device: DeviceThread) -> None:
        with anyio.move_on_after(CLOSE_SECONDS):
            closings: list[Callable[[], object]] = [front.backend.close]
            closings += [partial(service.close, front) for service in front.services]
            for close in closings:
                try:
                    await device.run(close)
                except Exception as error:
                    self._crashed(error)
        device.stop(1.0)


_hosts: weakref.WeakSet[Host] = weakref.WeakSet()
_registered: list[bool] = []


def _close_all() -> None:
    """Close every session at interpreter exit: a daemon thread that ran on would use a dismantled interpreter."""
    hosts = tuple(_hosts)
    deadline = time.monotonic() + EXIT_SECONDS
    for host in hosts:
        host.close()
    for host in hosts:
        host.join(max(0.0, deadline - time.monotonic()))


def wait(reply: OneShot[T]) -> T:
    """Block this thread until the host has filled `reply`."""
    return run_sync(reply.get())


_FIX = "Open one in a process that is started anew, such as by multiprocessing.get_context('spawn')"
_started_in: list[int] = []  # the process that started the first session of this memory


def note_opening() -> None:
    """Note that a session is about to be opened. Raises SessionForked if the parent of this process had opened one."""
    if not _started_in:
        _started_in.append(os.getpid())
    elif _started_in[0] != os.getpid():
        raise SessionForked(
            f"a session was open in process {_started_in[0]} before this process {os.getpid()} was forked from it, and "
            f"JAX's threads are missing here. {_FIX}"
        )


def forked_refusal(pid: int) -> SessionForked:
    """Return the error for a session of process `pid` that is used in its child."""
    return SessionForked(f"the session belongs to process {pid}, this is its forked child {os.getpid()}. {_FIX}")


class Dispatch:
    """The tasks of one session or fleet. Its methods are called on the loop that runs them and return at once.

    Its streams have room for all sequences that the admission limiter lets in. A live sequence has at most three
    messages in the backend's inbox (itself, an abort, a stop string), so sending there never waits and no two tasks
    wait for each other.
    """

    def __init__(self, front: Front, device: DeviceThread, capabilities: Capabilities) -> None:
        from rekindle._src.dispatch import detokenize, intake  # imported with the engine, in a thread of the session's

        self.backend = front.backend
        self.outputs: dict[str, Output] = {}  # live sequences: intake adds, detokenize removes
        self.mailboxes: set[Mailbox] = set()  # of live submissions, tokenized or not
        bound = self.backend.bound
        self._submissions, submitted = anyio.create_memory_object_stream[Submission | Control](2 * bound + 64)
        self._messages, inbox = anyio.create_memory_object_stream[ScheduleMessage](8 * bound + 256)
        events, happened = anyio.create_memory_object_stream[Events](1)
        posts = [self._messages.clone() for _ in range(3)]
        self._streams: tuple[Any, ...] = self._submissions, submitted, self._messages, inbox, events, happened, *posts
        self._tasks = (
            partial(intake.run, submitted, posts[0], front, self.outputs, capabilities),
            partial(self.backend.serve, inbox, posts[1], events, device),
            partial(detokenize.run, happened, posts[2], self.outputs),
        )

    async def run(self) -> None:
        """Run the tasks until they have drained. Raises a task's own error, never an ExceptionGroup."""
        try:
            async with anyio.create_task_group() as group:
                for task in self._tasks:
                    group.start_soon(task)
        except BaseExceptionGroup as group_error:
            raise root_cause(group_error) from None
        finally:
            for stream in self._streams:
                stream.close()

    def submit(self, submission: Submission) -> None:
        self.mailboxes.add(submission.mailbox)
        submission.mailbox.on_complete = self.mailboxes.discard
        self._submissions.send_nowait(submission)

    def relay(self, request: Request, mailbox: Mailbox, take: Take) -> None:
        """Run a request that another process has taken in: `take` gets its events, on this loop."""
        if mailbox.abandoned:  # it was aborted before it came here
            mailbox.complete(0, RelayResult(FinishReason.ABORTED))
            return
        self.mailboxes.add(mailbox)
        mailbox.on_complete = self.mailboxes.discard
        mailbox.request_ids.append(request.id)
        from rekindle._src.dispatch.detokenize import RelayedOutput

        self.outputs[request.id] = RelayedOutput(request, mailbox, take)
        self._messages.send_nowait(request)

    def send(self, message: Control) -> None:
        self._submissions.send_nowait(message)

    def abort(self, mailbox: Mailbox) -> None:
        """End the sequences of one submission wherever they are."""
        if not mailbox.abandoned and not mailbox.ended:
            mailbox.abandoned = True  # intake drops the submission if it has not handed it on
            if mailbox.on_abandon is not None:
                mailbox.on_abandon()
            for request_id in mailbox.request_ids:
                if (output := self.outputs.get(request_id)) is not None:
                    output.abort()
                self._messages.send_nowait(Abort(request_id))

    def drain(self) -> None:
        """Take no more submissions, and let `run` return once the last request has ended."""
        self._submissions.close()

    def abort_all(self, error: BaseException) -> None:
        """End every live request with `error` now; pages come back as after any abort."""
        for mailbox in tuple(self.mailboxes):
            self.abort(mailbox)
        self.complete_all(error)

    def complete_all(self, error: BaseException) -> None:
        """Give every caller `error`, whatever the tasks still do, and close what their requests held."""
        outputs = tuple(self.outputs.values())
        self.outputs.clear()
        for mailbox in tuple(self.mailboxes):
            mailbox.complete_all(error)
        for output in outputs:
            output.abort()
            close_each(f"request {output.request.id}", *output.closings(FinishReason.ABORTED))
