"""Names for pages: digests that mean the same in every process, and quick keys for looking up within one.

A digest chains over every page before it from a root that stands for model, weights, KV dtype and layout, so equal
digests mean equal KV content, here or in a process of next year. It is computed only for pages that leave the device.
A key is 64 bits over the same prefix, computed for a whole prompt at once with weights that each process draws for
itself. A page that is found by its key is used only if its tokens are equal too, so a collision costs a missed hit and
never causes a wrong one. A collision that keeps another's prefix out of the cache can't be made without the weights.
"""

from __future__ import annotations

import functools
import secrets
from hashlib import blake2b, shake_128

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.records import IntArray

DIGEST_SIZE = 16
LOOKUP_SECRET = secrets.token_bytes(16)  # of this process; sent to processes that request pages by their keys
_GOLDEN = 0x9E3779B97F4A7C15


def root_digest(*parts: str) -> bytes:
    """Return the root of a tree of pages; pages are equal only if all `parts` are: fingerprint, KV dtype, layout, …"""
    state = blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        text = part.encode()
        state.update(len(text).to_bytes(8, "little") + text)
    return state.digest()


def page_digest(parent: bytes, tokens: IntArray) -> bytes:
    """Return the name of the page that holds `tokens` after the page (or root) named `parent`."""
    return blake2b(parent + tokens.astype("<i4").tobytes(), digest_size=DIGEST_SIZE).digest()


def page_keys(
    tokens: IntArray, page_size: int, *, first: int = 0, previous: int = 0, secret: bytes = LOOKUP_SECRET
) -> list[int]:
    """Return lookup keys of the full pages in `tokens`: pages `first`, … of a sequence, after one with key `previous`.

    Keys are valid only in the process with this `secret`.
    A page's key is the sum, modulo 2**64, of a mixed hash of each page so far with its position, so one cumulative sum
    gives all of them: 2,048 pages of 16 tokens take 0.2 ms.
    """
    count = len(tokens) // page_size
    if not count:
        return []
    pages = tokens[: count * page_size].reshape(count, page_size).astype(np.uint64)
    index = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    mixed = _mix((pages + np.uint64(1)) @ _weights(page_size, secret) + index * np.uint64(_GOLDEN))
    mixed[:1] += np.uint64(previous)  # as an array: a scalar would warn when it wraps
    return np.cumsum(mixed, dtype=np.uint64).tolist()


@functools.lru_cache
def _weights(page_size: int, secret: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(shake_128(secret).digest(8 * page_size), "<u8").astype(np.uint64) | np.uint64(1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
