"""Memory that is zero because the system gave its pages back, and takes none until it is written."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from rekindle_kernels.native import python_handlers

SIZE = 16 << 20
pytestmark = pytest.mark.skipif(not python_handlers.has_zeros(), reason="MADV_DONTNEED")


def mapped() -> np.ndarray:
    """Memory of its own, as the C library's."""
    return np.frombuffer(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_written_memory_is_zero_again_and_takes_none() -> None:
    memory = mapped()
    memory[:] = 7
    before = resident()
    python_handlers.clear(memory.ctypes.data + 5, SIZE - 9)
    assert before - resident() > SIZE // 2
    assert not memory[5:-4].any()
    assert (memory[:5] == 7).all() and (memory[-4:] == 7).all()


def test_the_first_tokens_take_small_pages() -> None:
    memory = mapped()
    start = -memory.ctypes.data % (2 << 20)  # where a huge page could begin
    python_handlers.clear(memory.ctypes.data + start, SIZE - start)
    before = resident()
    memory[start : start + python_handlers.SMALL : mmap.PAGESIZE] = 1
    assert resident() - before < python_handlers.SMALL + (1 << 19)
