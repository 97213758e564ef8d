"""Requests that nobody waits for any more, and requests that wait for a place."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import anyio
import pytest

from helpers.sessions import cancel_once, eventually, opened, wait_until_idle
from rekindle import EngineConfig, Sampling, Session
from rekindle._src.calls.handle import Handle
from rekindle._src.core.records import Status, TextDelta
from rekindle.errors import InvalidRequest, QueueFull, RequestAborted

anyio_test = pytest.mark.anyio


@anyio_test
async def test_one_bad_prompt_of_a_list_ends_the_others() -> None:
    gate = threading.Event()
    with opened(gate=gate) as session:
        call = session.generate(["fine", "x" * 600, "fine too"], max_tokens=200)
        with pytest.raises(InvalidRequest), anyio.fail_after(30):  # the others can't end before the gate opens
            await call
        gate.set()
        eventually(lambda: all(handle.done for handle in call.handles))
        assert [handle.status for handle in call.handles] == [Status.ABORTED, Status.FAILED, Status.ABORTED]


@anyio_test
async def test_cancelling_a_handle_from_another_thread(slow: Session) -> None:
    handle = slow.submit("hello", max_tokens=400)

    def cancel() -> None:
        eventually(lambda: len(handle.token_ids) > 0)
        handle.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(RequestAborted, match="What it had produced"):
        await handle
    assert handle.status is Status.ABORTED and 0 < len(handle.token_ids) < 400
    handle.cancel()
    thread.join()


class ReadDeltas(list[TextDelta]):
    """Counts how often all of them are read."""

    passes = 0

    def __iter__(self) -> Iterator[TextDelta]:
        self.passes += 1
        return super().__iter__()


@anyio_test
async def test_what_many_sequences_have_written_is_read_once(slow: Session) -> None:
    """A server's loop stood still for seconds when the client of a thousand sequences had left."""
    handle = slow.submit("hello", max_tokens=400, n=4)
    eventually(lambda: len({delta.index for delta in handle._mailbox.deltas}) == 4)
    deltas = handle._mailbox.deltas = ReadDeltas(handle._mailbox.deltas)
    written = handle.so_far()
    assert deltas.passes == 1
    assert [completion.index for completion in written] == [0, 1, 2, 3] and all(one.text for one in written)
    handle.cancel()


@anyio_test
async def test_a_handle_cancelled_before_it_was_submitted(session: Session) -> None:
    call = session.generate("hello")
    call.cancel()
    with pytest.raises(RequestAborted):
        await call
    assert call.status is Status.ABORTED


@anyio_test
async def test_cancelling_the_awaiting_task_aborts_exactly_that_request(slow: Session) -> None:
    other = slow.submit("other", max_tokens=60)
    call = slow.generate("hello", max_tokens=400)
    await cancel_once(lambda: call.status is Status.DECODE and call.text, lambda: call)
    with pytest.raises(TimeoutError), anyio.fail_after(0.1):
        await slow.generate("third", max_tokens=400)
    eventually(lambda: call.done)
    assert call.status is Status.ABORTED and call.text
    assert len((await other).token_ids) == 60


@anyio_test
async def test_leaving_a_stream_aborts_it(slow: Session) -> None:
    async for _ in slow.stream("hello", max_tokens=400):
        break

    async def fails() -> None:
        async for _ in slow.stream("hello", max_tokens=400):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()
    kept = slow.stream("hello", max_tokens=400)
    async for _ in kept:
        break
    eventually(lambda: kept.done)
    assert kept.status is Status.ABORTED
    for _ in slow.stream_sync("hello", max_tokens=400):
        break
    wait_until_idle(slow)


@anyio_test
async def test_a_dropped_handle_aborts(slow: Session) -> None:
    slow.submit("hello", max_tokens=400)
    handle = slow.submit("hello", max_tokens=400)
    await anyio.sleep(0.05)
    del handle
    eventually(lambda: slow.stats().live == 0)


def test_a_handle_keeps_its_session_alive(session: Session) -> None:
    from helpers.sessions import fake_session

    handle = fake_session(step_seconds=0.001).submit("hello", max_tokens=20)
    gc.collect()
    assert len(handle.result_sync().token_ids) == 20


SMALL = EngineConfig(max_requests=2, max_tokens_per_step=16, max_model_len=512, page_size=8, max_queue=2)


@anyio_test
async def test_a_full_queue_is_told_or_waited_for() -> None:
    with opened(SMALL, step_seconds=0.002) as session:
        handles = [session.submit(f"{i}", max_tokens=10) for i in range(4)]
        with pytest.raises(QueueFull, match="4 of 4 places"):
            session.submit("one more")
        admitted: list[Handle] = []

        async def admit() -> None:
            admitted.append(await session.admit("waits", max_tokens=2))

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            group.start_soon(session.generate, [f"batch {i}" for i in range(20)], Sampling(max_tokens=2))
        assert all([len((await handle).token_ids) == 10 for handle in handles])
        assert len((await admitted[0]).token_ids) == 2


@anyio_test
async def test_waiting_for_a_place_can_be_cancelled_from_both_sides() -> None:
    with opened(SMALL, step_seconds=0.01) as session:
        handles = [session.submit(f"{i}", max_tokens=300) for i in range(4)]
        with anyio.move_on_after(0.05):
            await session.generate("impatient")
        waiting = session.generate("cancelled by another thread")
        timer = threading.Timer(0.05, waiting.cancel)
        timer.start()
        with pytest.raises(RequestAborted), anyio.fail_after(60):
            await waiting
        timer.join()
        assert session.stats().waiting_for_a_place == 0
        for handle in handles:
            handle.cancel()
