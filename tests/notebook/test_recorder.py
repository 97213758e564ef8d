"""The dashboard's figures, from steps whose rates are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.sessions import opened
from rekindle._src.notebook.dashboard import Recorder


class Steps:
    """Feeds a recorder with steps at times of its own making."""

    def __init__(self, steps: int = 240) -> None:
        self.now = 1000.0
        self.recorder = Recorder(steps, clock=lambda: self.now)
        self._step = 0

    def run(self, count: int, *, every: float, rows: int = 1, name: str = "a", made: int | None = None) -> None:
        """`count` decode steps of `rows` requests, `every` seconds from each to the next."""
        for _ in range(count):
            self.now += every
            self._step += 1
            decode = [_row(slot, f"{name}{slot}") for slot in range(rows)]
            plan = SimpleNamespace(
                step=self._step, first_decode=decode, prefill=[], offload=(), restore=(), tokens=rows
            )
            made_now = rows if made is None else made
            self.recorder(SimpleNamespace(plan=plan, sampled=made_now, device_seconds=0.9 * every))  # type: ignore[arg-type]


def _row(slot: int, request: str) -> Any:
    return SimpleNamespace(slot=slot, request=SimpleNamespace(id=request), draft=False)


@pytest.mark.parametrize("steps", [30, 240, 971, 5000])
@pytest.mark.parametrize(("rows", "rate"), [(1, 971.0), (1, 12.0), (8, 4000.0), (32, 20_000.0)])
def test_a_steady_rate_is_shown_whatever_the_recorder_remembers(steps: int, rows: int, rate: float) -> None:
    made = Steps()
    made.run(steps, every=rows / rate, rows=rows)
    assert made.recorder.rate() == pytest.approx(rate, rel=0.02)


def test_a_burst_reads_as_in_its_completion() -> None:
    made = Steps()
    made.run(100, every=0.001)
    made.now += 1.5  # nobody asks anything
    assert made.recorder.rate() == pytest.approx(1000, rel=0.02)
    made.run(100, every=0.001, name="b")
    assert made.recorder.rate() == pytest.approx(1000, rel=0.02)


def test_an_idle_session_makes_no_tokens() -> None:
    made = Steps()
    assert made.recorder.rate() == 0.0
    made.run(100, every=0.001)
    made.now += 2.1
    assert made.recorder.rate() == 0.0


def test_a_change_of_speed_is_seen_within_the_window() -> None:
    made = Steps()
    made.run(400, every=0.005)
    made.run(100, every=0.02)  # two seconds
    assert made.recorder.rate() == pytest.approx(50, rel=0.02)


def test_steps_that_sample_nothing_count_their_time() -> None:
    """Half of the steps compute a prompt's pieces."""
    made = Steps()
    for _ in range(50):
        made.run(1, every=0.01, made=0)
        made.run(1, every=0.01, made=1)
    assert made.recorder.rate() == pytest.approx(50, rel=0.02)


@pytest.mark.clock
def test_the_dashboard_agrees_with_the_completion() -> None:
    with opened(step_seconds=0.001) as session:
        view = session.watch()
        done = session.generate_sync("hello", max_tokens=490, ignore_eos=True)
        rate = view.recorder.rate(60.0)
        said = done.timings.decode_rate(len(done.token_ids))
        view.stop()
        view.join(60)
    assert rate == pytest.approx(said, rel=0.5), "twice the memory of the recorder: it used to say 120"
