"""How many replicas a load asks for, by the sequences that live and the prompt tokens that wait."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from rekindle.errors import ConfigError

BUSY = 0.75  # of a replica's rows may be taken, so that the next burst finds room
AHEAD = 8  # steps full of prompt tokens may wait at each replica
MORE_SECONDS, FEWER_SECONDS = 2.0, 60.0  # for which a load has to ask for more, or fewer, before there are


class Range(NamedTuple):
    """How many replicas there may be."""

    least: int
    most: int

    @classmethod
    def of(cls, value: int | tuple[int, int]) -> Range:
        """The range that an option `replicas` stands for. Raises ConfigError for what is none."""
        pair = (value, value) if isinstance(value, int) else value
        numbers = isinstance(pair, tuple | list) and len(pair) == 2 and all(_whole(number) for number in pair)
        if not numbers or not 1 <= pair[0] <= pair[1]:
            problem = "is neither a whole number above 0 nor a pair of them, the smaller one first"
            raise ConfigError("replicas", value, problem, "Use 2, or (1, 4) for as many as the load asks for")
        return cls(*pair)

    def nearest(self, count: int) -> int:
        """The number in the range that is nearest to `count`."""
        return min(self.most, max(self.least, count))


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


class Demand(NamedTuple):
    """What a fleet has in hand."""

    sequences: int  # that live
    tokens: int  # of prompts that have given no token yet


class Room(NamedTuple):
    """What one replica computes in a step."""

    sequences: int
    tokens: int


def wanted(demand: Demand, room: Room) -> int:
    """How many replicas have room for that: one at least."""
    rows = demand.sequences / (BUSY * room.sequences)
    tokens = demand.tokens / (AHEAD * room.tokens)
    return max(1, math.ceil(max(rows, tokens)))


class Autoscaler:
    """Follows a load: quickly to more replicas, and slowly to fewer, since those that end lose their caches."""

    def __init__(self, size: Range, more: float = MORE_SECONDS, fewer: float = FEWER_SECONDS) -> None:
        self.size = size
        self._more, self._fewer = more, fewer
        self._seen: deque[tuple[float, int]] = deque()  # when, and how many replicas the load asked for

    def look(self, now: float, asked: int, replicas: int) -> int:
        """How many replicas there should be, where the load asks for `asked` now and there are `replicas`."""
        self._seen.append((now, asked))
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._fewer:
            self._seen.popleft()
        more, fewer = self._during(now, self._more), self._during(now, self._fewer)
        if more and min(more) > replicas:
            return self.size.nearest(min(more))
        if fewer and max(fewer) < replicas:
            return self.size.nearest(max(fewer))
        return self.size.nearest(replicas)

    def _during(self, now: float, seconds: float) -> list[int]:
        """What was asked for in the last `seconds`; nothing if that is not known for so long."""
        if self._seen[0][0] > now - seconds:
            return []
        before = [asked for at, asked in self._seen if at <= now - seconds]
        return [before[-1], *(asked for at, asked in self._seen if at > now - seconds)]
