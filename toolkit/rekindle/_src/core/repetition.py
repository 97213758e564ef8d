"""Notices that a text repeats itself: the same block of tokens, several times in a row, at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rekindle._src.core import words
from rekindle._src.core.drawable import Record

WINDOW = 1024  # latest tokens that are looked at
LEAST_TIMES = 4
LEAST_TOKENS = 48  # of all repeats together: a row of dashes or a short refrain is no fault
_TAIL = 8  # tokens that must have come before, or nothing else is looked at


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Repetition(Record):
    """The end of a text that repeats itself: `times` times the same `length` tokens, from token `start` on."""

    start: int
    length: int
    times: int

    def __str__(self) -> str:
        return f"repeats itself: the same {words.count(self.length, 'token')} {self.times} times at the end"


def repetition(token_ids: Sequence[int]) -> Repetition | None:
    """Return how the end of a text repeats itself; None if it does not.

    It looks at the latest 1,024 tokens, in linear time: blocks of up to 256 tokens are found.
    """
    start = max(0, len(token_ids) - WINDOW)
    tokens = np.asarray(token_ids[start:], np.int64)
    count = len(tokens)
    if count < LEAST_TOKENS:
        return None
    data = tokens.tobytes()
    # Most texts end here: their last words are new.
    if data.rfind(data[-_TAIL * tokens.itemsize :], 0, len(data) - tokens.itemsize) < 0:
        return None
    backwards = tokens[::-1].tolist()
    # borders[i]: the longest beginning of the first i + 1 tokens that is also their end (Knuth, Morris, Pratt)
    borders, length, best = [0] * count, 0, (0, 0)
    for index in range(1, count):
        while length and backwards[index] != backwards[length]:
            length = borders[length - 1]
        length += backwards[index] == backwards[length]
        borders[index] = length
        size = index + 1
        period = size - length
        if size >= LEAST_TOKENS and size >= LEAST_TIMES * period:
            best = size, period
    size, period = best
    if not size:
        return None
    times = size // period
    return Repetition(len(token_ids) - times * period, period, times)
