"""Pages with made-up payloads, for tests of the tiers below the device that need no model."""

from __future__ import annotations

import numpy as np

from rekindle._src.kvcache import page_digest
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import Page, Payload

IDENTITY = Identity("weights", "float32", 4, "test")
Pair = tuple[Page, Payload]


def payload_of(digest: bytes, *, size: int = 64) -> Payload:
    """Two leaves, as int8 pages with their scales have; their content follows from the digest."""
    draw = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    values = draw.integers(-100, 100, (1, size), np.int8)
    return values, draw.random((1, 3)).astype(np.float32)


def chain(first: int, length: int, identity: Identity = IDENTITY, *, after: bytes | None = None) -> list[Pair]:
    """Pages that follow each other, the tokens of each being one number."""
    parent = identity.root if after is None else after
    pairs = []
    for number in range(first, first + length):
        tokens = np.full(identity.page_size, number, np.int32)
        digest = page_digest(parent, tokens)
        pairs.append((Page(digest, parent, tokens, 1, 1000.0 + number), payload_of(digest)))
        parent = digest
    return pairs


def same(left: Payload, right: Payload) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all()) for a, b in zip(left, right, strict=True)
    )
