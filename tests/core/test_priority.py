"""Work in the background hands the interpreter's lock over sooner, and lets a main thread that works go first."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rekindle._src.core import priority
from rekindle._src.core.priority import INTERVAL, LOOK, give_way, handing_over, main_thread_seconds


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_until_the_last_one_leaves() -> None:
    sys.setswitchinterval(0.004)
    first, second = handing_over(), handing_over()
    with first:
        second.__enter__()
        assert sys.getswitchinterval() == pytest.approx(INTERVAL)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL), "one still works"
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_a_shorter_interval_stays() -> None:
    sys.setswitchinterval(1e-5)
    with handing_over():
        assert sys.getswitchinterval() == pytest.approx(1e-5)


def test_an_error_leaves_it_as_it_was() -> None:
    sys.setswitchinterval(0.004)
    with pytest.raises(ValueError, match="inside"), handing_over():
        raise ValueError("inside")
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_an_interval_set_meanwhile_stays() -> None:
    sys.setswitchinterval(0.004)
    with handing_over():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == pytest.approx(0.02)


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(priority, "time", self)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


def working(seconds: float, clock: Clock) -> Callable[[], float]:
    """Return the clock of a main thread that works for so many seconds and is idle afterwards."""
    return lambda: min(clock.now, seconds)


def test_a_job_waits_while_the_main_thread_works(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    give_way(lambda: False, used=working(0.5, clock))
    assert clock.now == pytest.approx(0.5, abs=2 * LOOK)
    began = clock.now
    give_way(lambda: False, used=working(0.0, clock))
    assert clock.now - began == pytest.approx(LOOK), "it is idle"


def test_yielding_ends_with_its_patience_or_when_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    give_way(lambda: False, patience=1.0, used=working(9.0, clock))
    assert clock.now == pytest.approx(1.0, abs=2 * LOOK)
    looks = itertools.count()
    give_way(lambda: next(looks) == 3, used=working(9.0, clock))
    assert clock.now == pytest.approx(1.0 + 3 * LOOK, abs=2 * LOOK)


def test_it_does_not_wait_where_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    give_way(lambda: False, used=lambda: None)
    assert clock.now == 0.0


@pytest.mark.clock
@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't tell a thread's time")
def test_the_main_threads_time_is_its_own_and_not_that_of_its_waits() -> None:
    seen: list[float | None] = []

    def compute() -> None:
        seen.append(main_thread_seconds())
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        seen.append(main_thread_seconds())

    other = threading.Thread(target=compute)
    other.start()
    other.join()
    before, after = seen
    assert before is not None and after is not None and after - before < 0.02, "it waited"
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    now = main_thread_seconds()
    assert now is not None and now - after >= 0.05
