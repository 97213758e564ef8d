"""The reserve: pages that admission keeps back for tokens that running sequences have yet to generate."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle._src.scheduling.sequence import Sequence

_FLOOR = 0.05


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
        return sum(sequence.growth(self.fraction) for sequence in sequences)
