"""A guard: it does jobs within bounds, says why it ended, and belongs to the process that started it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle._src.core.guard import START_SECONDS, Cause, GuardEnded, GuardLimits, GuardProcess

JOBS = """
import os, signal
def prepare(settings):
    def do(job):
        print("not an answer", flush=True)
        os.write(2, b"nor this")
        return settings["plus"] + eval(job)
    return lambda job: {"result": do(job)}
"""
NEVER_STARTS = """
import threading
def prepare(settings):
    threading.Event().wait()
"""
DEEP = "setattr(__import__('json'), 'dumps', lambda answer: '{\"result\": ' + '[' * 10**5 + ']' * 10**5 + '}') or 0"
ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is limited in another way")
ONLY_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no timer of a processor's time")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], GuardProcess]]:
    """Start guards whose jobs are expressions of Python."""
    path, guards = tmp_path / "jobs.py", list[GuardProcess]()
    path.write_text(JOBS)

    def new() -> GuardProcess:
        guards.append(GuardProcess(path, {"plus": 1}, GuardLimits(256 << 20, stack=16 << 20)))
        return guards[-1]

    yield new
    for guard in guards:
        guard.end()


def ask(guard: GuardProcess, job: str, *, seconds: float = 300.0, processor: float = 300.0, most: int = 1 << 20) -> Any:
    return guard.ask(job, seconds=seconds, processor=processor, most=most)["result"]


def test_it_does_one_job_after_the_other_and_prints_are_no_answers(start: Callable[[], GuardProcess]) -> None:
    guard = start()
    assert [ask(guard, job) for job in ("2 * 3", "len('\\ud800')", "-1")] == [7, 2, 0]
    assert guard.usable


@pytest.mark.parametrize(
    ("job", "cause", "bounds"),
    [
        pytest.param("any(iter(int, 1))", Cause.LATE, {"seconds": 0.5}, id="late"),
        pytest.param("any(iter(int, 1))", Cause.PROCESSOR, {"processor": 0.1}, id="processor", marks=ONLY_POSIX),
        pytest.param("signal.raise_signal(signal.SIGSEGV)", Cause.STACK, {}, id="stack", marks=ONLY_POSIX),
        pytest.param("os.abort()", Cause.MEMORY, {}, id="abort", marks=ONLY_POSIX),
        pytest.param("len(bytearray(1 << 30))", Cause.MEMORY, {}, id="memory", marks=ONLY_LINUX),
        pytest.param("int('0' * 10**4 + 'x')", Cause.OTHER, {}, id="error"),
        pytest.param("10**1000", Cause.OTHER, {"most": 1000}, id="long-answer"),
        pytest.param(DEEP, Cause.OTHER, {}, id="deep-answer"),
    ],
)
def test_it_says_why_it_ended(
    start: Callable[[], GuardProcess], job: str, cause: Cause, bounds: dict[str, Any]
) -> None:
    guard = start()
    assert ask(guard, "0") == 1
    with pytest.raises(GuardEnded) as error:
        ask(guard, job, **bounds)
    assert error.value.cause is cause, error.value
    assert guard.ended and not guard.usable


def test_a_job_s_time_begins_when_the_process_is_ready(
    start: Callable[[], GuardProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = list[float]()

    def watched(seconds: float, function: Callable[..., None], arguments: tuple[object, ...]) -> threading.Timer:
        watches.append(seconds)
        return threading.Timer(600.0, function, arguments)

    monkeypatch.setattr("rekindle._src.core.guard.Timer", watched)
    guard = start()
    assert [ask(guard, "1", seconds=seconds) for seconds in (0.25, 0.5)] == [2, 2]
    assert watches == [START_SECONDS, 0.25, 0.5]


def test_a_start_that_takes_too_long_has_its_own_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle._src.core.guard.START_SECONDS", 0.1)
    path = tmp_path / "jobs.py"
    path.write_text(NEVER_STARTS)
    guard = GuardProcess(path, {}, GuardLimits(256 << 20))
    with pytest.raises(GuardEnded) as error:
        ask(guard, "1")
    assert error.value.cause is Cause.START and not guard.usable


def test_a_watch_that_comes_too_late_leaves_the_next_job_alone(
    start: Callable[[], GuardProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Canceling a watch does not stop one that runs already: it ended the job after its own."""
    held_up = list[Callable[[], None]]()

    def watched(seconds: float, function: Callable[..., None], arguments: tuple[object, ...] = ()) -> threading.Timer:
        held_up.append(lambda: function(*arguments))
        return threading.Timer(600.0, function, arguments)

    monkeypatch.setattr("rekindle._src.core.guard.Timer", watched)
    guard = start()
    for _ in range(2):
        assert ask(guard, "1") == 2
        for late in held_up:
            late()
    assert guard.usable and len(held_up) == 3


def test_an_interrupt_ends_it(start: Callable[[], GuardProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    guard = start()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rekindle._src.core.guarded.receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(guard, "0")
    assert guard.ended, "a late answer would be taken for the next job's"


FORKED = """
import os, sys
from pathlib import Path
from rekindle._src.core.guard import GuardProcess, GuardLimits
guard = GuardProcess(Path(sys.argv[1]), {"plus": 1}, GuardLimits(1 << 28))
assert guard.ask("1", seconds=300.0, processor=300.0) == {"result": 2}
child = os.fork()
if child == 0:
    assert not guard.usable
    guard.kill()
    guard.end()
    sys.exit(7)  # with its finalizers
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert guard.ask("2", seconds=300.0, processor=300.0) == {"result": 3}
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path / "jobs.py")], check=True, timeout=300)
