"""One progress, three places to show it, and silence when it is quick or asked to be quiet."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from core.outputs import outputs
from rekindle._src.core import activity
from rekindle._src.core.activity import Progress
from rekindle._src.models.loading.load_progress import LoadProgress as Loaded
from rekindle._src.programs.warming import WarmingProgress


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(activity, "time", made)
    return made


def run(shown: Progress, clock: Clock, seconds: float, steps: int = 100) -> None:
    for step in range(1, steps + 1):
        clock.now += seconds / steps
        shown(Loaded(step, steps, clock.now))


def test_a_terminal_gets_a_bar_on_one_line(clock: Clock) -> None:
    out = io.StringIO()
    run(Progress("loading", backend="terminal", stream=out), clock, 4.0)
    text = out.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "[████████████████████] loading" in text.split("\r")[-1]
    assert 2 < text.count("\r") <= 4.0 / activity.BAR_INTERVAL + 1


def test_the_time_left_counts_from_the_first_program(clock: Clock) -> None:
    """Time spent before the first program, such as reading weights, does not count in the estimate."""
    bar = Progress("opening", backend="terminal", stream=io.StringIO())
    clock.now = 100.0
    record: Any = SimpleNamespace(name="r16")
    reports = [WarmingProgress(record, done, 10) for done in (1, 2, 10)]
    bar(reports[0])
    assert bar.line(reports[0]) == "opening: 1 of 10 programs, r16"
    clock.now = 102.0
    assert bar.line(reports[1]) == "opening: 2 of 10 programs, r16, 16 s left"
    assert bar.line(reports[2]) == "opening: 10 of 10 programs, r16"


def test_what_is_quick_shows_nothing(clock: Clock) -> None:
    out = io.StringIO()
    run(Progress("loading", backend="terminal", stream=out), clock, 0.4)
    assert out.getvalue() == ""


def test_quiet_shows_nothing(clock: Clock) -> None:
    out = io.StringIO()
    run(Progress("loading", backend="terminal", stream=out, quiet=True), clock, 4.0)
    assert out.getvalue() == ""


def test_a_log_gets_few_lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle.progress"):
        run(Progress("loading", stream=io.StringIO()), clock, 60.0)  # no terminal, no notebook
    assert 5 <= len(caplog.records) <= 8


def test_a_notebook_gets_an_output_that_ends_as_one_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = outputs(monkeypatch)
    bar = Progress("loading <x>", backend="notebook")
    clock.now = 1.0
    bar(Loaded(1, 4, 1.0))
    assert 'title="done: 0.25"' in shown[0]["text/html"]
    assert "loading &lt;x&gt;" in shown[0]["text/html"]
    clock.now = 2.0
    bar(Loaded(4, 4, 2.0))
    assert len(shown) == 2
    assert "title=" not in shown[1]["text/html"]
    assert shown[1]["text/plain"].startswith("loading <x>: ")


def test_programs_are_named(clock: Clock) -> None:
    class Record(NamedTuple):
        name: str

    class Warmed(NamedTuple):
        program: Record
        done: int
        total: int

    shown = Progress("compiling")
    clock.now = 2.0
    assert shown.line(Warmed(Record("r2t32"), 1, 8)) == "compiling: 1 of 8 programs, r2t32"
    assert shown.line(Warmed(Record("admit"), 8, 8)) == "compiling: 8 of 8 programs, admit"
