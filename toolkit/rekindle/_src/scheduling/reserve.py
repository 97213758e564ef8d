"""How many pages admission keeps back for what running sequences are still going to generate."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle._src.scheduling.sequence import Sequence

_FLOOR = 0.05


class Reserve:
    """Learns which fraction of `max_tokens` requests use, instead of setting all of it aside.

    Each finished request moves the fraction towards what it used, each preemption moves it up at once. Setting aside
    too little costs a preemption, which recomputes at most the unpublished tail; too much leaves slots empty.
    """

    def __init__(self, fraction: float = 0.4) -> None:
        self.fraction = fraction

    def finished(self, sequence: Sequence) -> None:
        used = sequence.generated / sequence.limit
        self.fraction = max(_FLOOR, self.fraction + 0.1 * (used - self.fraction))

    def preempted(self) -> None:
        self.fraction = min(1.0, self.fraction + 0.2)

    def pages(self, sequences: Iterable[Sequence]) -> int:
        return sum(sequence.growth(self.fraction) for sequence in sequences)
