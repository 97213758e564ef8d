"""`kill -9` at random moments of a process that serves and saves: the next start finds a complete state."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.tiered import NEW, opened, plain, prompt
from rekindle._src.session.session import Session
from rekindle.errors import StoreError

pytestmark = pytest.mark.usefixtures("shared_programs")
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(str(ROOT / name) for name in ("toolkit", "kernels", "tests"))
KNOWN = 6  # prompts whose continuation the parent computed in the plain loop


def reopened(folder: Path) -> Session:
    """With the snapshot if there is one; before the first save there is none."""
    try:
        return opened(folder, restore="mine")
    except StoreError as error:
        if "damaged" in str(error) or "There are none" not in str(error):
            raise
        return opened(folder, restore="auto")


def look(session: Session, expected: list[list[int]]) -> tuple[int, int]:
    """Every answer is right, with whatever the store brought back; pages that are known, and tokens that they saved."""
    pages, hits = session.stats().cache.nodes, 0
    for index, tokens in enumerate(expected):
        done = session.generate_sync(list(prompt(index)), max_tokens=NEW, ignore_eos=True)
        assert list(done.token_ids) == tokens, f"prompt {index}: {done.token_ids} instead of {tokens}"
        hits += done.usage.cached_tokens
    stats = session.cache.stats()
    assert stats.disk is not None and stats.disk.damaged == 0, "a broken segment"
    session.check_integrity()
    return pages, hits


def serve(folder: Path, expected: list[list[int]], seed: int) -> None:
    """As a process: opens what the one before left, serves and saves until it is killed, and says how far it got."""
    draw = random.Random(seed)

    def say(*words: Any) -> None:
        print(*words, flush=True)

    with reopened(folder) as session:
        say("right", *look(session, expected))
        while True:
            handles = [
                session.submit([draw.randrange(3, 160) for _ in range(40)], max_tokens=8, ignore_eos=True)
                for _ in range(3)
            ]
            report = session.save("mine").result_sync()  # while they run
            say("saved", report.pages)
            for handle in handles:
                handle.result_sync()


def killed(folder: Path, times: int) -> None:
    """Each process first looks at what the one before left, then serves and saves until a random moment."""
    expected = [list(plain(index)) for index in range(KNOWN)]
    known = folder / "expected.json"
    known.write_text(json.dumps(expected))
    draw = random.Random(times)
    saved = looked = 0
    for turn in range(times):
        early = turn % 5 == 4  # killed while it opens
        command = [sys.executable, __file__, str(folder / "cache"), str(known), str(turn)]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"},
        ) as process:
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


if __name__ == "__main__":
    serve(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3]))
