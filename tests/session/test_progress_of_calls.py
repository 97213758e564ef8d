"""No call is silent while it lasts: opening, the first compilation, lists of prompts; and rates leave compiling out."""

from __future__ import annotations

import io
import os
import re
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rekindle
from helpers.driving import tiny_model
from helpers.sessions import fake_session
from helpers.thorough import trio_in_ci
from rekindle import tiny
from rekindle._src.calls import requests
from rekindle._src.calls.requests import BatchProgress, Pace
from rekindle._src.cli.main import main
from rekindle._src.core import activity
from rekindle._src.core.activity import State
from rekindle._src.core.records import TextDelta, Timings
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.threads import Mailbox
from rekindle._src.models.loading.load_progress import LoadProgress
from rekindle._src.opening.open_request import OpeningProgress
from rekindle._src.programs.warming import Warming

OPTIONS: dict[str, Any] = {
    "max_model_len": 64, "device_pages": 8, "page_size": 16, "max_requests": 2, "max_tokens_per_step": 32,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as standard error, where everything that lasts a moment is shown."""
    made = Terminal()
    monkeypatch.setattr(activity, "sys", SimpleNamespace(stderr=made, modules=sys.modules))
    monkeypatch.setattr(activity, "PATIENCE", 0.0)
    monkeypatch.setattr(activity, "INTERVAL", 0.01)
    return made


def shown(terminal: Terminal) -> str:
    """Everything that it showed since this was last asked; the line has to be empty in the end."""
    text = terminal.getvalue()
    assert not text or text.endswith("\r\x1b[K"), text[-200:]
    terminal.seek(0)
    terminal.truncate()
    return text


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_opening_and_the_first_call_say_what_is_compiled(terminal: Terminal, tmp_path: Path) -> None:
    async with rekindle.open(tiny_model(), precompile="lazy", cache_dir=str(tmp_path), **OPTIONS) as session:
        shown(terminal)
        first = await session.generate([5, 6, 7], max_tokens=8)
        text = shown(terminal)
        assert "compiling program " in text
        second = await session.generate([5, 6, 7], max_tokens=8)
        assert "compiling" not in shown(terminal)
    timings = first.timings
    assert timings.first_token >= timings.compiling - timings.compiling_later > 0
    assert timings.total >= timings.compiling > 0.05
    assert ">compiling<" in first._repr_html_()
    seconds = timings.total - timings.first_token - timings.compiling_later
    assert timings.decode_rate(8) == pytest.approx(7 / seconds)
    assert second.timings.compiling == second.timings.compiling_later == 0.0
    assert "compiling" not in second._repr_html_()


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_precompiling_counts_its_programs(terminal: Terminal, tmp_path: Path) -> None:
    async with rekindle.open(tiny_model(), precompile="all", cache_dir=str(tmp_path), **OPTIONS) as session:
        text = shown(terminal)
        assert "opening model: " in text
        counts = [int(number) for number in re.findall(rf"programs (\d+) of {len(session.programs())}\b", text)]
        assert counts and counts == sorted(counts)  # which of them are drawn depends on the machine


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the loop has no say in it
async def test_quiet_shows_nothing(terminal: Terminal, tmp_path: Path) -> None:
    async with rekindle.open(tiny_model(), quiet=True, cache_dir=str(tmp_path), **OPTIONS) as session:
        await session.generate([[5, 6], [7, 8]], max_tokens=8)
        await session.save("evening")
    assert terminal.getvalue() == ""


@trio_in_ci
@pytest.mark.anyio
async def test_a_list_of_prompts_has_a_bar(terminal: Terminal) -> None:
    async with fake_session(step_seconds=0.02) as session:
        await session.generate(["a", "b", "c"], max_tokens=30)
        text = shown(terminal)
        assert " of 3 prompts" in text
        assert "tokens/s" in text
        assert "s left" in text
        await session.generate("alone", max_tokens=30)
        assert shown(terminal) == ""


def test_rate_and_time_left_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(requests, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    boxes, compiling = [Mailbox(1), Mailbox(1)], ["compiling program r2"]
    progress = BatchProgress(boxes, Sampling(max_tokens=100), lambda: compiling[0])
    assert progress.look() == State("0 of 2 prompts, compiling program r2", 0.0)
    boxes[0].put(TextDelta("r0", "x", (1,)))
    assert progress.look().fraction == pytest.approx(0.005)
    boxes[0].put(TextDelta("r0", "x" * 49, (1,) * 49))
    boxes[1].put(TextDelta("r1", "x" * 50, (1,) * 50))
    now[0] += 2.0
    assert progress.look() == State("0 of 2 prompts, 50 tokens/s, compiling program r2", 0.5)
    now[0] += 60.0
    assert progress.look() == State("0 of 2 prompts, 50 tokens/s, compiling program r2", 0.5), "the wait does not count"
    compiling[0] = ""
    assert progress.look() == State("0 of 2 prompts, 50 tokens/s, 2 s left", 0.5)
    boxes[1].complete_all(RuntimeError("it failed"))
    assert progress.look().fraction == 0.75


def test_the_time_left_is_that_of_recent_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(requests, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    pace = Pace()
    assert pace.look(1, None) == [] and pace.look(2, 0.0) == []
    now[0] += 50.0
    assert pace.look(50, 5 / 60)[1:] == [], "nothing is known of the rows after the first"
    for row in range(6, 11):
        now[0] += 0.5
        assert pace.look(10 * row, row / 60)[1:] == [f"{(60 - row) / 2:,.0f} s left"], "a slow beginning does not count"
    for row in range(11, 31):
        now[0] += 2.0
        words = pace.look(10 * row, row / 60)
    assert words[1:] == ["60 s left"], "the latest half does"
    assert len(pace.marks) < 20


def test_an_opening_names_weights_programs_and_what_is_compiled() -> None:
    progress = OpeningProgress(Path("/models/small"))
    assert progress.look() == State("opening small: importing JAX", None)
    progress.weights(LoadProgress(20_000_000, 80_000_000, 1.0))
    progress.compiling = lambda: "compiling program r1t16, kernel gemm"
    state = progress.look()
    assert state is not None
    assert state.line == "opening small: weights 20 of 80 MB, compiling program r1t16, kernel gemm"
    assert state.fraction == 0.25
    progress.compiling = str
    assert progress.look() == State("opening small: weights 20 of 80 MB at 20 MB/s, 3.0 s left", 0.25)
    progress.compiling = lambda: "compiling program r1t16"
    progress.weights(LoadProgress(80_000_000, 80_000_000, 2.0))
    progress.stage = "vocabulary"
    assert progress.look() == State("opening small: vocabulary, compiling program r1t16", None)
    progress.hidden = True
    assert progress.look() is None


def test_an_opening_says_how_long_each_stage_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = OpeningProgress(Path("/models/small"))
    for stage in ("the checkpoint's headers", "weights", "programs", "weights"):
        now[0] += 0.25
        progress.stage = stage
    now[0] += 1.0
    assert progress.times() == (
        "small in 2.00 s: importing JAX 0.25, the checkpoint's headers 0.25, weights 1.25, programs 0.25"
    )


def test_a_rate_without_the_compilation() -> None:
    assert Timings(0.0, 1.0, 4.0).decode_rate(11) == pytest.approx(10 / 3)
    assert Timings(0.0, 1.0, 4.0, compiling=2.5, compiling_later=2.0).decode_rate(11) == pytest.approx(10.0)


def test_the_command_line_shows_the_wait(
    terminal: Terminal, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What begins while the session opens may be compiled before the request comes, which then waits for nothing.
    monkeypatch.setattr(Warming, "make_first", lambda *_: None)
    arguments = ["generate", "Once", "--max-tokens", "4", "--max-model-len", "64", "--cache-dir", str(tmp_path)]
    assert main(arguments) == 0
    text = terminal.getvalue()
    assert "opening tiny" in text
    assert "compiling program" in text
    printed = capsys.readouterr()
    assert "s of it compiling" in printed.err
    assert printed.out.startswith("Once")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_a_terminal_shows_the_seconds_of_an_opening_however_long_its_line_is(tmp_path: Path) -> None:
    """The stages that end within a picture are seen or not; importing JAX comes first in every process."""
    import fcntl
    import pty
    import termios

    model = tmp_path / ("a-name-that-is-longer-than-the-terminal-is-wide-" * 2)
    model.symlink_to(tiny.folder())
    program = "import sys, rekindle; rekindle.open_sync(sys.argv[1], cache_dir=sys.argv[2], max_model_len=64).close()"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    command = [sys.executable, "-c", program, str(model), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while select.select([ours], [], [], 120.0)[0]:
            try:
                written += os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert process.returncode == 0, written.decode()
    *pictures, last = re.split(r"\r\x1b\[K", written.decode())[1:]
    assert last == "", "the line is left on the screen"
    pictures = [picture for picture in pictures if picture]
    assert pictures[0].endswith("· 0.0 s")
    assert all(re.search(r" · [\d.]+ s$", picture) and len(picture) < 60 for picture in pictures), pictures
    assert all("opening a-name" in picture for picture in pictures)
