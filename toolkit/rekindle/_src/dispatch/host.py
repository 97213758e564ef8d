"""The thread of a session: an event loop of its own for the dispatch loop, so that notebook cells don't block it."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio

from rekindle._src.core.activity import ProgramWait
from rekindle._src.core.own_failure import own_failure, root_cause
from rekindle._src.core.records import Request
from rekindle._src.dispatch.admission_limiter import AdmissionLimiter
from rekindle._src.dispatch.device import Contexts, DeviceThread
from rekindle._src.dispatch.mailbox import Mailbox, OneShot
from rekindle._src.dispatch.messages import Control, Submission
from rekindle._src.dispatch.wakeups import LoopWaker, caller, current_waker, run_sync
from rekindle.errors import QueueFull, RekindleError, SessionClosed, SessionForked

if TYPE_CHECKING:
    from rekindle._src.dispatch.backend import Front
    from rekindle._src.dispatch.detokenize import Take
    from rekindle._src.dispatch.dispatch import Dispatch

T = TypeVar("T")

EXIT_SECONDS = 2.0  # bound on the interpreter's exit, for all sessions together
CLOSE_SECONDS = 5.0  # how long closing waits for the steps in flight before it leaves the device thread alone


class _Job(NamedTuple):
    """A call for the host's loop, and the call that is made instead if that loop has ended."""

    do: Callable[[], object]
    refuse: Callable[[BaseException], object]


class Host:
    """Owns the thread, the device thread and the backend; every method may be called from any thread."""

    def __init__(
        self,
        build: Callable[[], Front],
        *,
        contexts: Contexts = contextlib.nullcontext,
        backend: str = "asyncio",
        backend_options: dict[str, Any] | None = None,
    ) -> None:
        """Set up; `build` makes front and backend on the device thread."""
        self.opened: OneShot[Front] = OneShot()
        self.ended: OneShot[None] = OneShot()
        self.limiter: AdmissionLimiter = AdmissionLimiter(0)  # replaced when the backend and so its bounds are known
        self.program_wait: ProgramWait = ProgramWait()  # replaced by the front's
        self.crash: BaseException | None = None
        self.paused_by: list[object] = []  # tasks and threads inside `with session.paused()`
        self._build: Callable[[], Front] | None = build
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
        """Raise if the caller has paused the session: waiting for `activity` would keep it from requesting steps."""
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

    def refusal(self) -> SessionClosed:
        """Return the error of a closed session."""
        refusal = SessionClosed(str(self._reason))
        refusal.__cause__ = self.crash
        return refusal

    def submit(self, submission: Submission) -> None:
        """Hand over an admitted submission."""
        self._post(
            _for_request(lambda dispatch: dispatch.submit(submission), submission.mailbox),
            submission.mailbox.complete_all,
        )

    def relay(self, request: Request, mailbox: Mailbox, take: Take) -> None:
        """Run a request that another process has taken in, and that has been admitted; see `Dispatch.relay`."""
        self._post(_for_request(lambda dispatch: dispatch.relay(request, mailbox, take), mailbox), mailbox.complete_all)

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
        from rekindle._src.dispatch.dispatch import Dispatch  # imported with the engine, in a thread of the session's

        self._dispatch = Dispatch(front, device)
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
            for part in (front.backend, front.grammars):
                try:
                    if part is not None:
                        await device.run(part.close)
                except Exception as error:
                    self._crashed(error)
        device.stop(1.0)


def _for_request(do: Callable[[Dispatch], object], mailbox: Mailbox) -> Callable[[Dispatch], object]:
    """Return a job for one request, which ends that request if it raises."""

    def run(dispatch: Dispatch) -> None:
        try:
            do(dispatch)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session is closing
            raise
        except BaseException as error:
            mailbox.complete_all(own_failure(error, "the request could not be taken in"))

    return run


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
