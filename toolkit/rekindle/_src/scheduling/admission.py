"""Admission: decides which waiting request gets a slot and pages, which wait for others, and which are preempted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

from rekindle._src.core.records import Status
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.scheduling.limits import Limits
from rekindle._src.scheduling.page_ledger import Fetch, PageLedger
from rekindle._src.scheduling.policies import ShortestFirst
from rekindle._src.scheduling.prefix_claims import Beginning, PrefixClaims
from rekindle._src.scheduling.running_set import RunningSet
from rekindle._src.scheduling.sequence import Sequence
from rekindle._src.scheduling.waiting import WaitingQueue

_PARKED_PER_PLAN = 32  # sequences; bounds the time of a plan when thousands of requests share a prefix


class Admission:
    """Moves sequences between the waiting queue, the parked sequences and the running set.

    Nothing deadlocks: the most senior running sequence can take any page that a junior holds; that a request fits when
    it is alone was checked at submission; and a parked sequence waits for a running one, and is woken when that one is
    preempted.
    """

    def __init__(
        self,
        limits: Limits,
        ledger: PageLedger,
        running_set: RunningSet,
        queue: WaitingQueue,
        reserve: Reserve,
        shortest: ShortestFirst | None = None,
        max_overtakes: int = 64,
    ) -> None:
        self._limits, self._ledger, self._running_set, self._queue = limits, ledger, running_set, queue
        self._claims = PrefixClaims(limits.page_size, ledger.least_copied)
        self._loading = DiskReads(ledger)
        self._shortest = shortest  # the ranks of the policy sjf
        self._unplaced: dict[Sequence, None] = {}  # wait for room for their adapters, the first to wait first
        self._max_overtakes = max_overtakes
        self.reserve = reserve
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._claims.parked + len(self._loading) + len(self._unplaced)

    @property
    def parked(self) -> int:
        return self._claims.parked

    @property
    def possible(self) -> bool:
        if self._loading:
            self._wake(self._loading.ready())
        if self._unplaced:
            self._place()
        return bool(self._running_set.free_slots and len(self._queue))

    def submit(self, sequence: Sequence) -> None:
        self._queue.add(sequence)

    def prefills(self, *, admitting: bool) -> Iterator[Sequence]:
        """Yield sequences in the order in which they get the prefill budget of a step, until it is spent.

        The running ones come first, by seniority, then those that are admitted now, if `admitting`. Under sjf both are
        merged by rank, so that a short prompt goes before the rest of a long one.
        """
        pending = deque(sequence for sequence in self._running_set.running if sequence.prefilling)
        if self._shortest is None:
            yield from pending
            pending.clear()
        else:
            pending = deque(sorted(pending, key=self._shortest.rank))
        if admitting and self.possible:
            self._queue.refresh()
            while True:
                while pending and not self._overtakes(pending[0]):
                    yield pending.popleft()
                admitted = self.admit()
                if admitted is None:
                    break
                yield admitted
        yield from pending

    def admit(self) -> Sequence | None:
        """Admit the next sequence: it has a slot and pages then. None if none can be admitted now."""
        running, leaving = self._running_set.running, self._running_set.leaving
        for _ in range(_PARKED_PER_PLAN):
            sequence = self._queue.next() if self._running_set.free_slots else None
            if sequence is None:
                return None
            if sequence in leaving:
                return None  # preempted, and its last step is still in flight
            if sequence.request.adapter is not None and self._waits_for_adapter(sequence):
                continue
            if self._park(sequence):
                continue
            if sequence.request.generates and self._loading.start(sequence):
                self._queue.discard(sequence)
                sequence.reason = "waits for pages to be read from disk"
                continue
            spare = self.reserve.pages((*running, sequence)) if running or leaving else 0
            start = self._ledger.acquire(sequence, spare, fetched=self._loading.loaded(sequence))
            if start is None:
                sequence.reason = (
                    f"needs {pages_for(sequence.known, self._limits.page_size)} pages less what is cached, and {spare} "
                    f"in reserve for {len(running)} running requests; {self._ledger.available} are available"
                )
                return None
            self._queue.take(sequence)
            self._loading.discard(sequence)
            self._running_set.enter(sequence, start)
            if self._ledger.cache is not None and sequence.request.generates:  # others publish no pages
                self._claims.claim(sequence, sequence.published)
            return sequence
        return None

    def park_ahead(self) -> None:
        """Park the next sequences of the queue that will wait, before rows are planned that leave states for them."""
        for _ in range(_PARKED_PER_PLAN):
            sequence = self._queue.next() if len(self._queue) else None
            if sequence is None or sequence in self._running_set.leaving or not self._park(sequence):
                return

    def ensure_page(self, sequence: Sequence) -> bool:
        """Give the sequence a page for its next position, preempting juniors if needed. False if it skips this step."""
        if sequence.planned < sequence.num_pages * self._limits.page_size or self._ledger.grow(sequence):
            return True
        while not self._running_set.leaving and not self._ledger.retiring:
            victim = self._running_set.running[-1]
            if victim is sequence:
                assert len(self._running_set.running) > 1, f"{sequence.id} is alone and out of pages"
                self.preempt(sequence, "had the least seniority when pages ran out")
                return False
            self.preempt(victim, f"gave its pages to request {sequence.id}")
            if self._ledger.grow(sequence):
                return True
        return False  # pages come back with the steps in flight

    def preempt(self, sequence: Sequence, reason: str) -> None:
        sequence.status, sequence.reason = Status.PREEMPTED, reason
        sequence.preemptions += 1
        self.preemptions += 1
        self.reserve.preempted()
        self.abandon(sequence)
        self._running_set.leave(sequence)
        self._queue.put_back(sequence)

    def published(self, sequence: Sequence, first: int, last: int) -> None:
        """Try sequences again that waited for the sequence's pages [first, last), which are in the tree now.

        Those that share the beginning of a page get it to copy, once it is full or the prompt is computed.
        """
        if sequence.claimed and sequence.computed >= sequence.target:
            woken = self._claims.resolve(sequence, first, sequence.claimed)
            sequence.claimed = 0
        else:
            woken = self._claims.resolve(sequence, first, last)
        for waiter, index, tokens in woken:
            if tokens:
                self._ledger.lend(sequence, waiter, index, tokens)
        self._wake(waiter for waiter, _, _ in woken)

    def abandon(self, sequence: Sequence) -> None:
        """Give up the claims on pages that the sequence will not publish; those that waited compute them."""
        self._wake(waiter for waiter, _, _ in self._claims.resolve(sequence, sequence.published, sequence.claimed))
        sequence.claimed = 0

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ended from wherever it is."""
        loading = sequence in self._loading
        self._loading.discard(sequence)
        self._ledger.give_back(sequence)
        if loading:
            pass  # it was nowhere else
        elif sequence in self._queue:
            self._queue.discard(sequence)
        elif sequence in self._unplaced:
            del self._unplaced[sequence]
        elif sequence.waits_for is not None:
            self._claims.unpark(sequence)
        else:
            self.abandon(sequence)
            self.reserve.finished(sequence)
            self._running_set.leave(sequence)

    @property
    def foremost(self) -> Sequence | None:
        """The sequence that would be admitted next, unless the last step of its last epoch is still in flight."""
        sequence = self._queue.next()
        return None if sequence is None or sequence in self._running_set.leaving else sequence

    def has_room(self, sequence: Sequence, beside: Items[Sequence] = ()) -> bool:
        """True if the sequence could be admitted now, together with those in `beside`, which have no slot yet."""
        if self._running_set.free_slots <= len(beside):
            return False
        running, size = self._running_set.running, self._limits.page_size
        needed = sum(pages_for(member.known, size) for member in (*beside, sequence)) - self._ledger.cached(sequence)
        spare = self.reserve.pages((*running, *beside, sequence)) if running or beside else 0
        longest = pages_for(sequence.request.prompt_length + max(1, sequence.limit) - 1, size)
        return self._ledger.has(needed + spare) and longest <= self._ledger.usable(sequence.request)

    def take(self, sequence: Sequence) -> None:
        """Queue a sequence that waited in another shard."""
        sequence.queued_at = None
        self._wake((sequence,))

    def remembered(self, keys: list[int]) -> int:
        """Return how many leading pages are known in any tier or being computed; approximate."""
        cache = self._ledger.cache
        return self._claims.reach(keys, cache.probe(keys, on_device=False) if cache is not None else 0)

    def reason(self, sequence: Sequence) -> str:
        """Return why a sequence waits. While no slot is free, no plan looks at the queue or says so."""
        if sequence.status is Status.QUEUED and sequence in self._queue and not self._running_set.free_slots:
            return f"finds all slots taken ({len(self._running_set.holders)})"
        return sequence.reason

    def older(self, sequence: Sequence) -> int:
        """Return how many older requests are in the queue."""
        return self._queue.position(sequence)

    def check_integrity(self) -> None:
        self._claims.check_integrity(self._running_set.running)

    def _overtakes(self, running: Sequence) -> bool:
        """True if the next waiting request goes before one that is prefilling; only under sjf."""
        waiting = self._queue.next() if self._running_set.free_slots else None
        return (
            waiting is not None
            and self._shortest is not None
            and self._shortest.rank(waiting) < self._shortest.rank(running)
        )

    def _waits_for_adapter(self, sequence: Sequence) -> bool:
        """Set a sequence aside if its adapter finds no room, or if another sequence already waits for room."""
        adapter, adapters = sequence.request.adapter, self._running_set.adapters
        assert adapter is not None, "it has one"
        first = next(iter(self._unplaced), None)
        if adapters.fits(adapter) and (first is None or first.overtaken < self._max_overtakes):
            if first is not None:
                first.overtaken += 1
            return False
        self._queue.discard(sequence)
        self._unplaced[sequence] = None
        sequence.reason = (
            f"waits for room for the adapter {adapter.name!r}: requests of {adapters.in_use} others are running"
        )
        return True

    def _place(self) -> None:
        """Queue the sequences again that there is room for, the first to wait first."""
        for sequence in tuple(self._unplaced):
            adapter = sequence.request.adapter
            assert adapter is not None, "it waits for room for one"
            if not self._running_set.adapters.fits(adapter):
                return
            del self._unplaced[sequence]
            self._wake((sequence,))

    def _park(self, sequence: Sequence) -> bool:
        """Park the sequence if a running one computes a prefix that is worth waiting for. True if it was parked."""
        keys, cached = self._ledger.keys(sequence), self._ledger.cached(sequence)
        there, copied = self._ledger.on_device(keys), self._ledger.copied(sequence, keys[:cached])
        beginning = self._claims.worth_waiting(sequence, keys, cached, there=there, copied=copied)
        if beginning is None:
            return False
        if not beginning.tokens:
            owner = self._claims.owner(keys[beginning.pages - 1])
            pages = self._ledger.states.shared(owner, beginning.pages)
            owner = self._claims.owner(keys[pages - 1]) if pages else None
            if owner is None:
                return False
            beginning = Beginning(owner, pages)
        self._queue.discard(sequence)
        self._claims.park(sequence, keys, beginning)
        tokens = beginning.pages * self._limits.page_size + beginning.tokens
        sequence.reason = (
            f"waits for request {beginning.owner.id}, which computes the first {tokens} tokens that both share"
        )
        return True

    def _wake(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.reason = "is about to be admitted"
            if sequence.status is Status.PREEMPTED:
                self._queue.put_back(sequence)
            else:
                self._queue.add(sequence)


_FLOOR = 0.05  # the smallest fraction of a `Reserve`


class Reserve:
    """An estimate of the fraction of `max_tokens` that requests use, so that not all of it has to be kept back.

    Each finished request moves the fraction towards its own, each preemption raises it by 0.2. Too small a reserve
    costs a preemption, which recomputes at most the unpublished tail; too large a one leaves slots empty.
    """

    def __init__(self, fraction: float = 0.4) -> None:
        self.fraction = fraction

    def finished(self, sequence: Sequence) -> None:
        if not sequence.limit:
            return  # an embedding, which generates nothing
        fraction = sequence.generated / sequence.limit
        self.fraction = max(_FLOOR, self.fraction + 0.1 * (fraction - self.fraction))

    def preempted(self) -> None:
        self.fraction = min(1.0, self.fraction + 0.2)

    def pages(self, sequences: Iterable[Sequence]) -> int:
        """Return how many pages to keep back for tokens that running sequences have yet to generate."""
        return sum(sequence.growth(self.fraction) for sequence in sequences)


class DiskReads:
    """The sequences that wait outside the queue until their cached pages are read from disk.

    Each one loads once per admission; pages that fail are computed.
    """

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger
        self._waiting: dict[Sequence, tuple[Fetch, Status]] = {}
        self._loaded: dict[Sequence, Fetch | None] = {}  # until admission: the loaded pages are held in host memory

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def loaded(self, sequence: Sequence) -> bool:
        """True if pages were read for the sequence, which is about to be admitted."""
        return self._loaded.get(sequence) is not None

    def start(self, sequence: Sequence) -> bool:
        """Start to read the sequence's pages from disk, if that pays. True if the sequence now waits for them."""
        if sequence in self._loaded or not self._ledger.may_fetch:
            return False
        fetch = self._ledger.fetch(sequence)
        if fetch is None:
            self._loaded[sequence] = None
            return False
        self._waiting[sequence] = fetch, sequence.status
        sequence.status = Status.LOADING
        return True

    def ready(self) -> list[Sequence]:
        """Take out the sequences whose pages have been read."""
        loaded = [sequence for sequence, (fetch, _) in self._waiting.items() if fetch.finished]
        for sequence in loaded:
            self._loaded[sequence], sequence.status = self._waiting.pop(sequence)
        return loaded

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that was admitted, and so holds its pages itself, or that ended."""
        fetch = self._loaded.pop(sequence, None)
        if sequence in self._waiting:
            fetch, _ = self._waiting.pop(sequence)
        if fetch is not None:
            fetch.release()
