"""The scheduler of one data shard: a scheduler whose waiting requests may go to another shard."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from rekindle._src.core.records import Request
from rekindle._src.kvcache.pool import PagePool, pages_for
from rekindle._src.kvcache.tree import PrefixCache
from rekindle._src.scheduling.limits import Limits
from rekindle._src.scheduling.reserve import Reserve
from rekindle._src.scheduling.scheduler import Scheduler
from rekindle._src.scheduling.sequence import Sequence


class ShardScheduler(Scheduler):
    """A scheduler whose slots and pages are numbered behind those of the shards before it.

    A request that waits belongs to no device yet: it has neither slot nor pages, and its tokens, the keys of its pages
    and its seed are the same in every shard.
    """

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        arrivals: Iterator[int],
        *,
        first_slot: int,
        cache: PrefixCache | None = None,
        policy: str = "fcfs",
        seed: int | None = None,
        max_overtakes: int = 64,
        reserve: Reserve | None = None,
    ) -> None:
        super().__init__(
            limits, pool, cache=cache, policy=policy, seed=seed, max_overtakes=max_overtakes, reserve=reserve
        )
        self._running_set.number_from(first_slot)
        self._arrivals = arrivals  # of all shards, so that requests keep their order when they move

    @property
    def live(self) -> int:
        """Requests between their submission and their end."""
        return len(self._alive)

    @property
    def waiting(self) -> int:
        """Requests that wait, for any reason."""
        return self._admission.waiting

    def has(self, request_id: str) -> bool:
        """True if a live request is in this shard."""
        return request_id in self._alive

    def has_pages(self, request: Request) -> bool:
        """True if a request, alone in the shard, would have pages for its prompt and all that it may generate."""
        length = request.prompt_length + max(1, request.sampling.max_tokens) - 1
        return pages_for(length, self.limits.page_size) <= self._ledger.usable(request)

    def remembered(self, keys: list[int]) -> int:
        """Return how many leading pages are known in any tier or being computed; approximate."""
        return self._admission.remembered(keys)

    @property
    def blocked_head(self) -> Sequence | None:
        """The next request to be admitted, if it has to wait until another one gives up its slot or pages."""
        sequence = self._admission.foremost
        return None if sequence is None or self._admission.has_room(sequence) else sequence

    def has_room(self, sequence: Sequence, moved_in: Items[Sequence]) -> bool:
        """True if a request of another shard would be admitted at once, beside those that were just `moved_in`."""
        return self.waiting == len(moved_in) and self._admission.has_room(sequence, moved_in)

    def give(self, sequence: Sequence) -> None:
        """Let a waiting request go to another shard."""
        self._admission.remove(sequence)
        del self._alive[sequence.id]

    def take(self, sequence: Sequence) -> None:
        """Queue a request that another shard gave."""
        self._alive[sequence.id] = sequence
        self._admission.take(sequence)

    def _arrival(self) -> int:
        return next(self._arrivals)
