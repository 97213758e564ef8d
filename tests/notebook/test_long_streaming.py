"""A kernel's memory while views stream, as fast as they can be drawn. The page's is in test_browser_views."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.sessions import engine_of, opened
from rekindle import Session
from rekindle._src.notebook import Dashboard

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

# Two minutes at ten pictures a second: enough to see one object more for each of them. 36,000 are an hour.
PICTURES = int(os.environ.get("REKINDLE_PICTURES", "1200"))
ANSWER = 120  # tokens, each with a picture of its own
# Until records of steps and the interpreter's own caches are full, and memory has grown for what waits to be collected.
FIRST = max(360, PICTURES // 4)
EXPLAINED = 1024  # ended requests that a session remembers


class Memory(NamedTuple):
    """Memory in use after a garbage collection, with freed memory returned to the system."""

    blocks: int
    resident: int  # bytes

    @classmethod
    def now(cls) -> Memory:
        for _ in range(3):
            gc.collect()
        with suppress(OSError, AttributeError):  # not on glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(sys.getallocatedblocks(), pages * os.sysconf("SC_PAGE_SIZE"))


def streamed(session: Session, dashboard: Dashboard, pictures: int) -> None:
    """Draw answers after each of their tokens until there are so many pictures, and the dashboard after each answer."""
    for _ in range(pictures // ANSWER):
        view = session.view.stream("hello " * 8, max_tokens=ANSWER, ignore_eos=True)
        while not view.handle.done:
            session.step_sync()
            view.refresh()
        dashboard.refresh()
        view.join(60)
        assert len(view.handle.token_ids) == ANSWER
    engine_of(session).runner.plans.clear()  # what the fake remembers


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_streaming_leaves_the_kernels_memory_as_it_was() -> None:
    with opened() as session:
        dashboard = session.watch()
        try:
            for _ in range(EXPLAINED // 64):
                session.generate_sync(["hello " * 8] * 64, max_tokens=3)
            with session.paused():
                streamed(session, dashboard, FIRST)
                before = Memory.now()
                streamed(session, dashboard, PICTURES)
                after = Memory.now()
        finally:
            dashboard.stop()
            dashboard.join(60)
    more = Memory(after.blocks - before.blocks, after.resident - before.resident)
    print(f"{PICTURES:,} pictures: {more.blocks:+,} blocks, {more.resident / 1e6:+.2f} MB resident")
    assert more.blocks < 0.8 * PICTURES, (before, after)
    assert more.resident < 16e6, (before, after)
