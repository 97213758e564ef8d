"""Wakers, wakeups, one-shots, mailboxes and the admission limiter: waiting across threads and loops."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import anyio
import pytest

from helpers.sessions import eventually
from rekindle._src.core.records import TextDelta
from rekindle._src.dispatch.host import AdmissionLimiter
from rekindle._src.dispatch.threads import Mailbox, OneShot, current_waker, fresh, new_wakeup, run_sync
from rekindle.errors import SessionClosed, StepFailed


def delta(text: str) -> TextDelta:
    return TextDelta("r", text)


@pytest.mark.anyio
async def test_callbacks_posted_from_a_thread_run_on_the_loop_with_one_wake_up() -> None:
    waker, ran, loops = current_waker(), [], set()
    wakes = []
    wake = waker._wake
    waker._wake = lambda loop: (wakes.append(1), wake(loop))  # type: ignore[method-assign]

    def post() -> None:
        for i in range(1000):
            waker.post(lambda i=i: (ran.append(i), loops.add(threading.get_ident())))

    thread = threading.Thread(target=post)
    thread.start()
    thread.join()  # blocks the loop meanwhile
    assert not ran
    done = anyio.Event()
    waker.post(done.set)
    await done.wait()
    assert ran == list(range(1000))
    assert loops == {threading.get_ident()}
    assert len(wakes) <= 2


def test_a_finished_loop_takes_callbacks_and_forgets_them() -> None:
    async def waker():  # type: ignore[no-untyped-def]
        return current_waker()

    finished = asyncio.run(waker())
    for _ in range(3):
        finished.post(lambda: pytest.fail("ran on a finished loop"))
    assert not finished._posted


def test_ports_do_not_keep_loops_alive() -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        current_waker()
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


@pytest.mark.anyio
async def test_a_ring_before_the_wait_is_kept() -> None:
    wakeup = new_wakeup()
    wakeup.wake()
    with anyio.fail_after(60):
        await wakeup.wait()
    with anyio.move_on_after(0.05) as scope:
        for _ in range(2):  # the wake-up that was on its way may end one wait early
            await wakeup.wait()
    assert scope.cancelled_caught, "one ring kept waking the waiter"


@pytest.mark.anyio
async def test_one_ring_from_a_thread_for_each_wait() -> None:
    wakeup, back = new_wakeup(), threading.Semaphore(0)

    def wake() -> None:
        for _ in range(200):
            wakeup.wake()
            assert back.acquire(timeout=10)

    thread = threading.Thread(target=wake)
    thread.start()
    with anyio.fail_after(60):
        for _ in range(200):
            await wakeup.wait()
            back.release()
    thread.join()


@pytest.mark.anyio
async def test_many_readers_on_many_loops_see_the_whole_log() -> None:
    mailbox = Mailbox(1)
    seen: list[list[str]] = []

    async def read() -> None:
        texts: list[str] = []
        while len(texts) < len(mailbox.deltas) or not mailbox.ended:
            await mailbox.wait_beyond(len(texts))
            texts += [delta.text for delta in mailbox.deltas[len(texts) :]]
        seen.append(texts)

    def write() -> None:
        for i in range(500):
            mailbox.put(delta(str(i)))
        mailbox.complete(0, StepFailed("the end"))

    others = [threading.Thread(target=lambda: asyncio.run(read())) for _ in range(2)]
    others.append(threading.Thread(target=lambda: run_sync(read())))
    writer = threading.Thread(target=write)
    for thread in others:
        thread.start()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(read)
            writer.start()
    for thread in (*others, writer):
        thread.join()
    assert seen == [[str(i) for i in range(500)]] * 5
    assert not mailbox._stream_wakeups and not mailbox._wakeups


def test_only_the_first_end_counts_and_places_are_given_back_once_each() -> None:
    left = []
    mailbox = Mailbox(2)
    mailbox.on_sequence_end = lambda: left.append(1)
    mailbox.complete(0, StepFailed("one"))
    mailbox.complete(0, StepFailed("another"))
    assert not mailbox.ended
    mailbox.complete_all(StepFailed("all"))
    assert mailbox.ended and len(left) == 2
    assert str(mailbox.results[0]) == "one"


@pytest.mark.anyio
async def test_every_waiter_of_a_slot_gets_an_error_of_its_own() -> None:
    slot: OneShot[int] = OneShot()
    cause = ValueError("cause")
    error = StepFailed("no")
    error.__cause__ = cause
    caught: list[BaseException] = []

    async def wait() -> None:
        try:
            await slot.get()
        except StepFailed as mine:
            caught.append(mine)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        slot.fail(error)
    assert len({id(mine) for mine in caught}) == 3
    assert all(mine.__cause__ is cause for mine in caught)
    assert error.__traceback__ is None


def test_an_exception_that_can_not_be_copied_is_raised_itself() -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__("one argument")

    odd = Odd(1, 2)
    assert fresh(odd) is odd


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ValueError("a callback"), SystemExit(1), KeyboardInterrupt()], ids=repr)
async def test_readers_are_woken_whatever_the_callbacks_of_an_end_raise(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    mailbox, called = Mailbox(2), []

    def failing(*_: object) -> None:
        called.append(1)
        raise error

    mailbox.on_sequence_end = mailbox.on_complete = failing
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(mailbox.wait_all)
            group.start_soon(mailbox.wait_beyond, 0)
            await anyio.wait_all_tasks_blocked()
            mailbox.complete_all(SessionClosed("over"))
    assert mailbox.ended and isinstance(mailbox.error, SessionClosed) and len(called) == 3
    assert caplog.text.count("could be closed") == 3


@pytest.mark.anyio
async def test_the_gate_lets_in_by_turns() -> None:
    limiter, order = AdmissionLimiter(3), []
    assert limiter.try_enter(3)

    async def enter(name: str, count: int) -> None:
        await limiter.enter(count)
        order.append(name)

    async with anyio.create_task_group() as group:
        for name, count in (("large", 3), ("small", 1)):
            group.start_soon(enter, name, count)
            await anyio.wait_all_tasks_blocked()
        assert not limiter.try_enter(1)
        limiter.leave()
        await anyio.wait_all_tasks_blocked()
        assert not order, "the small one overtook the large one"
        assert not limiter.try_enter(1), "somebody jumped the queue"
        limiter.leave(2)
        await anyio.wait_all_tasks_blocked()
        assert order == ["large"]
        limiter.leave(3)
    assert order == ["large", "small"] and limiter.inside == 1 and limiter.waiting == 0


@pytest.mark.anyio
async def test_callers_that_wait_take_turns_and_leave_half_of_the_places() -> None:
    limiter, order = AdmissionLimiter(16), list[str]()

    async def enter(caller: str, count: int = 1) -> None:
        await limiter.enter(count, caller=caller)
        order.append(caller)

    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(enter, "a")
        await anyio.wait_all_tasks_blocked()
        assert order == ["a"] * 8 and limiter.waiting == 4
        assert not limiter.try_enter(1, "a"), "it overtook itself"
        assert limiter.try_enter(8, "b")
        for _ in range(2):
            group.start_soon(enter, "c")
        await anyio.wait_all_tasks_blocked()
        assert order == ["a"] * 8
        limiter.leave(3, "b")
        await anyio.wait_all_tasks_blocked()
        assert order == ["a"] * 8 + ["c", "c"] and limiter.waiting == 4
        limiter.leave(4, "a")
        await anyio.wait_all_tasks_blocked()
    assert order == ["a"] * 8 + ["c", "c"] + ["a"] * 4 and limiter.inside == 15


class CallerOnce(str):
    """The name of a caller; looking it up calls a function once, as the garbage collector may run anywhere."""

    looked_up: Callable[[], None] | None = None

    def __hash__(self) -> int:
        call, self.looked_up = self.looked_up, None
        if call is not None:
            call()
        return super().__hash__()


@pytest.mark.anyio
async def test_places_that_the_collector_gives_back_in_the_middle_of_a_change_come_after_it() -> None:
    limiter, caller = AdmissionLimiter(4), CallerOnce("b")
    assert limiter.try_enter(4, "a")
    async with anyio.create_task_group() as group:
        for name in (caller, "c"):
            group.start_soon(limiter.enter, 1, lambda: False, name)
            await anyio.wait_all_tasks_blocked()
        assert limiter.waiting == 2
        caller.looked_up = partial(limiter.leave, 1, "a")
        limiter.leave(1, "a")
        await anyio.wait_all_tasks_blocked()
        assert caller.looked_up is None, "nothing was given back in between: the test shows nothing"
        assert limiter.waiting == 0 and limiter.inside == 4
    limiter.leave(2, "a")
    assert limiter.inside == 2


@pytest.mark.anyio
async def test_a_caller_with_few_sequences_finds_a_spare_place() -> None:
    limiter = AdmissionLimiter(64)  # 8 spare ones, two for each caller
    assert limiter.try_enter(64, "a") and not limiter.try_enter(1, "a") and not limiter.try_enter(1)
    assert limiter.try_enter(2, "b") and not limiter.try_enter(1, "b")
    assert all(limiter.try_enter(2, caller) for caller in "cde") and not limiter.try_enter(1, "f")
    assert limiter.inside == 72
    for caller in "bcde":
        limiter.leave(2, caller)
    limiter.leave(64, "a")
    assert limiter.inside == 0 and limiter.try_enter(64, "b")


@pytest.mark.anyio
async def test_spare_places_keep_no_large_request_waiting() -> None:
    limiter = AdmissionLimiter(64)
    assert limiter.try_enter(2, "b") and limiter.try_enter(62, "a")
    async with anyio.create_task_group() as group:
        group.start_soon(limiter.enter, 64, lambda: False, "large")
        await anyio.wait_all_tasks_blocked()
        limiter.leave(62, "a")
        for _ in range(10):  # it always has two, and the large one is next all the same
            limiter.leave(1, "b")
            assert limiter.try_enter(1, "b")
        await anyio.wait_all_tasks_blocked()
        assert limiter.waiting == 0 and limiter.inside == 66


@pytest.mark.anyio
async def test_leaving_the_line_lets_the_next_one_in() -> None:
    limiter, order = AdmissionLimiter(2), []
    assert limiter.try_enter(1)
    async with anyio.create_task_group() as group:
        impatient = anyio.CancelScope()

        async def large() -> None:
            with impatient:
                await limiter.enter(2)

        group.start_soon(large)
        await anyio.wait_all_tasks_blocked()

        async def small() -> None:
            await limiter.enter(1)
            order.append("small")

        group.start_soon(small)
        await anyio.wait_all_tasks_blocked()
        assert not order
        impatient.cancel()
    assert order == ["small"] and limiter.inside == 2 and limiter.waiting == 0


@pytest.mark.anyio
async def test_a_request_cancelled_on_admission_gives_its_place_back() -> None:
    limiter = AdmissionLimiter(1)
    assert limiter.try_enter(1)
    with anyio.CancelScope() as scope:

        async def both() -> None:
            await anyio.wait_all_tasks_blocked()
            limiter.leave()
            scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(both)
            await limiter.enter(1)
    assert limiter.inside == 0


@pytest.mark.anyio
async def test_a_closed_gate_refuses_with_the_cause() -> None:
    limiter = AdmissionLimiter(1)
    assert limiter.try_enter(1)
    error = SessionClosed("over")
    error.__cause__ = ValueError("why")

    async def enter() -> None:
        with pytest.raises(SessionClosed, match="over") as caught:
            await limiter.enter(1)
        assert isinstance(caught.value.__cause__, ValueError)

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
        await anyio.wait_all_tasks_blocked()
        limiter.close(error)
    with pytest.raises(SessionClosed):
        limiter.try_enter(1)
    assert limiter.waiting == 0


def test_a_thread_waits_without_a_loop() -> None:
    slot: OneShot[int] = OneShot()
    timer = threading.Timer(0.05, slot.put, [7])
    timer.start()
    assert run_sync(slot.get()) == 7
    timer.join()
    assert not slot.wakeups
    eventually(lambda: not timer.is_alive())


def test_what_a_failed_function_held_is_freed_with_its_error() -> None:
    """It may be device memory, such as weights that do not fit: it must not wait for the garbage collector."""

    class Held: ...

    def fail(held: Held) -> None:
        raise StepFailed("no room")

    held, slot = Held(), OneShot[None]()
    freed = weakref.ref(held)
    gc.disable()
    try:
        slot.run(partial(fail, held))
        assert slot.filled
        del held, slot
        assert freed() is None
    finally:
        gc.enable()
