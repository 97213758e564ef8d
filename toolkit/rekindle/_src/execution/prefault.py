"""Device memory touched ahead of its first use: on CPU, the system maps and zeroes it only when it is written.

That is as it should be for pages that may never be used. Those that a restored prefix will lie on are written all at
once, by its first request, which waited 80 of 230 ms for the system then (48 pages, 63 MB, on huge pages).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax

MOST_BYTES = 256 << 20  # memory that is resident from then on, and half a second of one core at the slowest seen
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: as a write would, changing nothing


def prefault(leaves: Sequence[Any], pages: int) -> threading.Thread | None:
    """Begin to touch the first `pages` of each leaf, which the pool hands out first.

    Only addresses are kept. Memory that is freed meanwhile is left alone by the system, or touched in vain.
    """
    if jax.default_backend() != "cpu" or sys.platform != "linux" or not pages:
        return None
    page_bytes = sum(leaf.nbytes // leaf.shape[0] for leaf in leaves)
    count = min(pages, MOST_BYTES // page_bytes)
    ranges = [(leaf.unsafe_buffer_pointer(), leaf.nbytes // leaf.shape[0] * (count + 1)) for leaf in leaves]

    def work() -> None:
        libc = ctypes.CDLL(None)
        for start, size in ranges:
            first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, start + size
            length = -(-(last - first) // mmap.PAGESIZE) * mmap.PAGESIZE
            if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _POPULATE_WRITE):
                return  # an older kernel

    thread = threading.Thread(target=work, name="rekindle touch", daemon=True)
    thread.start()
    return thread
