"""Scheduling policies: the order of admission for waiting requests.

    fcfs         first come, first served; a server's callers take turns, each with its first, and one that runs
                 nothing comes before those that do
    priority     larger `priority` first, and equal ones as under fcfs
    lof          longest output first: the largest max_tokens starts first
    random       shuffled, reproducible by seed
    lpm          longest cached prefix first
    sjf          fewest uncached tokens first, with ageing (`ShortestFirst`)
    dfs-weight   depth first through the cached prefixes, the branch with most waiting requests first

The last three look at the cache as it is now, for `WINDOW` requests only, so that a long queue costs nothing: lpm and
dfs-weight for the first ones under fcfs, sjf for those with the fewest uncached tokens when they were last looked at.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from collections.abc import Sequence as Items

from rekindle._src.scheduling.sequence import Sequence

WINDOW = 64
CACHE_AWARE = frozenset({"lpm", "dfs-weight", "sjf"})
Path = Items[int]  # keys of a prompt's cached pages
Rank = tuple[float, ...]


def static_rank(policy: str, seed: int | None) -> Callable[[Sequence], Rank]:
    """Return the rank function of a policy with ranks fixed while a request waits; the smallest goes first."""
    if policy == "priority":
        return lambda sequence: (-sequence.request.sampling.priority, sequence.queue.turn, sequence.queue.arrived)
    if policy == "lof":
        return lambda sequence: (-sequence.limit, sequence.queue.arrived)
    if policy == "random":
        draw = random.Random(seed)
        return lambda sequence: (draw.random(), sequence.queue.arrived)
    return lambda sequence: (sequence.queue.turn, sequence.queue.arrived)


def seniority(policy: str) -> Callable[[Sequence], Rank]:
    """Return the rank function for keeping pages while running; the largest rank is preempted first."""
    if policy == "priority":
        return lambda sequence: (-sequence.request.sampling.priority, sequence.queue.arrived)
    return lambda sequence: (sequence.queue.arrived,)


class CallerTurns:
    """Numbers waiting sequences so that their callers take turns: each has one in a round, its oldest first.

    A caller that comes, or comes back, begins with the round that is being admitted. A session without a server has one
    caller, and its sequences are admitted in their order.
    """

    def __init__(self) -> None:
        self._round = 0
        self._callers: dict[str, list[int]] = {}  # of those with waiting sequences: how many, and the last's round

    @property
    def names(self) -> set[str]:
        """The callers of a server with waiting sequences."""
        return {name for name in self._callers if name}

    def queued(self, sequence: Sequence) -> None:
        """Give a sequence its turn, unless it had one before."""
        waiting = self._callers.setdefault(sequence.request.caller, [0, self._round - 1])
        waiting[0] += 1
        if sequence.queue.turn < 0:
            sequence.queue.turn = max(self._round, waiting[1] + 1)
        waiting[1] = max(waiting[1], sequence.queue.turn)

    def admitted(self, sequence: Sequence) -> None:
        """Note which turn is being taken."""
        self._round = max(self._round, sequence.queue.turn + 1)

    def left(self, sequence: Sequence) -> None:
        """Forget a sequence that waits no more. A caller without any has no turns to come."""
        waiting = self._callers[sequence.request.caller]
        waiting[0] -= 1
        if not waiting[0]:
            del self._callers[sequence.request.caller]


def depth_first(waiting: Items[Sequence], path: Callable[[Sequence], Path]) -> list[Sequence]:
    """Sort by the policy `dfs-weight`: requests with the same cached prefix follow each other, while it is cached."""
    return _depth_first([(sequence, path(sequence)) for sequence in sorted(waiting, key=lambda s: s.queue.arrived)], 0)


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
    for branch in sorted(branches.values(), key=lambda branch: (-len(branch), branch[0][0].queue.arrived)):
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

    Short prompts, such as the next turn of a chat with a cached history, are then not held up by a flood of long
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
        if sequence.queue.before is None:
            sequence.queue.before = self._admitted

    def admitted(self, sequence: Sequence) -> None:
        """Count the work of a sequence that is admitted now; all waiting sequences age by it."""
        self._admitted += self._uncached(sequence)

    def rank(self, sequence: Sequence) -> Rank:
        """Return the tokens left to prefill, plus what the sequence lacks in age; then the order of arrival."""
        assert sequence.queue.before is not None, f"{sequence.id} was never queued"
        left = sequence.epoch.target - sequence.epoch.planned if sequence.epoch.slot >= 0 else self._uncached(sequence)
        return left + sequence.queue.before / AGEING, sequence.queue.arrived


class _Heap:
    """A heap of sequences by rank. Former members are skipped when they surface, and purged when there are many."""

    def __init__(self, members: set[Sequence]) -> None:
        self._members = members
        self._heap: list[tuple[Rank, int, Sequence]] = []

    def push(self, rank: Rank, sequence: Sequence) -> None:
        if len(self._heap) > 2 * len(self._members) + 64:
            alive = {entry[2]: entry for entry in self._heap if entry[2] in self._members}
            self._heap = list(alive.values())
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (rank, sequence.queue.arrived, sequence))

    def top(self) -> Sequence | None:
        while self._heap:
            sequence = self._heap[0][2]
            if sequence in self._members:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence | None:
        sequence = self.top()
        if sequence is not None:
            heapq.heappop(self._heap)
        return sequence


class WaitingQueue:
    """Chooses which request is admitted next. Operations are O(log n) at most; `refresh` looks at `WINDOW` requests.

    Preempted requests come first, by seniority. Then comes the oldest request if `max_overtakes` others were admitted
    while it was the oldest, so that no request starves under any policy.
    """

    def __init__(
        self,
        policy: str,
        *,
        path: Callable[[Sequence], Path],
        shortest: ShortestFirst | None = None,
        seed: int | None = None,
        max_overtakes: int = 64,
    ) -> None:
        self._policy, self._path, self._max_overtakes = policy, path, max_overtakes
        self._shortest = shortest  # the ranks of the policy sjf
        self._rank = static_rank(policy, seed) if shortest is None else shortest.rank
        self._seniority = seniority(policy)
        self._turns = CallerTurns()
        self._members: set[Sequence] = set()
        self._preempted: set[Sequence] = set()
        self._by_age = _Heap(self._members)
        self._by_rank = _Heap(self._members)
        self._returning = _Heap(self._preempted)
        self._window: dict[Sequence, None] = {}  # cache-aware policies: the requests that are ordered
        self._order: list[Sequence] = []  # the window as ordered by the last refresh, the next one at the end

    def __len__(self) -> int:
        return len(self._members) + len(self._preempted)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members or sequence in self._preempted

    def add(self, sequence: Sequence) -> None:
        if self._shortest is not None:
            self._shortest.queued(sequence)
        self._turns.queued(sequence)
        rank = self._rank(sequence)
        self._members.add(sequence)
        self._by_age.push((sequence.queue.arrived,), sequence)
        self._by_rank.push(rank, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the head. One that comes from another shard's queue starts to age here."""
        if self._shortest is not None:
            self._shortest.queued(sequence)
        self._preempted.add(sequence)
        self._returning.push(self._seniority(sequence), sequence)

    def put_last(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again, as the last of its caller."""
        sequence.queue.turn = -1
        self.add(sequence)

    def outsider(self, running: set[str]) -> Sequence | None:
        """Return the next sequence of a caller that is not `running` any. None without one, or if the policy knows no
        turns of callers."""
        others = self._turns.names - running if self._policy == "fcfs" else ()
        if not others:
            return None
        return min((one for one in self._members if one.request.caller in others), key=self._rank)

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence that was aborted, parked or admitted."""
        if sequence in self._members:
            self._members.discard(sequence)
            self._turns.left(sequence)
        self._preempted.discard(sequence)
        self._window.pop(sequence, None)

    def refresh(self) -> None:
        """Reorder the window of a cache-aware policy, since the cache may have changed."""
        if self._policy not in CACHE_AWARE:
            return
        if self._shortest is not None:
            # Shorter ones may have come, so the window is chosen anew, with ranks as of now.
            for member in self._window:
                self._by_rank.push(self._rank(member), member)
            self._window.clear()
        while len(self._window) < WINDOW:
            sequence = self._by_rank.pop()
            if sequence is None:
                break
            self._window[sequence] = None
        if self._shortest is not None:
            self._order = sorted(self._window, key=self._rank, reverse=True)
            return
        if self._policy == "lpm":
            self._order = sorted(self._window, key=lambda member: (-len(self._path(member)), member.queue.arrived))[
                ::-1
            ]
        else:
            self._order = depth_first(list(self._window), self._path)[::-1]

    def next(self, running: set[str] | None = None) -> Sequence | None:
        """Return the sequence to admit next; it stays in the queue until `take`. `running` names callers with running
        sequences."""
        sequence = self._returning.top()
        if sequence is not None:
            return sequence
        oldest = self._by_age.top()
        if oldest is None or oldest.queue.overtaken >= self._max_overtakes:
            return oldest
        if self._policy not in CACHE_AWARE:
            return (None if running is None else self.outsider(running)) or self._by_rank.top()
        while self._order:
            if self._order[-1] in self._window:
                return self._order[-1]
            self._order.pop()
        return None

    def take(self, sequence: Sequence) -> None:
        """Take out a sequence that is admitted now."""
        if self._shortest is not None:
            self._shortest.admitted(sequence)
        if sequence in self._members:
            oldest = self._by_age.top()
            assert oldest is not None, "a sequence was taken from an empty queue"
            oldest.queue.overtaken += oldest is not sequence
            self._turns.admitted(sequence)
        self.discard(sequence)

    def position(self, sequence: Sequence) -> int:
        """Return how many waiting requests are older; walks the queue."""
        return sum(member.queue.arrived < sequence.queue.arrived for member in (*self._members, *self._preempted))
