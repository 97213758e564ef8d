"""What a session costs: idle, per delta, per step. Bounds are several times what an idle machine shows."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from helpers.sessions import fake_session, host_of, opened
from rekindle import Sampling
from rekindle._src.calls.handle import Handle
from rekindle._src.calls.prompts import Prompt
from rekindle._src.core.records import TextDelta
from rekindle._src.dispatch.threads import DeviceThread

DELTAS, RATE = 400, 1000


def paced(count: int, rate: float, deliver: Callable[[int], object]) -> threading.Thread:
    """A thread that delivers `count` times at `rate` a second."""

    def feed() -> None:
        due = time.perf_counter()
        for i in range(count):
            due += 1 / rate
            while (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            deliver(i)

    return threading.Thread(target=feed)


def bare_wake_ups() -> float:
    """Seconds of the caller's thread for each wake-up of an asyncio task from another thread, and nothing else."""

    async def main() -> float:
        loop, arrived = asyncio.get_running_loop(), [0]
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            arrived[0] += 1
            if not waiter.done():
                waiter.set_result(None)

        thread = paced(DELTAS, RATE, lambda i: loop.call_soon_threadsafe(wake))
        thread.start()
        start, seen = time.thread_time(), 0
        while seen < DELTAS:
            if seen == arrived[0]:
                waiter = loop.create_future()
                await waiter
            seen += 1
        return (time.thread_time() - start) / DELTAS

    return asyncio.run(main())


def streamed(session: Any, run: Callable[[Callable[[], Awaitable[float]]], float]) -> tuple[float, float]:
    """Caller's thread seconds for each delta at 1,000 deltas a second, and the median seconds from put to caller."""
    handle = Handle(host_of(session), session, Prompt("x", None), Sampling())
    handle._submitted = True
    latencies: list[float] = []

    def deliver(i: int) -> None:
        handle._mailbox.put(TextDelta("x", str(time.perf_counter())))
        if i == DELTAS - 1:
            handle._mailbox.complete(0, TimeoutError())

    async def main() -> float:
        thread = paced(DELTAS, RATE, deliver)
        thread.start()
        start = time.thread_time()
        with contextlib.suppress(TimeoutError):
            async for delta in handle:
                latencies.append(time.perf_counter() - float(delta.text))  # noqa: PERF401
        return (time.thread_time() - start) / DELTAS

    return run(main), statistics.median(latencies)


@pytest.mark.thorough
def test_streaming_costs_little_of_the_callers_loop() -> None:
    """A delta costs 1.2 to 2 bare wake-ups from another thread, which take 16 to 90 µs, as the machine goes."""
    with fake_session() as session:
        pairs = [(streamed(session, lambda main: asyncio.run(main())), bare_wake_ups()) for _ in range(5)]  # type: ignore[arg-type]
    share = min(ours / bare for (ours, _), bare in pairs)
    latency = min(latency for (_, latency), _ in pairs)
    assert share < 2.5, f"{share:.2f} times a bare wake-up"
    assert latency < 1e-3, f"{latency * 1e6:.0f} µs from the host to the caller"


def idle_share(seconds: float) -> float:
    """Share of a core that this process uses while the test sleeps; earlier work may still run in the first look."""
    start = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - start) / seconds


@pytest.mark.thorough
def test_an_idle_session_costs_nothing() -> None:
    with opened() as session:
        session.generate_sync("x", max_tokens=4)
        assert any(idle_share(2.0) < 0.01 for _ in range(5)), "the idle session uses the CPU"


@pytest.mark.clock
def test_waiting_for_the_device_costs_little() -> None:
    """The way to the device thread and back, compared with a bare queue that another thread answers."""
    device = DeviceThread()
    bare: queue.SimpleQueue[asyncio.Future[None] | None] = queue.SimpleQueue()

    def answer(loop: asyncio.AbstractEventLoop) -> None:
        while (future := bare.get()) is not None:
            loop.call_soon_threadsafe(future.set_result, None)

    async def there_and_back() -> None:
        bare.put(future := asyncio.get_running_loop().create_future())
        await future

    async def median(call: Callable[[], Awaitable[object]]) -> float:
        taken = []
        for _ in range(300):
            start = time.perf_counter()
            await call()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    async def main() -> float:
        thread = threading.Thread(target=answer, args=[asyncio.get_running_loop()])
        thread.start()
        try:
            return min([await median(lambda: device.run(int)) / await median(there_and_back) for _ in range(5)])
        finally:
            bare.put(None)
            thread.join()

    share = asyncio.run(main())
    device.stop(5)
    print(f"{share:.2f} times a bare queue")
    assert share < 3


@pytest.mark.slow
def test_an_idle_session_costs_nothing_for_ten_seconds() -> None:
    with opened() as session:
        session.generate_sync("x", max_tokens=4)
        assert any(idle_share(10.0) < 0.01 for _ in range(3)), "the idle session uses the CPU"
