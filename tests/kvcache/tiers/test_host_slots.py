"""Slots of host memory: used again when nobody reads them, never before, and given back when there are too many."""

from __future__ import annotations

import itertools
import threading

import jax
import numpy as np
import pytest

from rekindle._src.kvcache.tiers.host import LINE, PIECE, Slots

SIZE = 96 << 10


def filled(slots: Slots, value: int, size: int = SIZE) -> np.ndarray:
    """An array of another type that lies in a slot, as the leaf of a payload does."""
    slot = slots.take(size)
    slot[:] = value
    return slot[: size // 2].view(np.uint16).reshape(1, -1)


def test_a_slot_is_used_again_when_the_last_array_in_it_is_gone() -> None:
    slots = Slots()
    first = filled(slots, 1)
    address, part = first.ctypes.data, first[0, 5:9]
    del first
    kept = [filled(slots, value) for value in range(PIECE // SIZE)]
    assert all(array.ctypes.data != address for array in kept), "a view of a view still reads the slot"
    assert part.tolist() == [0x0101] * 4
    del part
    assert filled(slots, 9).ctypes.data == address


def test_memory_that_jax_reads_is_not_used_again() -> None:
    slots = Slots()
    on_device = jax.device_put(filled(slots, 3))
    for value in range(4):
        filled(slots, value)
    assert (np.asarray(on_device) == 0x0303).all()


def test_slots_begin_on_cache_lines_and_lie_apart() -> None:
    slots = Slots()
    arrays = [slots.take(1000) for _ in range(50)]
    starts = sorted(array.ctypes.data for array in arrays)
    assert all(start % LINE == 0 for start in starts)
    assert all(after - before >= 1000 for before, after in itertools.pairwise(starts))
    assert all(array.nbytes == 1000 for array in arrays)


def test_payloads_of_another_size_get_memory_of_their_own() -> None:
    slots = Slots()
    kept = slots.take(SIZE)
    before = slots.nbytes
    others = [slots.take(size) for size in (SIZE + LINE, SIZE - LINE, 10)]
    assert [other.nbytes for other in others] == [SIZE + LINE, SIZE - LINE, 10]
    assert slots.nbytes == before and kept.nbytes == SIZE


def test_what_is_not_used_is_given_back() -> None:
    slots = Slots()
    count = PIECE // SIZE
    kept = [slots.take(SIZE) for _ in range(3 * count)]
    assert slots.nbytes >= 3 * count * SIZE
    del kept[1:]
    slots.reclaim()
    assert slots.nbytes <= PIECE + LINE
    kept.clear()
    slots.reclaim()
    assert slots.nbytes == 0


@pytest.mark.parametrize("threads", [4])
def test_threads_never_share_a_slot(threads: int) -> None:
    slots, wrong = Slots(), []

    def work(value: int) -> None:
        for _ in range(200):
            array = filled(slots, value, 4096)
            if not (array == value * 0x0101).all():
                wrong.append(value)

    running = [threading.Thread(target=work, args=(value,)) for value in range(1, threads + 1)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong
    assert slots.nbytes <= PIECE
