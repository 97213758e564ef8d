"""A soak in phases: calm, a failing disk, a pruning process, killed siblings, then all at once.

    pytest -m soak tests/soak                        # thirty minutes in one piece
    REKINDLE_SOAK_SECONDS=7200 pytest -m soak -s     # longer; -s shows the counts of each phase

Throughout, the tokens of known prompts stay what the plain loop says; after each phase nothing is left running, every
page is accounted for, and memory, threads and descriptors are what they were.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import anyio
import psutil
import pytest

from helpers.sessions import wait_until_idle
from helpers.tiered import opened
from rekindle._src.session.session import Session
from rekindle.errors import RekindleError
from soak.faults import Faults
from soak.load import Load, requests

SIBLING = Path(__file__).parent / "sibling.py"
SECONDS = float(os.environ.get("REKINDLE_SOAK_SECONDS", "1800"))
FAULTS = 0.02  # of the file operations of the phases with a failing disk
GROWTH = 96 << 20  # resident bytes that one phase may add over the one after warming up: allocators keep some
PHASES = ("warm up", "calm", "failing disk", "pruned", "siblings killed", "everything", "calm again")


class Figures:
    """What the process holds after a phase."""

    def __init__(self) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):  # not on glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed goes back, so that growth is what is kept
        process = psutil.Process()
        self.resident = process.memory_info().rss
        self.threads = process.num_threads()
        self.descriptors = process.num_fds()

    def __str__(self) -> str:
        return f"{self.resident >> 20} MiB, {self.threads} threads, {self.descriptors} descriptors"


@contextmanager
def siblings(what: str, folder: Path, seed: int) -> Iterator[list[int]]:
    """A process that serves or prunes on the same folder; one that serves is killed and started anew, at random."""
    draw, started = random.Random(seed), [0]
    stop = False

    def start() -> subprocess.Popen[str]:
        started[0] += 1
        command = [sys.executable, str(SIBLING), what, str(folder), str(started[0])]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)

    def keep_killing() -> None:
        process = start()
        until = time.monotonic() + draw.uniform(3.0, 8.0)
        while not stop:
            time.sleep(0.1)
            if what == "serve" and time.monotonic() > until:
                process.send_signal(signal.SIGKILL)
                process.wait()
                process, until = start(), time.monotonic() + draw.uniform(3.0, 8.0)
        process.kill()
        process.wait()

    thread = threading.Thread(target=keep_killing, name="soak siblings")
    thread.start()
    try:
        yield started
    finally:
        stop = True
        thread.join()


def reopened(folder: Path) -> Session:
    """Open as often as it takes: under faults opening may fail, with a typed error."""
    for _ in range(50):
        try:
            return opened(folder, restore="auto")
        except RekindleError:
            continue
    raise AssertionError("it did not open in fifty tries")


def phase(name: str, folder: Path, seconds: float, seed: int, load: Load, faults: Faults) -> Figures:
    """One phase: open what the last one left, load, wait until idle, look, close."""
    made = requests(300, seed)
    with ExitStack() as around:
        if name in ("pruned", "everything"):
            around.enter_context(siblings("prune", folder, seed))
        if name in ("siblings killed", "everything"):
            around.enter_context(siblings("serve", folder, seed))
        if name in ("failing disk", "everything"):
            around.enter_context(faults.active(FAULTS))
        session = reopened(folder)
        try:

            async def run() -> None:
                until = anyio.current_time() + seconds
                async with anyio.create_task_group() as group:
                    for _ in range(2):
                        group.start_soon(load.neighbour, session, until)
                    for _ in range(3):
                        group.start_soon(load.chaos, session, until, made)
                    group.start_soon(load.saver, session, until, "soak")

            anyio.run(run)
            wait_until_idle(session)
        finally:
            session.close()
    return Figures()


def soak(folder: Path, seconds: float, seed: int = 0) -> None:
    load, faults = Load(seed), Faults(folder, seed)
    figures: dict[str, Figures] = {}
    share = seconds / (len(PHASES) + 1)
    for index, name in enumerate(PHASES):
        start = dict(load.counts)
        # Twice as long to warm up: every program is compiled by then, and memory is what serving takes.
        figures[name] = phase(name, folder, share * (2 if index == 0 else 1), seed + index, load, faults)
        done = {what: count - start.get(what, 0) for what, count in sorted(load.counts.items())}
        print(f"{name}: {done}; {figures[name]}", flush=True)
    print(f"errors: {dict(load.errors)}")
    print(f"file operations seen: {dict(faults.seen)}; injected: {dict(faults.injected)}")
    assert load.counts["neighbours right"] > 0 and sum(faults.injected.values()) > 0
    before = figures["warm up"]
    for name, after in figures.items():
        assert after.resident <= before.resident + GROWTH, f"{name}: {after}, after warming up {before}"
        assert after.threads <= before.threads, f"{name}: {after}, after warming up {before}"
        assert after.descriptors <= before.descriptors, f"{name}: {after}, after warming up {before}"


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 2 + 1200)
def test_a_soak_of_half_an_hour(tmp_path: Path) -> None:
    soak(tmp_path, SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak(tmp_path: Path) -> None:
    soak(tmp_path, 40.0)
