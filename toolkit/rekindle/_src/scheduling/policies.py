"""Scheduling policies: the order in which waiting requests are admitted.

    fcfs         first come, first served
    priority     larger `priority` first
    lof          longest output first: the largest max_tokens starts first
    random       shuffled, reproducible by seed
    lpm          longest cached prefix first
    sjf          fewest uncached tokens first, with ageing (`ShortestFirst`)
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
    return static_rank(policy if policy == "priority" else "fcfs", None)


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


# Admitted tokens that make up for one token of prefill. While a flood of 50 prompts is computed, chats that arrive stay
# ahead of the rest of it; a larger number lets a steady stream of short prompts hold up a long one for longer.
AGEING = 64


class ShortestFirst:
    """The policy `sjf`: the request with the fewest tokens left to prefill goes first, and waiting requests age.

    Short prompts, such as the next turn of a chat whose history is cached, are then not held up by a flood of long
    ones: they are admitted first, and get the budget of a step before a long prompt that is half computed.

    Age is counted in work and not in time: AGEING tokens that were admitted since a request was queued count as one
    token less to prefill. So a request with U tokens left goes before every request that is queued after AGEING * U
    more tokens were admitted, and none starves.
    """

    def __init__(self, uncached: Callable[[Sequence], int]) -> None:
        self._uncached = uncached  # tokens that a waiting sequence would have to compute if it were admitted now
        self._admitted = 0  # tokens to compute of all sequences admitted so far

    def queued(self, sequence: Sequence) -> None:
        """Start to count a sequence's age, unless it was queued before."""
        if sequence.queued_at is None:
            sequence.queued_at = self._admitted

    def admitted(self, sequence: Sequence) -> None:
        """Count the work of a sequence that is admitted now; all waiting sequences age by it."""
        self._admitted += self._uncached(sequence)

    def rank(self, sequence: Sequence) -> Rank:
        """Return the tokens left to prefill, plus what the sequence lacks in age; then the order of arrival."""
        assert sequence.queued_at is not None, f"{sequence.id} was never queued"
        left = sequence.target - sequence.planned if sequence.slot >= 0 else self._uncached(sequence)
        return left + sequence.queued_at / AGEING, sequence.arrived
