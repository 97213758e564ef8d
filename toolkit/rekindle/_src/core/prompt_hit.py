"""The part of a prompt that its request would find in the prefix cache, told by the scheduler."""

from __future__ import annotations

from typing import NamedTuple


class PromptHit(NamedTuple):
    """Leading tokens of a prompt that are cached, by the tier that has them, if it were admitted now.

    A request that uses all of its cached pages has `device_tokens + host_tokens + disk_tokens` as its cached tokens.
    """

    device_tokens: int  # including the tokens of a page copied in part
    host_tokens: int
    disk_tokens: int
    reused_tokens: int  # of these, the ones that would not be computed
    fetch_seconds: float  # expected, for the pages below the device
    compute_seconds: float | None  # expected for the same pages; None until it is measured
    stateless_tokens: int  # cached after these, and of no use for want of entries in side caches
    keys: tuple[int, ...]  # of the nodes with these tokens, the one to copy included
