"""The contract of a guide: what says, token by token, how the text of one request may go on.

A grammar is compiled once and gives each sequence a guide of its own, which follows the tokens of that sequence. The
scheduler keeps it with the sequence. Only the device's thread asks it and moves it on: it fills a step's mask when
the tokens of the step before have been read, which is before the scheduler learns of them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]  # one bit for each token of the vocabulary, the lowest bit first: 1 allows it


def mask_words(vocab: int) -> int:
    """Length of a mask in integers of 32 bits."""
    return -(-vocab // 32)


class Guided(NamedTuple):
    """What a guide says to a token that it took."""

    forced: bool = False  # no other text could have come
    ended: bool = False  # nothing may follow
    by_eos: bool = False  # it ended with the model's end of sequence
    accepting: bool = False  # the text so far is complete, whether or not more may follow
    ahead: tuple[int, ...] = ()  # tokens that have to follow, in the tokenizer's usual spelling
    problem: str = ""  # why it can't go on
    steered: bool = False  # something that it allows was taken away to end the text in time
    searched: float = 0.0  # seconds of a processor in which an end was looked for, before this token
    due: float = 0.0  # seconds that it is likely to look for an end before one of the next tokens
    seconds: float = 0.0  # of a processor, for its mask and for moving on; `searched` is a part of them


class GuideLike(Protocol):
    """Follows the text of one sequence."""

    spent: float  # seconds of a processor since it last took a token; counted by its caller

    @property
    def consumed(self) -> int:
        """How many of the sequence's own tokens it has taken."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        ...

    def fill(self, mask: Mask) -> str:
        """Write which tokens may come next; returns why none may, or an empty string."""
        ...

    def consume(self, token: int) -> Guided:
        """Move on by one token."""
        ...

    def copy(self) -> GuideLike:
        """Another one in the same place, for another sequence, or to look ahead."""
        ...
