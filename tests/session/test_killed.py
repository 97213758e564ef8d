"""`kill -9` at random moments of a process that serves and saves: the next start finds a complete state."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.killed_while_serving import KNOWN, look, reopened
from helpers.tiered import plain

pytestmark = pytest.mark.usefixtures("shared_programs")
SCRIPT = Path(__file__).parents[1] / "helpers" / "killed_while_serving.py"


def killed(folder: Path, times: int) -> None:
    """Each process first looks at what the one before left, then serves and saves until a random moment."""
    expected = [list(plain(index)) for index in range(KNOWN)]
    known = folder / "expected.json"
    known.write_text(json.dumps(expected))
    draw = random.Random(times)
    saved = looked = 0
    for turn in range(times):
        early = turn % 5 == 4  # killed while it opens
        command = [sys.executable, str(SCRIPT), str(folder / "cache"), str(known), str(turn)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            lines: list[str] = []
            if not early:
                lines += (process.stdout.readline() for _ in range(1 + (turn == 1)))  # this one has saved by then
            time.sleep(draw.uniform(0.0, 1.5))
            process.kill()
            lines += process.stdout.readlines()
            errors = process.stderr.read()
        words = [line.split() for line in lines if line.endswith("\n")]
        assert early or (words and words[0][0] == "right"), f"process {turn} failed:\n{errors}"
        assert "Traceback" not in errors, errors
        if words:
            looked += 1
            pages, hits = int(words[0][1]), int(words[0][2])
            assert pages >= saved, f"{saved} pages had been saved, process {turn} found {pages}"
            assert not saved or hits >= 64 * KNOWN, "what had been saved was not used"
            saved = max([pages if saved else 0, *(int(word[1]) for word in words[1:])])
    assert looked >= times - times // 5
    with reopened(folder / "cache") as session:
        pages, hits = look(session, expected)
    assert saved and pages >= saved and hits >= 64 * KNOWN


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_processes_that_are_killed_leave_complete_states(tmp_path: Path) -> None:
    killed(tmp_path, 50)


def test_a_save_has_what_requests_push_down_meanwhile(tmp_path: Path) -> None:
    expected = [list(plain(index)) for index in range(KNOWN)]
    with reopened(tmp_path) as session:
        look(session, expected)
        known = session.stats().cache.nodes
        handles = [session.submit([10 + i] * 40, max_tokens=8, ignore_eos=True) for i in range(3)]
        assert session.save("mine").result_sync().pages >= known, "pages that were on their way are missing"
        for handle in handles:
            handle.result_sync()
