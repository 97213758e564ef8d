"""Memory for weights: aligned, its own, and adopted by a CPU device without a copy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from rekindle._src.models.loading.hugepages import SLAB, aligned


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
