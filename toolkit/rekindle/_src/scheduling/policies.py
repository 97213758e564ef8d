"""Scheduling policies: the order in which waiting requests are admitted.

    fcfs         first come, first served
    priority     larger `priority` first
    lof          longest output first: the largest max_tokens starts first
    random       shuffled, reproducible by seed
    lpm          longest cached prefix first
    sjf          fewest uncached tokens first, with ageing (shortest_first.py)
    dfs-weight   depth first through the cached prefixes, the branch with most waiting requests first

The last three look at the cache as it is now, for `WINDOW` requests only, so that a long queue costs nothing: lpm and
dfs-weight for the oldest ones, sjf for those with the fewest uncached tokens when they were last looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items

from rekindle._src.scheduling.sequence import Sequence

WINDOW = 64
CACHE_AWARE = frozenset({"lpm", "dfs-weight", "sjf"})
Path = Items[int]  # keys of a prompt's cached pages
Rank = tuple[float, ...]


def static_rank(policy: str, seed: int | None) -> Callable[[Sequence], Rank]:
    """Return the rank function of a policy whose ranks do not change while a request waits; the smallest goes first."""
    if policy == "priority":
        return lambda sequence: (-sequence.request.sampling.priority, sequence.arrived)
    if policy == "lof":
        return lambda sequence: (-sequence.limit, sequence.arrived)
    if policy == "random":
        draw = random.Random(seed)
        return lambda sequence: (draw.random(), sequence.arrived)
    return lambda sequence: (sequence.arrived,)


def seniority(policy: str) -> Callable[[Sequence], Rank]:
    """Return the rank function by which running requests keep their pages; the largest rank is preempted first."""
    if policy == "priority":
        return lambda sequence: (-sequence.request.sampling.priority, sequence.arrived)
    return lambda sequence: (sequence.arrived,)


def longest_prefix_first(waiting: Items[Sequence], path: Callable[[Sequence], Path]) -> list[Sequence]:
    """Sort by the policy `lpm`."""
    return sorted(waiting, key=lambda sequence: (-len(path(sequence)), sequence.arrived))


def depth_first(waiting: Items[Sequence], path: Callable[[Sequence], Path]) -> list[Sequence]:
    """Sort by the policy `dfs-weight`: requests with the same cached prefix follow each other, while it is cached."""
    return _depth_first([(sequence, path(sequence)) for sequence in sorted(waiting, key=lambda s: s.arrived)], 0)


def _depth_first(group: list[tuple[Sequence, Path]], depth: int) -> list[Sequence]:
    """Order a group that shares its first `depth` pages: larger branches first, sequences without more pages last."""
    branches: dict[int, list[tuple[Sequence, Path]]] = {}
    ended = []
    for entry in group:
        if len(entry[1]) > depth:
            branches.setdefault(entry[1][depth], []).append(entry)
        else:
            ended.append(entry[0])
    order = []
    for branch in sorted(branches.values(), key=lambda branch: (-len(branch), branch[0][0].arrived)):
        if len(branch) == 1:
            order.append(branch[0][0])
        else:
            order += _depth_first(branch, _common([path for _, path in branch], depth + 1))
    return order + ended


def _common(paths: list[Path], shared: int) -> int:
    """Return how many leading pages all paths share, at least `shared`. Bisects: a key stands for its whole prefix."""
    low, high = shared, min(map(len, paths))
    while low < high:
        middle = (low + high + 1) // 2
        if len({path[middle - 1] for path in paths}) == 1:
            low = middle
        else:
            high = middle - 1
    return low
