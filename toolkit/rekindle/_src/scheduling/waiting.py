"""The queue of requests that wait for a slot, ordered by policy, with a bound on how often one may be overtaken."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rekindle._src.scheduling.policies import (
    CACHE_AWARE,
    WINDOW,
    Path,
    Rank,
    ShortestFirst,
    depth_first,
    longest_prefix_first,
    seniority,
    static_rank,
)
from rekindle._src.scheduling.sequence import Sequence


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
        heapq.heappush(self._heap, (rank, sequence.arrived, sequence))

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
        rank = self._rank(sequence)
        self._members.add(sequence)
        self._by_age.push((sequence.arrived,), sequence)
        self._by_rank.push(rank, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the head."""
        self._preempted.add(sequence)
        self._returning.push(self._seniority(sequence), sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence that was aborted, parked or admitted."""
        self._members.discard(sequence)
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
        order = longest_prefix_first if self._policy == "lpm" else depth_first
        self._order = order(list(self._window), self._path)[::-1]

    def next(self) -> Sequence | None:
        """Return the sequence to admit next; it stays in the queue until `take`."""
        sequence = self._returning.top()
        if sequence is not None:
            return sequence
        oldest = self._by_age.top()
        if oldest is None or oldest.overtaken >= self._max_overtakes:
            return oldest
        if self._policy not in CACHE_AWARE:
            return self._by_rank.top()
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
            oldest.overtaken += oldest is not sequence
        self.discard(sequence)

    def position(self, sequence: Sequence) -> int:
        """Return how many waiting requests are older; walks the queue."""
        return sum(member.arrived < sequence.arrived for member in (*self._members, *self._preempted))
