"""Admission: decides which waiting request gets a slot and pages, which wait for others, and which are preempted.

`Admission` moves sequences between the queue of policies.py, `DiskReads` for pages on disk, `PrefixClaims` for prefixes
that others compute, and the `RunningSet`. Its requests may need more of the device than pages: `DeviceRoom`.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

from rekindle._src.core import words
from rekindle._src.core.extension import DeviceLoad, Extensions
from rekindle._src.core.records import Status
from rekindle._src.kvcache.node import common
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.kvcache.tiers.tiers import DiskFetch
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.policies import Rank, ShortestFirst, WaitingQueue
from rekindle._src.scheduling.sequence import Limits, Sequence
from rekindle._src.scheduling.timeline import PhaseKind

_PARKED_PER_PLAN = 32  # sequences; bounds the time of a plan when thousands of requests share a prefix


class DeviceRoom:
    """The room on the device for what requests need in addition to slots and pages: here, they need nothing."""

    def concerns(self, wanted: Extensions) -> bool:
        """True if a request with these extensions needs room."""
        return False

    def fits(self, wanted: Extensions) -> bool:
        """True if `take` would succeed now."""
        return True

    def shortage(self, wanted: Extensions) -> str:
        """Return the reason why a request waits, in words."""
        return ""

    def take(self, wanted: Extensions) -> None:
        """Count one more sequence with these extensions, for which there is room."""

    def leave(self, wanted: Extensions) -> None:
        """Undo one `take`."""

    def loads(self) -> tuple[DeviceLoad, ...]:
        """Take out the loads of the step being planned."""
        return ()

    def check_integrity(self, users: list[Extensions]) -> None:
        """Raise AssertionError unless the counts match `users`."""


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
        self._unplaced: dict[Sequence, None] = {}  # wait for room for their extensions, the first to wait first
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
    def loading(self) -> int:
        """Sequences that wait for a disk, which has not hung for long."""
        return len(self._loading)

    @property
    def possible(self) -> bool:
        if self._loading:
            self._wake(self._loading.ready())
        if self._unplaced:
            self._place()
        return bool(self._running_set.free_slots and len(self._queue))

    def submit(self, sequence: Sequence) -> None:
        others = f"{words.count(self.waiting, 'request')} before it" if self.waiting else ""
        self._queue.add(sequence)
        taken = "" if self._running_set.free_slots else f"all slots were taken ({len(self._running_set.holders)})"
        sequence.timeline.enter(PhaseKind.QUEUED, ", ".join(part for part in (taken, others) if part))

    def prefills(self, *, admitting: bool) -> Iterator[Sequence]:
        """Yield sequences in the order of their turns at a step's prefill budget, until it is spent.

        The running ones come first, by seniority, then newly admitted ones, if `admitting`. Under sjf both are
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
            sequence = self._queue.next(self._callers()) if self._running_set.free_slots else None
            if sequence is None:
                return None
            if sequence in leaving:
                return None  # preempted, and its last step is still in flight
            if self._waits_for_room(sequence):
                continue
            if self._park(sequence):
                continue
            if sequence.generates and self._loading.start(sequence):
                self._queue.discard(sequence)
                sequence.enter(PhaseKind.LOADING, "waits for pages to be read from disk")
                continue
            spare = self.reserve.pages((*running, sequence)) if running or leaving else 0
            start = self._ledger.acquire(sequence, spare, fetched=self._loading.loaded(sequence))
            if start is None:
                reason = (
                    f"needs {pages_for(sequence.tokens.known, self._limits.page_size)} pages minus cached ones, and "
                    f"{spare} in reserve for {len(running)} running requests; {self._ledger.available} are available"
                )
                if sequence.status is Status.PREEMPTED:
                    sequence.reason = reason  # its timeline keeps why it was preempted
                else:
                    sequence.enter(PhaseKind.PAGES, reason)
                return None
            self._queue.take(sequence)
            self._loading.discard(sequence)
            self._running_set.enter(sequence, start)
            if self._ledger.cache is not None and sequence.generates:  # others publish no pages
                self._claims.claim(sequence, sequence.tree.published)
            return sequence
        return None

    def _callers(self) -> set[str]:
        return {sequence.request.caller for sequence in self._running_set.running}

    def make_room(self) -> None:
        """Preempt a sequence of the caller that runs most, if another one runs nothing and no slot is free.

        Else a caller with a few long texts would keep all others waiting until one of these ends.
        """
        running_set = self._running_set
        if running_set.free_slots or running_set.leaving or not len(self._queue):
            return
        if self._queue.outsider(self._callers()) is None:
            return
        running = running_set.running
        ((most, count),) = Counter(sequence.request.caller for sequence in running).most_common(1)
        if most and count > 1:
            junior = next(sequence for sequence in reversed(running) if sequence.request.caller == most)
            self.preempt(junior, "made room for a caller that ran nothing", last=True)

    def park_ahead(self) -> None:
        """Park the next sequences of the queue that will wait, before rows are planned that leave entries for them."""
        for _ in range(_PARKED_PER_PLAN):
            sequence = self._queue.next() if len(self._queue) else None
            if sequence is None or sequence in self._running_set.leaving or not self._park(sequence):
                return

    def ensure_page(self, sequence: Sequence) -> bool:
        """Give the sequence a page for its next position, preempting juniors if needed. False if it skips this step."""
        if sequence.epoch.planned < sequence.pages.count * self._limits.page_size:
            return True
        if self._ledger.grow(sequence):
            if sequence.timeline.kind is PhaseKind.PAGES:
                sequence.enter(PhaseKind.DECODE)
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
        sequence.enter(PhaseKind.PAGES, "until steps in flight gave some back")
        return False

    def preempt(self, sequence: Sequence, reason: str, *, last: bool = False) -> None:
        """Take a running sequence's slot and pages. It is the next to run again, or the `last` of its caller."""
        sequence.status = Status.PREEMPTED
        sequence.enter(PhaseKind.PREEMPTED, reason)
        sequence.queue.preemptions += 1
        self.preemptions += 1
        if not last:
            self.reserve.preempted()  # pages ran out
        self.abandon(sequence)
        self._running_set.leave(sequence)
        if last:
            self._queue.put_last(sequence)
        else:
            self._queue.put_back(sequence)

    def published(self, sequence: Sequence, first: int, last: int) -> None:
        """Retry sequences that waited for the sequence's pages [first, last), which are in the tree now.

        A sequence that shares the beginning of a page gets it to copy, once the page is full or the prompt is computed.
        """
        if sequence.tree.claimed and sequence.epoch.computed >= sequence.epoch.target:
            woken = self._claims.resolve(sequence, first, sequence.tree.claimed)
            sequence.tree.claimed = 0
        else:
            woken = self._claims.resolve(sequence, first, last)
        for waiter, index, tokens in woken:
            if tokens:
                self._ledger.lend(sequence, waiter, index, tokens)
        self._wake(waiter for waiter, _, _ in woken)

    def abandon(self, sequence: Sequence) -> None:
        """Give up the claims on pages that the sequence will not publish; waiting sequences compute them."""
        self._wake(
            waiter for waiter, _, _ in self._claims.resolve(sequence, sequence.tree.published, sequence.tree.claimed)
        )
        sequence.tree.claimed = 0

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
        elif sequence.queue.waits_for is not None:
            self._claims.unpark(sequence)
        else:
            self.abandon(sequence)
            self.reserve.finished(sequence)
            self._running_set.leave(sequence)

    def expel(self, sequence: Sequence) -> None:
        """Take out a sequence with broken bookkeeping: from wherever it is, relying on nothing."""
        self._loading.discard(sequence)
        self._queue.discard(sequence)
        self._unplaced.pop(sequence, None)
        self._wake(self._claims.expel(sequence))
        self._running_set.expel(sequence)

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
        needed = sum(pages_for(member.tokens.known, size) for member in (*beside, sequence)) - self._ledger.cached(
            sequence
        )
        spare = self.reserve.pages((*running, *beside, sequence)) if running or beside else 0
        longest = pages_for(sequence.request.prompt_length + max(1, sequence.limit) - 1, size)
        return self._ledger.has(needed + spare) and longest <= self._ledger.usable(sequence.request)

    def take(self, sequence: Sequence) -> None:
        """Queue a sequence that waited in another shard."""
        sequence.queue.before, sequence.queue.turn = None, -1
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

    def _waits_for_room(self, sequence: Sequence) -> bool:
        """Set a sequence aside if its extensions find no room, or if another sequence already waits for room."""
        room, wanted = self._running_set.room, sequence.request.extensions
        if not room.concerns(wanted):
            return False
        first = next(iter(self._unplaced), None)
        if room.fits(wanted) and (first is None or first.queue.overtaken < self._max_overtakes):
            if first is not None:
                first.queue.overtaken += 1
            return False
        self._queue.discard(sequence)
        self._unplaced[sequence] = None
        sequence.enter(PhaseKind.QUEUED, f"waits for room for {room.shortage(wanted)}")
        return True

    def _place(self) -> None:
        """Queue the sequences again that there is room for, the first to wait first."""
        for sequence in tuple(self._unplaced):
            if not self._running_set.room.fits(sequence.request.extensions):
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
            pages = self._ledger.sides.shared(owner, beginning.pages)
            owner = self._claims.owner(keys[pages - 1]) if pages else None
            if owner is None:
                return False
            beginning = Beginning(owner, pages)
        self._queue.discard(sequence)
        self._claims.park(sequence, keys, beginning)
        tokens = beginning.pages * self._limits.page_size + beginning.tokens
        sequence.enter(
            PhaseKind.PREFIX,
            f"waits for request {beginning.owner.id}, which computes the first {tokens} tokens that both share",
        )
        return True

    def _wake(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.timeline.kind is not PhaseKind.PREEMPTED:
                sequence.timeline.enter(PhaseKind.QUEUED)
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
        fraction = sequence.tokens.generated / sequence.limit
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
        self._waiting: dict[Sequence, Status] = {}
        self._fetches: dict[Sequence, tuple[DiskFetch, ...]] = {}  # until admission: they hold their pages

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def loaded(self, sequence: Sequence) -> bool:
        """True if pages were read for the sequence, which is about to be admitted."""
        return bool(self._fetches.get(sequence))

    def start(self, sequence: Sequence) -> bool:
        """Start to read the sequence's pages from disk, if that pays. True if the sequence now waits for them."""
        if sequence in self._fetches or not self._ledger.may_fetch:
            return False
        fetches = self._fetches[sequence] = self._ledger.fetch(sequence)
        if fetches:
            self._waiting[sequence], sequence.status = sequence.status, Status.LOADING
        return bool(fetches)

    def ready(self) -> list[Sequence]:
        """Take out the sequences with all pages read, or with a hanging disk; the latter compute the missing pages."""
        loaded = [sequence for sequence in self._waiting if all(fetch.over for fetch in self._fetches[sequence])]
        for sequence in loaded:
            sequence.status = self._waiting.pop(sequence)
        return loaded

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that was admitted, and so holds its pages itself, or that ended."""
        self._waiting.pop(sequence, None)
        for fetch in self._fetches.pop(sequence, ()):
            fetch.release()


_WORTH_WAITING = 256  # tokens; saving that many is worth a wait even if more has to be computed afterwards

Place = tuple[int, bytes]  # the key of the page before, and the first tokens of a page


class Beginning(NamedTuple):
    """The beginning that a waiting sequence shares with a running one, `owner`, which computes the last of it."""

    owner: Sequence
    pages: int  # full ones, cached or being computed
    tokens: int = 0  # at the beginning of the next page


class PrefixClaims:
    """The prefixes that running sequences are computing, so that no other sequence computes the same pages again.

    A running sequence claims the pages it will compute; a waiting one is parked on the last one it would share.

    Full pages are shared by their keys. Of the next page at least `least` tokens may be shared, by a copy; none
    if `least` is 0.

    A claim ends when its page is published, its prompt is computed or its owner is preempted; sequences parked on it
    are tried again then.
    """

    def __init__(self, page_size: int, least: int = 0) -> None:
        self._page_size, self._least = page_size, least
        self._owners: dict[int, Sequence] = {}
        self._beginnings: dict[Place, list[Sequence]] = {}
        # By a page's key, or by its owner and its index if its beginning is shared; with the number of those tokens.
        self._parked: dict[int | tuple[Sequence, int], list[tuple[Sequence, int]]] = {}
        self.parked = 0  # sequences that wait, aborted ones excluded

    def claim(self, sequence: Sequence, start: int) -> None:
        """Claim the pages that the sequence computes, from page `start` on."""
        count = pages_for(sequence.epoch.target, self._page_size)
        for key in sequence.tokens.keys(sequence.epoch.target // self._page_size)[start:]:
            self._owners.setdefault(key, sequence)
        for place in self._places(sequence, start, count):
            self._beginnings.setdefault(place, []).append(sequence)
        sequence.tree.claimed = max(start, count)

    def resolve(self, sequence: Sequence, first: int, last: int) -> list[tuple[Sequence, int, int]]:
        """End the claims on pages [first, last), published or abandoned.

        Return the sequences parked on them, each with the page's index and how many tokens at its beginning it shares;
        0 if it shares the whole page.
        """
        woken: list[tuple[Sequence, int, int]] = []
        last = min(last, sequence.tree.claimed)
        if first >= last:
            return woken
        for place in self._places(sequence, first, last):
            self._beginnings[place].remove(sequence)
            if not self._beginnings[place]:
                del self._beginnings[place]
        full = min(last, sequence.epoch.target // self._page_size)
        for index, key in enumerate(sequence.tokens.keys(full)[first:], first):
            if self._owners.get(key) is sequence:
                del self._owners[key]
                woken += self._woken(key, index)
        if self._parked:
            for index in range(first, last):
                woken += self._woken((sequence, index), index)
        for waiter, _, _ in woken:
            waiter.queue.waits_for = None
        self.parked -= len(woken)
        return woken

    def worth_waiting(
        self, sequence: Sequence, keys: list[int], cached: int, *, there: int | None = None, copied: int = 0
    ) -> Beginning | None:
        """Return the longest beginning that is cached or being computed, if waiting for these pages pays; else None.

        `cached` pages can be used now, and `there` are on the device, if that is more. `copied` tokens after the
        cached ones can be copied now.

        Sharing a page or two of a long prompt does not pay: the wait costs the latency of steps, so it has to save at
        least half of what is left to compute, or 256 tokens.
        """
        shared, size = self.reach(keys, cached if there is None else there), self._page_size
        behind, tokens = self._behind(sequence, keys, shared)
        if tokens < self._least + (copied if shared == cached else 0):
            behind, tokens = None, 0
        saved = (shared - cached) * size + tokens - copied
        left = sequence.tokens.known - cached * size - copied
        if saved <= 0 or (saved < _WORTH_WAITING and 2 * saved < left):
            return None
        owner = self.owner(keys[shared - 1]) if behind is None else behind
        return None if owner is None else Beginning(owner, shared, tokens)

    def reach(self, keys: list[int], cached: int) -> int:
        """Return how many leading pages can be shared: `cached` ones, and the next ones that others compute."""
        shared, owners = cached, self._owners
        while shared < len(keys) and keys[shared] in owners:
            shared += 1
        return shared

    def owner(self, key: int) -> Sequence | None:
        """Return the sequence that computes the page with this key, if one does."""
        return self._owners.get(key)

    def park(self, sequence: Sequence, keys: list[int], beginning: Beginning) -> None:
        """Park a sequence until the last page of the beginning is published or computed; `keys` are its pages'."""
        owner, pages, tokens = beginning
        sequence.queue.waits_for = owner
        self._parked.setdefault((owner, pages) if tokens else keys[pages - 1], []).append((sequence, tokens))
        self.parked += 1

    def unpark(self, sequence: Sequence) -> None:
        """Take out a parked sequence that was aborted; its entry is skipped later."""
        sequence.queue.waits_for = None
        self.parked -= 1

    def expel(self, sequence: Sequence) -> list[Sequence]:
        """End a sequence's claims and waits, even if its counts are wrong. Return the sequences that waited for it."""
        if sequence.queue.waits_for is not None:
            self.unpark(sequence)
        sequence.tree.claimed = 0
        self._owners = {key: owner for key, owner in self._owners.items() if owner is not sequence}
        for place, owners in tuple(self._beginnings.items()):
            self._beginnings[place] = [owner for owner in owners if owner is not sequence]
            if not self._beginnings[place]:
                del self._beginnings[place]
        woken: list[Sequence] = []
        for page, group in tuple(self._parked.items()):
            if any(waiter.queue.waits_for is sequence for waiter, _ in group):
                del self._parked[page]
                woken += [waiter for waiter, _ in group if waiter.queue.waits_for is not None]
        for waiter in woken:
            waiter.queue.waits_for = None
        self.parked -= len(woken)
        return woken

    def check_integrity(self, running: list[Sequence]) -> None:
        beginning = [owner for owners in self._beginnings.values() for owner in owners]
        assert all(owner in running for owner in (*self._owners.values(), *beginning)), "a claim outlived its owner"
        for page in self._parked:
            claimed = page in self._owners if isinstance(page, int) else page[1] < page[0].tree.claimed
            assert claimed, "a sequence waits for a page that no sequence computes"
        waiting = sum(waiter.queue.waits_for is not None for group in self._parked.values() for waiter, _ in group)
        assert waiting == self.parked, f"{waiting} sequences are parked, {self.parked} are counted"

    def _woken(self, page: int | tuple[Sequence, int], index: int) -> list[tuple[Sequence, int, int]]:
        parked = self._parked.pop(page, ())
        return [(waiter, index, tokens) for waiter, tokens in parked if waiter.queue.waits_for is not None]

    def _places(self, sequence: Sequence, first: int, last: int) -> Iterator[Place]:
        """Yield the places of the pages [first, last) that the sequence computes enough of for a copy."""
        size, least = self._page_size, self._least
        if not least:
            return
        keys = sequence.tokens.keys(sequence.epoch.target // size)
        for index in range(first, last):
            start = index * size
            if start + least <= sequence.epoch.target:
                before = keys[index - 1] if index else sequence.namespace.key
                yield before, sequence.tokens.names(start, start + least).tobytes()

    def _behind(self, sequence: Sequence, keys: list[int], pages: int) -> tuple[Sequence | None, int]:
        """Return the running sequence that computes most of the tokens after the first `pages`, and their number."""
        start = pages * self._page_size
        stop = min(start + self._page_size, sequence.reusable, sequence.tokens.known - 1)
        best: tuple[Sequence | None, int] = None, 0
        least = self._least
        if not 0 < least <= stop - start:
            return best
        tokens = sequence.tokens.names(start, stop)
        before = keys[pages - 1] if pages else sequence.namespace.key
        for owner in self._beginnings.get((before, tokens[:least].tobytes()), ()):
            count = common(owner.tokens.names(start, min(stop, owner.epoch.target)), tokens)
            if count > best[1]:
                best = owner, count
        return best


class RunningSet:
    """The sequences that own a slot and pages: running ones, by seniority, and leaving ones.

    A sequence that ended or was preempted stops running at once, but its slot and pages are returned when no step in
    flight contains it any more: such a step still writes to them.
    """

    def __init__(
        self,
        slots: int,
        ledger: PageLedger,
        seniority: Callable[[Sequence], Rank],
        room: DeviceRoom | None = None,
        first: int = 0,
    ) -> None:
        """Number the slots from `first` on."""
        self.running: list[Sequence] = []  # the most senior first
        self.leaving: set[Sequence] = set()
        self._slots = range(first, first + slots)
        self._free = list(reversed(self._slots))
        self._ledger, self._seniority = ledger, seniority
        self.room = DeviceRoom() if room is None else room

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def holders(self) -> list[Sequence]:
        """All sequences that own a slot and pages, running or leaving."""
        return [*self.running, *self.leaving]

    def enter(self, sequence: Sequence, start: int) -> None:
        sequence.begin(self._free.pop(), start)
        self.room.take(sequence.request.extensions)
        bisect.insort(self.running, sequence, key=self._seniority)

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.leaving.add(sequence)
        self.drain(sequence)

    def drain(self, sequence: Sequence) -> None:
        """Return slot and pages of a leaving sequence, unless a step in flight still contains it."""
        if not sequence.epoch.in_flight and sequence in self.leaving:
            self.leaving.remove(sequence)
            self._free.append(sequence.epoch.slot)
            self.room.leave(sequence.request.extensions)
            self._ledger.release(sequence)

    def expel(self, sequence: Sequence) -> None:
        """Take out a sequence with broken bookkeeping; its pages are in quarantine.

        Its slot is free again, like others, once no step in flight contains it.
        """
        if sequence in self.running:
            self.running.remove(sequence)
        self.leaving.discard(sequence)
        if sequence.epoch.slot < 0:
            return
        if sequence.epoch.in_flight:
            self.leaving.add(sequence)
            return
        if sequence.epoch.slot not in self._free and all(
            other.epoch.slot != sequence.epoch.slot for other in self.holders
        ):
            self._free.append(sequence.epoch.slot)
            self.room.leave(sequence.request.extensions)
        sequence.leave()

    def check_integrity(self) -> None:
        slots = sorted([*self._free, *(sequence.epoch.slot for sequence in self.holders)])
        assert slots == list(self._slots), f"slots drifted: {slots}"
        assert all(sequence.epoch.in_flight for sequence in self.leaving), "a leaving sequence kept its slot"
        ranks = [self._seniority(sequence) for sequence in self.running]
        assert ranks == sorted(ranks), "the running sequences are out of order"
        self.room.check_integrity([sequence.request.extensions for sequence in self.holders])
