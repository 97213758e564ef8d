"""The prefix tree's statistics."""

from __future__ import annotations

import dataclasses

from rekindle._src.core import html


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class CacheStatistics(html.Record):
    """Sizes now, and counts since the cache was made."""

    nodes: int
    device_pages: int  # in the tree, held or not
    evictable_pages: int
    pinned_pages: int
    forgotten_nodes: int
    matches: int  # admissions that looked up a prefix
    hits: int  # matches that found one
    device_hit_pages: int
    host_hit_pages: int
    published_pages: int
    merged_pages: int  # computed twice, kept once
    evicted_pages: int
    offloaded_pages: int
