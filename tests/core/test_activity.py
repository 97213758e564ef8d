"""A wait is shown where the user looks after half a second, says what it waits for, and is gone when it is over."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest

from core.outputs import outputs
from rekindle._src.core import activity
from rekindle._src.core.activity import Activity, ProgramWait, State, in_notebook
from rekindle.errors import UnsupportedModel


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that stands still, and no thread that draws: the tests say when."""
    made = Clock()
    monkeypatch.setattr(activity, "time", made)
    monkeypatch.setattr(Activity, "_run", lambda self: None)
    return made


def screen(written: str) -> str:
    """What a terminal shows on its last line after all of this was written."""
    return re.split(r"\r\x1b\[K", written)[-1]


def test_a_terminal_shows_the_line_and_then_nothing(clock: Clock) -> None:
    out, state = io.StringIO(), [State("opening tiny: weights", 0.25)]
    with Activity(lambda: state[0], backend="terminal", stream=out) as shown:
        clock.now = 0.4
        shown.draw()
        assert out.getvalue() == ""
        clock.now = 3.0
        shown.draw()
        assert screen(out.getvalue()) == "[█████···············] opening tiny: weights · 3.0 s"
        state[0] = State("compiling program r2t32")
        shown.draw()
        assert screen(out.getvalue())[2:] == "compiling program r2t32 · 3.0 s"
    assert screen(out.getvalue()) == ""
    assert "\n" not in out.getvalue()
    shown.draw()
    assert screen(out.getvalue()) == ""


def test_a_wait_that_is_known_to_be_long_is_shown_before_it_begins(clock: Clock) -> None:
    out = io.StringIO()
    with Activity(lambda: State("opening tiny: importing JAX"), backend="terminal", stream=out, at_once=True):
        assert "opening tiny: importing JAX · 0.0 s" in out.getvalue()
    assert screen(out.getvalue()) == ""


def test_what_is_over_within_half_a_second_writes_nothing(clock: Clock) -> None:
    out = io.StringIO()
    with Activity(lambda: State("quick"), backend="terminal", stream=out) as shown:
        clock.now = 0.49
        shown.draw()
    assert out.getvalue() == ""


def test_quiet_starts_no_thread(clock: Clock) -> None:
    out, before = io.StringIO(), set(threading.enumerate())
    with Activity(lambda: State("x"), backend="terminal", stream=out, quiet=True) as shown:
        clock.now = 5.0
        shown.draw()
        assert set(threading.enumerate()) <= before
    assert out.getvalue() == ""


def test_a_wait_inside_another_one_draws_nothing_of_its_own(clock: Clock) -> None:
    out = io.StringIO()
    with Activity(lambda: State("outer"), backend="terminal", stream=out) as outer:
        with Activity(lambda: State("inner"), backend="terminal", stream=out) as inner:
            clock.now = 2.0
            inner.draw()
            assert out.getvalue() == ""
            outer.draw()
            assert "outer" in screen(out.getvalue())
        assert "outer" in screen(out.getvalue())
    assert screen(out.getvalue()) == ""


def test_a_state_of_none_hides_what_was_shown(clock: Clock) -> None:
    out, state = io.StringIO(), [State("mine")]
    hidden: list[State | None] = [*state, None]
    with Activity(lambda: hidden.pop(0), backend="terminal", stream=out) as shown:
        clock.now = 2.0
        shown.draw()
        assert "mine" in screen(out.getvalue())
        shown.draw()
        assert screen(out.getvalue()) == ""


def test_a_log_gets_a_line_every_ten_seconds(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "rekindle.progress"),
        Activity(lambda: State("restoring"), stream=io.StringIO()) as shown,
    ):
        for second in range(60):
            clock.now = float(second)
            shown.draw()
    assert len(caplog.records) == 6
    assert caplog.records[0].getMessage() == "restoring (1 s)"


def test_a_notebook_gets_one_output_that_ends_empty(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = outputs(monkeypatch)
    with Activity(lambda: State("3 of 9 <prompts>", 1 / 3), backend="notebook") as running:
        clock.now = 1.0
        running.draw()
        running.draw()
    assert len(shown) == 3
    assert shown[0]["text/plain"] == "3 of 9 <prompts> · 1.0 s"
    assert "&lt;prompts&gt;" in shown[0]["text/html"]
    assert shown[2] == {"text/html": "", "text/plain": ""}


def test_what_cannot_be_drawn_does_not_end_the_wait() -> None:
    asked = threading.Event()

    def look() -> State:
        asked.set()
        raise ValueError("not now")

    with Activity(look, backend="terminal", stream=io.StringIO()):
        assert asked.wait(60)
    assert not activity._shown


def test_seconds_of_a_wait_count_up_to_the_moment_that_is_asked_for(clock: Clock) -> None:
    wait = ProgramWait()
    clock.now = 10.0
    assert wait.describe() == ""
    with wait.waiting("r1"):
        assert wait.describe() == "compiling program r1"
        assert wait.seconds(9.0) == 0.0
        assert wait.seconds(13.0) == 3.0
        clock.now = 14.0
    assert wait.seconds(20.0) == 4.0
    with wait.waiting("r2"):
        clock.now = 15.0
    assert wait.seconds(15.0) == 5.0


def test_marimo_shows_it_in_the_cell_of_the_thread_that_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """marimo lets the thread of the cells show something, and threads of its own class that this one has made."""
    cells, outputs = threading.current_thread(), []

    class Thread(threading.Thread): ...

    fake = SimpleNamespace(
        running_in_notebook=lambda: threading.current_thread() is cells,
        Thread=Thread,
        Html=lambda text: text,
        output=SimpleNamespace(replace=outputs.append, clear=lambda: outputs.append("")),
    )
    monkeypatch.setitem(sys.modules, "marimo", fake)
    wait = ProgramWait(quiet=False)
    with wait.shown_by_caller() as shown:
        assert isinstance(shown, Activity)
        assert isinstance(shown._thread, Thread)
        with ThreadPoolExecutor(1) as pool, wait.waiting("r2t32"):
            clock.now = 2.0
            assert pool.submit(wait.shown_by_caller).result().__enter__() is None, "not a thread of marimo's"
            shown.draw()
    assert "compiling program r2t32 · 2.0 s" in outputs[0]
    assert type(outputs[0]) is str, "marimo's encoder makes an empty object of a subclass"
    assert outputs[1:] == [""]
    monkeypatch.delitem(sys.modules, "marimo")
    assert wait.shown_by_caller().__enter__() is None, "elsewhere the thread that compiles shows it"


def test_a_module_that_another_thread_is_importing_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))  # it has no names yet
    assert not in_notebook()
    assert "no model" in "".join(UnsupportedModel("no model")._render_traceback_())
