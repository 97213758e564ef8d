"""The contract of a guide, which decides token by token how the text of one request may go on.

A grammar is compiled once and gives each sequence its own guide, which follows the tokens of that sequence. The
scheduler keeps it with the sequence. Only the device's thread reads it and moves it on: it fills a step's mask once
the tokens of the step before have been read, which is before the scheduler learns of them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]  # one bit for each token of the vocabulary, the lowest bit first: 1 allows it


def mask_words(vocab: int) -> int:
    """Return the length of a mask in integers of 32 bits."""
    return -(-vocab // 32)


class Guided(NamedTuple):
    """The report of a guide on a token that it took."""

    forced: bool = False  # no other text could have come
    ended: bool = False  # no token may follow
    by_eos: bool = False  # it ended with the model's end of sequence
    accepting: bool = False  # the text so far is complete, even if more may follow
    ahead: tuple[int, ...] = ()  # tokens that must follow, in the tokenizer's usual spelling
    problem: str = ""  # the reason why it can't go on
    steered: bool = False  # some allowed tokens were masked to end the text in time
    searched: float = 0.0  # CPU seconds of the search for an end, before this token
    due: float = 0.0  # expected seconds of the search for an end before one of the next tokens
    seconds: float = 0.0  # CPU seconds for its mask and for moving on, `searched` included


class GuideLike(Protocol):
    """Follows the text of one sequence."""

    spent: float  # CPU seconds since it last took a token, counted by its caller

    @property
    def consumed(self) -> int:
        """The number of the sequence's own tokens that it has taken."""
        ...

    @property
    def ended(self) -> bool:
        """True if no token may follow."""
        ...

    def fill(self, mask: Mask) -> str:
        """Write the tokens that may come next; return the reason if there are none, else an empty string."""
        ...

    def consume(self, token: int) -> Guided:
        """Move on by one token."""
        ...

    def copy(self) -> GuideLike:
        """Return another guide in the same place, for another sequence, or to look ahead."""
        ...
