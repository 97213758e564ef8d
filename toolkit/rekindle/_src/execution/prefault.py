"""Prefaulting of device memory: on CPU, the system maps and zeroes memory only when it is first written.

That is right for pages that may never be used. The pages of a restored prefix are written all at once by its first
request, which waited for the system for 80 of its 230 ms (48 pages, 63 MB, on huge pages).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax

MAX_BYTES = 256 << 20  # resident from then on; half a second of one core at the slowest measured
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: maps as a write would, without changing the content


def prefault(leaves: Sequence[Any], pages: int) -> threading.Thread | None:
    """Start to prefault the first `pages` of each leaf, which the pool hands out first; returns the thread.

    The thread keeps addresses only. If the memory is freed meanwhile, the system refuses the call or maps it in vain.
    """
    if jax.default_backend() != "cpu" or sys.platform != "linux" or not pages:
        return None
    page_bytes = sum(leaf.nbytes // leaf.shape[0] for leaf in leaves)
    count = min(pages, MAX_BYTES // page_bytes)
    ranges = [(leaf.unsafe_buffer_pointer(), leaf.nbytes // leaf.shape[0] * (count + 1)) for leaf in leaves]

    def work() -> None:
        libc = ctypes.CDLL(None)
        for start, size in ranges:
            first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, start + size
            length = -(-(last - first) // mmap.PAGESIZE) * mmap.PAGESIZE
            if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _POPULATE_WRITE):
                return  # the kernel is too old, or the memory was freed

    thread = threading.Thread(target=work, name="rekindle prefault", daemon=True)
    thread.start()
    return thread
