"""Memory for weights: aligned, its own, and adopted by a CPU device without a copy."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from rekindle._src.models.loading import hugepages
from rekindle._src.models.loading.hugepages import HUGE, PIECE, SLAB, PrefaultArena, aligned


def test_arrays_are_aligned_and_share_no_byte() -> None:
    shapes = [(0,), (1,), (3, 5), (1000, 7), (SLAB // 4 + 1,), (64,)] * 5
    with ThreadPoolExecutor(4) as pool:
        arrays = list(pool.map(lambda shape: aligned(shape, np.uint8), shapes))
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 or not array.size
        array[...] = number
    for number, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        assert array.shape == shape
        assert (array == number).all()


def test_a_device_adopts_them_and_keeps_their_slab() -> None:
    memory = aligned((300, 200), np.float32)
    memory[...] = np.arange(60_000).reshape(300, 200)
    adopted = jax.device_put(memory, may_alias=True)
    assert adopted.unsafe_buffer_pointer() == memory.ctypes.data
    del memory
    others = [aligned((300, 200), np.float32) for _ in range(400)]
    for other in others:
        other[...] = -1
    assert float(adopted[299, 199]) == 59_999


def test_arrays_lie_in_memory_that_was_touched_ahead_and_nothing_is_written_to_it_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touching, go_on, memset = threading.Event(), threading.Event(), hugepages.ctypes.memset

    def slowly(place: int, value: int, size: int) -> None:
        touching.set()
        assert go_on.wait(60)
        memset(place, value, size)

    monkeypatch.setattr(hugepages.ctypes, "memset", slowly)
    ahead = PrefaultArena(4 * PIECE)
    assert touching.wait(60)
    threading.Timer(0.05, go_on.set).start()
    array = aligned((100,), np.uint8)
    assert go_on.is_set() and not ahead._thread.is_alive(), "an array waits for the piece that is being touched"
    array[...] = 1
    whole = aligned((4 * PIECE,), np.uint8)
    assert not np.shares_memory(whole, ahead.memory) and np.shares_memory(array, ahead.memory)
    beside = aligned((HUGE,), np.uint8)
    assert np.shares_memory(beside, ahead.memory) and not np.shares_memory(beside, array)
    beside[...] = 2
    ahead.memory[-1] = 3
    ahead.close()
    assert (array == 1).all() and (beside == 2).all() and ahead.memory[-1] in (0, 3)
    assert not np.shares_memory(aligned((100,), np.uint8), ahead.memory)
