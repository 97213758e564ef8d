"""A cache folder that goes while a session uses it, a process that is stopped, and little memory."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.python import run_python
from helpers.thorough import by_default
from helpers.tiered import ask, opened
from rekindle._src.core import memory
from rekindle._src.kvcache.persist import snapshot
from rekindle.errors import StoreError

pytestmark = pytest.mark.usefixtures("shared_programs", "large_steps")


@pytest.mark.parametrize("part", by_default([".", "pages", "snapshots"]))
def test_what_is_saved_after_the_folder_was_deleted_is_whole(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    with opened(cache) as session, caplog.at_level(logging.WARNING, "rekindle"):
        assert ask(session, 0) == 0
        session.save("mine").result_sync()
        shutil.rmtree(cache / part)
        assert ask(session, 1) == 32, "what is on the device is used"
        report = session.save("mine").result_sync()
        session.check_integrity()
        assert len(caplog.records) <= 1
    with opened(cache, restore="mine") as session:
        assert session.stats().cache.nodes == report.pages > 8
        assert [ask(session, index) for index in range(2)] == [64, 64]


@pytest.mark.parametrize("times", by_default([1, 99]))
def test_pages_that_another_process_removes_during_a_save_are_written_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = snapshot.save, 0

    def too_late(*arguments: Any) -> Path:
        nonlocal removed
        if removed < times:
            removed += 1
            shutil.rmtree(tmp_path / "pages")
        return real(*arguments)

    with opened(tmp_path) as session:
        ask(session, 0)
        monkeypatch.setattr(snapshot, "save", too_late)
        if times == 1:
            assert session.save("mine").result_sync().pages > 8
        else:
            with pytest.raises(StoreError, match="were removed while it was saved"):
                session.save("mine").result_sync()
        assert ask(session, 0) == 64
    if times == 1:
        with opened(tmp_path, restore="mine") as session:
            assert ask(session, 0) == 64


SERVING = """
import sys
import rekindle
from rekindle._src.session.session import Session
options = dict(quiet=True, max_model_len=256, max_requests=2, max_tokens_per_step=64, step_timeout=0.3)
with rekindle.open_sync("tiny", cache_dir=sys.argv[1], **options) as session:
    while True:
        handles = [
            session.submit("Once upon a time", max_tokens=40, temperature=0.0),
            session.submit("A dog", max_tokens=20, temperature=0.0, regex="[a-f ]{20}"),
            session.chat([{"role": "user", "content": "hi"}], max_tokens=20, temperature=0.0),
        ]
        print([handle.result_sync().text for handle in handles], flush=True)
        session.save("mine").result_sync()
"""


@pytest.mark.thorough
def test_a_process_that_is_stopped_for_longer_than_its_limits_goes_on(own_cache: Path) -> None:
    """As by SIGSTOP, or while its machine is suspended. `step_timeout` is a fifth of each stop."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SERVING, str(own_cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("['"), "it failed"
            for number in range(2):
                time.sleep(0.2 * number)  # in the middle of whatever it does
                process.send_signal(signal.SIGSTOP)
                time.sleep(1.5)
                process.send_signal(signal.SIGCONT)
                for _ in range(2):
                    assert process.stdout.readline() == first
        finally:
            process.kill()


LITTLE = """
import resource, sys
import rekindle
from rekindle._src.core import memory
from rekindle._src.session.session import Session
from rekindle.errors import RekindleError
def limit(extra):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (extra << 20),) * 2)
when, extra = sys.argv[2], int(sys.argv[3])
try:
    if when == "open":
        limit(extra)
    options = dict(quiet=True, max_model_len=256, max_requests=2, max_tokens_per_step=64)
    with rekindle.open_sync("tiny", cache_dir=sys.argv[1], **options) as session:
        expected = session.generate_sync("Once upon a time", max_tokens=20, temperature=0.0).text
        if when == "run":
            limit(extra)
        assert session.generate_sync("Once upon a time", max_tokens=20, temperature=0.0).text == expected
        try:
            session.save("mine").result_sync()
        except RekindleError as error:
            print(type(error).__name__)
    print("whole")
except RekindleError as error:
    print(type(error).__name__)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
@pytest.mark.parametrize(
    ("when", "extra", "expected"),
    [("open", 100, "OutOfMemory"), ("open", 1500, "whole"), ("run", 60, "whole")],
)
def test_a_limit_of_memory_is_a_typed_error_or_nothing(when: str, extra: int, expected: str, own_cache: Path) -> None:
    """As of `ulimit -v`: C++ code ended the process at opening, and `save` raised ImportError."""
    said = run_python("-c", LITTLE, str(own_cache), when, str(extra)).split()
    assert said[-1] == expected and set(said) <= {expected, "StoreError"}


def test_available_memory_is_what_a_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "address_space", lambda: 5 << 20)
    assert memory.available() == 5 << 20 and not memory.fits(4 << 20) and memory.fits(3 << 20)
    with pytest.raises(memory.OutOfMemory, match=r"leaves 5. Raise it"):
        memory.check_address_space()
    monkeypatch.setattr(memory, "address_space", lambda: None)
    memory.check_address_space()
