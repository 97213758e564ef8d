"""Between threads and event loops: wakeups, values that are set once, mailboxes, and the device thread."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import anyio

from rekindle._src.core.extension import NONE, Extensions
from rekindle._src.core.own_failure import close_each
from rekindle._src.core.records import Completion, EmbeddingResult, FinishReason, IntArray, TextDelta
from rekindle.errors import RequestAborted

T = TypeVar("T")
Callback = Callable[[], object]

# ipykernel turns an interrupt into a cancellation that it schedules without waking the loop, so that an idle asyncio
# loop would sleep through it. While a coroutine waits, the loop therefore wakes ten times a second (5 µs each time).
KEEP_ALIVE = 0.1


class LoopWaker:
    """Runs callbacks on one event loop, from any thread; at most one wake-up is on its way however many are posted."""

    def __init__(self, loop: object) -> None:
        # Weak, because each thread remembers its last waker: a strong reference would keep finished loops alive.
        self.loop = weakref.ref(loop)
        self._posted: deque[Callback] = deque()
        self._woken = False

    def post(self, callback: Callback) -> None:
        """Run `callback`, which must not raise, on the loop soon. Never blocks; does nothing on a finished loop."""
        self._posted.append(callback)
        if self._woken:
            return
        self._woken = True
        loop = self.loop()
        try:
            if loop is None:
                raise RuntimeError("the loop is gone")
            self._wake(loop)
        except RuntimeError:  # closed asyncio loop, or trio.RunFinishedError
            self._posted.clear()
            self._woken = False

    def _run(self) -> None:
        # Cleared before the callbacks are taken: one that is posted meanwhile wakes the loop once more at worst.
        self._woken = False
        while self._posted:
            self._posted.popleft()()

    def _wake(self, loop: Any) -> None:
        raise NotImplementedError

    def wakeup(self) -> Wakeup:
        """Return a wakeup for a coroutine on this loop."""
        raise NotImplementedError


class AsyncioWaker(LoopWaker):
    """For asyncio. Wakes the loop every `KEEP_ALIVE` seconds while a coroutine waits on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.waiting = 0
        self._ticking = False

    def _wake(self, loop: Any) -> None:
        loop.call_soon_threadsafe(self._run)

    def wakeup(self) -> Wakeup:
        return AsyncioWakeup(self)

    def keep_alive(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._ticking:
            self._ticking = True
            loop.call_later(KEEP_ALIVE, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = False
        if self.waiting:
            self.keep_alive(loop)


class TrioWaker(LoopWaker):
    """Wakes the tasks of a trio loop."""

    def _wake(self, loop: Any) -> None:
        loop.run_sync_soon(self._run)

    def wakeup(self) -> Wakeup:
        return TrioWakeup(self)


class _Here(threading.local):
    """This thread's last waker, and how many `run_sync` it is inside."""

    waker: LoopWaker | None = None
    blocking = 0


_here = _Here()
_wakers: weakref.WeakKeyDictionary[Any, LoopWaker] = weakref.WeakKeyDictionary()


def _trio_in_use() -> Any:
    """Return `trio.lowlevel` if this thread is inside a run of trio, or None.

    A module that another thread has begun to import lacks its names, and runs nothing yet.
    """
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)
    running = getattr(lowlevel, "in_trio_run", None)
    return lowlevel if running is not None and running() else None


def current_waker() -> LoopWaker:
    """Return the waker of the event loop that runs now."""
    # Trio first: an IPython cell under `%autoawait trio` runs trio inside a callback of the kernel's asyncio loop.
    trio = _trio_in_use()
    on_trio = trio is not None
    loop: Any = asyncio.get_running_loop() if trio is None else trio.current_trio_token()
    waker = _here.waker
    if waker is None or waker.loop() is not loop:
        waker = _wakers.get(loop)
        if waker is None:
            waker = _wakers[loop] = TrioWaker(loop) if on_trio else AsyncioWaker(loop)
        _here.waker = waker
    return waker


class Wakeup(Protocol):
    """Wakes its one waiter. `wake` may be called from any thread and never blocks.

    A call before the wait is kept. A wait may end without one, so waiters check their condition again.
    """

    def wake(self) -> None: ...
    async def wait(self) -> None: ...


class AsyncioWakeup:
    """A bare future: asyncio.Event and anyio.Event cost 3 µs more for each wake-up."""

    __slots__ = ("_future", "_signalled", "_waker")

    def __init__(self, waker: AsyncioWaker) -> None:
        self._waker = waker
        self._future: asyncio.Future[None] | None = None
        self._signalled = False

    def wake(self) -> None:
        if not self._signalled:
            self._signalled = True
            self._waker.post(self._set)

    def _set(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        if not self._signalled:
            waker = self._waker
            loop = asyncio.get_running_loop()
            self._future = loop.create_future()
            waker.waiting += 1
            waker.keep_alive(loop)
            try:
                # A wake from another thread at this point is posted, so it runs after the await has begun.
                await self._future
            finally:
                waker.waiting -= 1
                self._future = None
        # Cleared before the waiter checks its condition, so that a wake during the check is not lost.
        self._signalled = False


class TrioWakeup:
    """An event that is replaced after each wait."""

    __slots__ = ("_event", "_signalled", "_waker")

    def __init__(self, waker: TrioWaker) -> None:
        self._waker = waker
        self._event = anyio.Event()
        self._signalled = False

    def wake(self) -> None:
        if not self._signalled:
            self._signalled = True
            self._waker.post(self._set)

    def _set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = anyio.Event()
        self._signalled = False


class ThreadWakeup:
    """For a thread without a loop: its wait blocks the thread and never suspends the coroutine."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        while not self._event.wait(KEEP_ALIVE):  # in slices: Windows has no interruptible wait without a timeout
            pass
        self._event.clear()


def caller() -> object:
    """Return the asyncio or trio task that runs now, or this thread's identifier if none does."""
    trio = _trio_in_use()
    task: object = None
    with contextlib.suppress(RuntimeError):  # no loop runs in this thread
        task = asyncio.current_task() if trio is None else trio.current_task()
    return threading.get_ident() if task is None else task


def new_wakeup() -> Wakeup:
    """Return a wakeup for the caller: a coroutine on its loop, or a thread inside `run_sync`."""
    return ThreadWakeup() if _here.blocking else current_waker().wakeup()


def run_sync(coroutine: Coroutine[object, None, T]) -> T:
    """Run a client coroutine in this thread, blocking it; every `…_sync` method is made of this.

    Client coroutines await nothing but wakeups, and inside `run_sync` a wakeup blocks the thread. So no loop is needed,
    and one that already runs in this thread, as in a notebook cell, does no harm.
    """
    _here.blocking += 1
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        _here.blocking -= 1
    coroutine.close()
    raise AssertionError("a client coroutine awaited something other than a wakeup")


def blocks() -> bool:
    """True if the caller is inside `run_sync`, so that it may block this thread and can't await a loop."""
    return _here.blocking > 0


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

    @property
    def error(self) -> BaseException | None:
        """The error that it failed with, if it did."""
        return self._error

    async def get(self) -> T:
        await until(lambda: self.filled, self.wakeups)
        return self.result()

    def result(self) -> T:
        """Return the value that is there, or raise the error."""
        if self._error is not None:
            raise fresh(self._error)
        return self._value


class RelayResult(NamedTuple):
    """The result of a sequence that sent its events to another process."""

    reason: FinishReason


Outcome = Completion | EmbeddingResult | RelayResult | BaseException  # of one sequence


class Mailbox:
    """The output of the `n` sequences of one submission: a log that only grows, with any number of readers.

    The host thread writes, any thread reads. Readers keep their own place in the log, so that a slow one costs nothing
    but the log itself, which `max_tokens` bounds.
    """

    def __init__(self, count: int) -> None:
        self.deltas: list[TextDelta] = []
        self.results: list[Outcome | None] = [None] * count
        self.request_ids: list[str] = []  # sequences that intake handed on
        self.prompt: str | None = None  # a rendered chat, set by intake
        self.prompt_ids: IntArray | None = None  # set by intake
        self.extensions: Extensions = NONE  # of the submission with that prompt, set by intake
        self.seed: int | None = None  # of the first sequence, set by intake
        self.abandoned = False  # its caller cancelled; set on the host's loop
        self.on_abandon: Callable[[], object] | None = None  # ends its wait in intake; called on the host's loop
        self.ended: bool = False
        self.failure: OneShot[BaseException] | None = None  # gets the first error; the mailboxes of a `Batch` share it
        self.on_sequence_end: Callable[[], object] | None = None  # called after each sequence
        self.on_complete: Callable[[Mailbox], object] | None = None  # called after all of them
        self._remaining = count
        self._stream_wakeups: list[Wakeup] = []
        self._wakeups: list[Wakeup] = []

    def check_waited_for(self) -> None:
        """Raise `RequestAborted` if its caller has cancelled; called before its requests are queued."""
        if self.abandoned:
            raise RequestAborted("the request was cancelled before it was queued")

    def put(self, delta: TextDelta) -> None:
        self.deltas.append(delta)
        if self._stream_wakeups:
            wake(self._stream_wakeups)

    def complete(self, index: int, result: Outcome) -> None:
        """Set the result of one sequence; only the first call counts. What its callbacks raise is logged.

        Readers are woken last, so that one that submits its next request finds the place of this one free.
        """
        if self.results[index] is not None:
            return
        self.results[index] = result
        self._remaining -= 1
        closings: list[Callback] = []
        if self.on_sequence_end is not None:
            closings.append(self.on_sequence_end)
        if self.failure is not None and isinstance(result, BaseException):
            closings.append(partial(self.failure.put, result))
        if self._remaining == 0:
            self.ended = True
            if self.on_complete is not None:
                closings.append(partial(self.on_complete, self))
            closings += partial(wake, self._stream_wakeups), partial(wake, self._wakeups)
        close_each("a request", *closings)

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


Contexts = Callable[[], contextlib.AbstractContextManager[None]]


def capture_contexts() -> Contexts:
    """Return a function that enters the JAX contexts of this thread in another one; they are thread-local.

    Covers `jax.default_device`, `jax.default_matmul_precision` and `jax.set_mesh`. JAX is not imported for this: if it
    was not imported before, there is no context.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        return contextlib.nullcontext
    device, precision = jax.config.jax_default_device, jax.config.jax_default_matmul_precision
    mesh = jax.sharding.get_mesh()

    @contextlib.contextmanager
    def enter() -> Any:
        with contextlib.ExitStack() as stack:
            if device is not None:
                stack.enter_context(jax.default_device(device))
            if precision is not None:
                stack.enter_context(jax.default_matmul_precision(precision))
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            yield

    return enter


class _Posting:
    """A wakeup that calls a function on an event loop; no coroutine waits for it."""

    __slots__ = ("_callback", "_waker")

    def __init__(self, waker: LoopWaker, callback: Callback) -> None:
        self._waker, self._callback = waker, deque((callback,))

    def wake(self) -> None:
        while self._callback:  # let go of, since it may hold the object that holds this
            self._waker.post(self._callback.popleft())

    async def wait(self) -> None:
        raise AssertionError("its callback is called")


class DeviceThread:
    """Runs jobs one after another while its callers' loops stay free.

    A round trip takes 25 to 30 µs, with anyio.to_thread.run_sync 45 to 75 µs (medians on asyncio and uvloop).
    """

    def __init__(self, contexts: Contexts = contextlib.nullcontext, name: str = "rekindle device") -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], OneShot[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs, contexts), name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job`; return its result or raise its error. If the caller is cancelled, the job still finishes."""
        reply: OneShot[T] = OneShot()
        self._jobs.put((job, reply))
        return await reply.get()

    def start(self, job: Callable[[], T], done: Callable[[OneShot[T]], object]) -> None:
        """Run `job`, then call `done` with its outcome on the loop that runs now; `done` must not raise."""
        reply: OneShot[T] = OneShot()
        reply.wakeups.append(_Posting(current_waker(), partial(done, reply)))
        self._jobs.put((job, reply))

    def stop(self, timeout: float = 0.0) -> bool:
        """End after the queued jobs; true if the thread has ended within `timeout` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], OneShot[Any]] | None], contexts: Contexts) -> None:
    with contexts():
        while (entry := jobs.get()) is not None:
            job, reply = entry
            reply.run(job)
            del entry, job, reply  # a job's result may be device memory; keep nothing while waiting for the next
