"""Device memory that is touched ahead holds what it held, and is there; the rest stays untouched."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rekindle._src.execution.page_transfers import prefault

PAGES, PER_PAGE = 64, 16 * mmap.PAGESIZE


class Leaf:
    """Memory that nobody has written yet, as the array of a layer's pages."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, PAGES * PER_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.nbytes, self.shape = self.bytes.nbytes, (PAGES, PER_PAGE)

    def unsafe_buffer_pointer(self) -> int:
        return self.bytes.ctypes.data

    def resident(self) -> list[bool]:
        """By page of the leaf: whether all of it is there."""
        count = self.nbytes // mmap.PAGESIZE
        seen = (ctypes.c_ubyte * count)()
        assert not ctypes.CDLL(None).mincore(
            ctypes.c_void_p(self.bytes.ctypes.data), ctypes.c_size_t(self.nbytes), seen
        )
        return np.frombuffer(seen, np.uint8).reshape(PAGES, -1).all(1).tolist()


def touched(leaves: list[Any], pages: int) -> None:
    thread = prefault(leaves, pages)
    assert thread is not None
    thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="there is nothing to be touched")
def test_the_first_pages_are_there_and_no_others() -> None:
    leaves = [Leaf(), Leaf()]
    assert not any(leaves[0].resident())
    touched(leaves, 10)
    for leaf in leaves:
        if not any(leaf.resident()):
            pytest.skip("the kernel is older than 5.14")
        assert leaf.resident() == [True] * 11 + [False] * (PAGES - 11)  # page 0 is the scratch page
        assert not leaf.bytes.any()


@pytest.mark.skipif(sys.platform != "linux", reason="there is nothing to be touched")
def test_no_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle._src.execution.page_transfers.MAX_BYTES", 8 * PER_PAGE)
    leaves = [Leaf(), Leaf()]
    touched(leaves, 60)
    assert sum(leaves[0].resident()) in (0, 5)


@pytest.mark.skipif(sys.platform != "linux", reason="there is nothing to be touched")
def test_what_memory_holds_stays() -> None:
    leaf = jnp.arange(3 * PER_PAGE, dtype=jnp.int32).reshape(3, -1)
    touched([leaf], 2)
    assert (np.asarray(leaf).reshape(-1) == np.arange(3 * PER_PAGE)).all()
    assert prefault([leaf], 0) is None
