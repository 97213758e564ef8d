"""Ports, bells, slots, mailboxes and the gate: waiting across threads and loops."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import anyio
import pytest

from helpers.sessions import eventually
from rekindle._src.core.records import TextDelta
from rekindle._src.dispatch.admission_limiter import Gate
from rekindle._src.dispatch.mailbox import Mailbox, Slot, fresh
from rekindle._src.dispatch.wakeups import current_port, new_bell, run_sync
from rekindle.errors import SessionClosed, StepFailed


def delta(text: str) -> TextDelta:
    return TextDelta("r", text)


@pytest.mark.anyio
async def test_callbacks_posted_from_a_thread_run_on_the_loop_with_one_wake_up() -> None:
    port, ran, loops = current_port(), [], set()
    wakes = []
    wake = port._wake
    port._wake = lambda loop: (wakes.append(1), wake(loop))  # type: ignore[method-assign]

    def post() -> None:
        for i in range(1000):
            port.post(lambda i=i: (ran.append(i), loops.add(threading.get_ident())))

    thread = threading.Thread(target=post)
    thread.start()
    thread.join()  # blocks the loop meanwhile
    assert not ran
    done = anyio.Event()
    port.post(done.set)
    await done.wait()
    assert ran == list(range(1000))
    assert loops == {threading.get_ident()}
    assert len(wakes) <= 2


def test_a_finished_loop_takes_callbacks_and_forgets_them() -> None:
    async def port():  # type: ignore[no-untyped-def]
        return current_port()

    finished = asyncio.run(port())
    for _ in range(3):
        finished.post(lambda: pytest.fail("ran on a finished loop"))
    assert not finished._posted


def test_ports_do_not_keep_loops_alive() -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        current_port()
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


@pytest.mark.anyio
async def test_a_ring_before_the_wait_is_kept() -> None:
    bell = new_bell()
    bell.ring()
    with anyio.fail_after(5):
        await bell.wait()
    with anyio.move_on_after(0.05) as scope:
        for _ in range(2):  # the wake-up that was on its way may end one wait early
            await bell.wait()
    assert scope.cancelled_caught, "one ring kept waking the waiter"


@pytest.mark.anyio
async def test_one_ring_from_a_thread_for_each_wait() -> None:
    bell, back = new_bell(), threading.Semaphore(0)

    def ring() -> None:
        for _ in range(200):
            bell.ring()
            assert back.acquire(timeout=10)

    thread = threading.Thread(target=ring)
    thread.start()
    with anyio.fail_after(10):
        for _ in range(200):
            await bell.wait()
            back.release()
    thread.join()


@pytest.mark.anyio
async def test_many_readers_on_many_loops_see_the_whole_log() -> None:
    mailbox = Mailbox(1)
    seen: list[list[str]] = []

    async def read() -> None:
        texts: list[str] = []
        while len(texts) < len(mailbox.deltas) or not mailbox.settled:
            await mailbox.more(len(texts))
            texts += [delta.text for delta in mailbox.deltas[len(texts) :]]
        seen.append(texts)

    def write() -> None:
        for i in range(500):
            mailbox.put(delta(str(i)))
        mailbox.settle(0, StepFailed("the end"))

    others = [threading.Thread(target=lambda: asyncio.run(read())) for _ in range(2)]
    others.append(threading.Thread(target=lambda: run_sync(read())))
    writer = threading.Thread(target=write)
    for thread in others:
        thread.start()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(read)
            writer.start()
    for thread in (*others, writer):
        thread.join()
    assert seen == [[str(i) for i in range(500)]] * 5
    assert not mailbox._stream_bells and not mailbox._bells


def test_only_the_first_end_counts_and_places_are_given_back_once_each() -> None:
    left = []
    mailbox = Mailbox(2)
    mailbox.on_settled = lambda: left.append(1)
    mailbox.settle(0, StepFailed("one"))
    mailbox.settle(0, StepFailed("another"))
    assert not mailbox.settled
    mailbox.settle_all(StepFailed("all"))
    assert mailbox.settled and len(left) == 2
    assert str(mailbox.results[0]) == "one"


@pytest.mark.anyio
async def test_every_waiter_of_a_slot_gets_an_error_of_its_own() -> None:
    slot: Slot[int] = Slot()
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
async def test_the_gate_lets_in_by_turns() -> None:
    gate, order = Gate(3), []
    assert gate.try_enter(3)

    async def enter(name: str, count: int) -> None:
        await gate.enter(count)
        order.append(name)

    async with anyio.create_task_group() as group:
        for name, count in (("large", 3), ("small", 1)):
            group.start_soon(enter, name, count)
            await anyio.wait_all_tasks_blocked()
        assert not gate.try_enter(1)
        gate.leave()
        await anyio.wait_all_tasks_blocked()
        assert not order, "the small one overtook the large one"
        assert not gate.try_enter(1), "somebody jumped the queue"
        gate.leave(2)
        await anyio.wait_all_tasks_blocked()
        assert order == ["large"]
        gate.leave(3)
    assert order == ["large", "small"] and gate.inside == 1 and gate.waiting == 0


@pytest.mark.anyio
async def test_leaving_the_line_lets_the_next_one_in() -> None:
    gate, order = Gate(2), []
    assert gate.try_enter(1)
    async with anyio.create_task_group() as group:
        impatient = anyio.CancelScope()

        async def large() -> None:
            with impatient:
                await gate.enter(2)

        group.start_soon(large)
        await anyio.wait_all_tasks_blocked()

        async def small() -> None:
            await gate.enter(1)
            order.append("small")

        group.start_soon(small)
        await anyio.wait_all_tasks_blocked()
        assert not order
        impatient.cancel()
    assert order == ["small"] and gate.inside == 2 and gate.waiting == 0


@pytest.mark.anyio
async def test_who_is_admitted_and_cancelled_at_once_gives_the_place_back() -> None:
    gate = Gate(1)
    assert gate.try_enter(1)
    with anyio.CancelScope() as scope:

        async def both() -> None:
            await anyio.wait_all_tasks_blocked()
            gate.leave()
            scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(both)
            await gate.enter(1)
    assert gate.inside == 0


@pytest.mark.anyio
async def test_a_closed_gate_refuses_with_the_cause() -> None:
    gate = Gate(1)
    assert gate.try_enter(1)
    error = SessionClosed("over")
    error.__cause__ = ValueError("why")

    async def enter() -> None:
        with pytest.raises(SessionClosed, match="over") as caught:
            await gate.enter(1)
        assert isinstance(caught.value.__cause__, ValueError)

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
        await anyio.wait_all_tasks_blocked()
        gate.close(error)
    with pytest.raises(SessionClosed):
        gate.try_enter(1)
    assert gate.waiting == 0


def test_a_thread_waits_without_a_loop() -> None:
    slot: Slot[int] = Slot()
    timer = threading.Timer(0.05, slot.put, [7])
    timer.start()
    assert run_sync(slot.get()) == 7
    timer.join()
    assert not slot.bells
    eventually(lambda: not timer.is_alive())
