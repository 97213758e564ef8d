"""The policy `sjf`: the request with the fewest tokens left to prefill goes first, and waiting requests age.

Short prompts, such as the next turn of a chat whose history is cached, are then not held up by a flood of long ones:
short prompts are admitted first, and get the budget of a step before a long prompt that is half computed.

Age is counted in work and not in time: AGEING tokens that were admitted since a request was queued count as one token
less to prefill. So a request with U tokens left goes before every request that is queued after AGEING * U more tokens
were admitted, and none starves.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle._src.scheduling.policies import Rank
from rekindle._src.scheduling.sequence import Sequence

# Admitted tokens that make up for one token of prefill. While a flood of 50 prompts is computed, chats that arrive stay
# ahead of the rest of it; a larger number lets a steady stream of short prompts hold up a long one for longer.
AGEING = 64


class ShortestFirst:
    """Ranks of waiting and prefilling sequences; the smallest goes first."""

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
