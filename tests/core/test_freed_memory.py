"""Memory that was freed goes back to the system."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle._src.core import freed_memory

BLOCK, COUNT = 60_000, 1_000  # too small for mappings of their own


def resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status")
def test_what_lies_below_a_block_that_is_used_goes_back() -> None:
    if freed_memory._trim() is None:
        pytest.skip("this C library has no malloc_trim")
    freed_memory.give_back()
    blocks = [bytearray(b"x") * BLOCK for _ in range(COUNT)]
    last = blocks[-1]
    before = resident()
    del blocks
    freed_memory.give_back()
    assert before - resident() > BLOCK * COUNT // 2
    assert len(last) == BLOCK


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_trim", lambda: None)
    freed_memory.give_back()


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_freed_inside_goes_back_at_the_end(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    happened: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        happened.append("begun")
        try:
            yield
        finally:
            happened.append("ended")

    monkeypatch.setattr(freed_memory, "give_back", lambda: happened.append("given back"))
    contexts = freed_memory.given_back(context)
    for _ in range(2):
        with contextlib.suppress(KeyError), contexts():
            happened.append("inside")
            if fails:
                raise KeyError
    assert happened == 2 * ["begun", "inside", "ended", "given back"]
