"""The sequences that own a slot and pages: those that run, by seniority, and those that are leaving."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from rekindle._src.scheduling.adapter_slots import AdapterSlots
from rekindle._src.scheduling.page_ledger import PageLedger
from rekindle._src.scheduling.policies import Rank
from rekindle._src.scheduling.sequence import Sequence


class RunningSet:
    """Slots and the sequences in them.

    A sequence that ended or was preempted stops running at once, but its slot and pages are returned when no step in
    flight contains it any more: such a step still writes to them.
    """

    def __init__(
        self,
        slots: int,
        ledger: PageLedger,
        seniority: Callable[[Sequence], Rank],
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.running: list[Sequence] = []  # the most senior first
        self.leaving: set[Sequence] = set()
        self._slots, self._first = slots, 0
        self._free = list(range(slots - 1, -1, -1))
        self._ledger, self._seniority = ledger, seniority
        self.adapters = AdapterSlots() if adapters is None else adapters

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def holders(self) -> list[Sequence]:
        """All sequences that own a slot and pages, running or leaving."""
        return [*self.running, *self.leaving]

    def number_from(self, first: int) -> None:
        """Number the slots from `first` on, before the first one is taken."""
        assert len(self._free) == self._slots, "slots are numbered while some are taken"
        self._first = first
        self._free = [first + slot for slot in self._free]

    def enter(self, sequence: Sequence, start: int) -> None:
        sequence.begin(self._free.pop(), start)
        if sequence.request.adapter is not None:
            self.adapters.take(sequence.request.adapter)
        bisect.insort(self.running, sequence, key=self._seniority)

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.leaving.add(sequence)
        self.drain(sequence)

    def drain(self, sequence: Sequence) -> None:
        """Return slot and pages of a leaving sequence, unless a step in flight still contains it."""
        if not sequence.in_flight and sequence in self.leaving:
            self.leaving.remove(sequence)
            self._free.append(sequence.slot)
            if sequence.request.adapter is not None:
                self.adapters.leave(sequence.request.adapter)
            self._ledger.release(sequence)

    def check_integrity(self) -> None:
        slots = sorted([*self._free, *(sequence.slot for sequence in self.holders)])
        assert slots == list(range(self._first, self._first + self._slots)), f"slots drifted: {slots}"
        assert all(sequence.in_flight for sequence in self.leaving), "a leaving sequence kept its slot"
        ranks = [self._seniority(sequence) for sequence in self.running]
        assert ranks == sorted(ranks), "the running sequences are out of order"
        adapters = [sequence.request.adapter for sequence in self.holders]
        self.adapters.check_integrity([adapter for adapter in adapters if adapter is not None])
