"""The number of replicas for a load: live sequences and waiting prompt tokens."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from rekindle.errors import ConfigError

BUSY = 0.75  # share of a replica's rows in use, so that the next burst has room
AHEAD = 8  # steps' worth of prompt tokens that may wait for each replica
MORE_SECONDS, FEWER_SECONDS = 2.0, 60.0  # seconds of demand before replicas are added, or removed


class Range(NamedTuple):
    """A range of numbers of replicas, both ends included."""

    least: int
    most: int

    @classmethod
    def of(cls, value: int | tuple[int, int]) -> Range:
        """Return the range of an option `replicas`. Raise ConfigError if it has none."""
        pair = (value, value) if isinstance(value, int) else value
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and all(_whole(number) for number in pair)
        if not is_pair or not 1 <= pair[0] <= pair[1]:
            problem = "is neither a whole number above 0 nor a pair of them, the smaller one first"
            raise ConfigError("replicas", value, problem, "Use 2, or (1, 4) for as many as the load asks for")
        return cls(*pair)

    def nearest(self, count: int) -> int:
        """Return the number in the range nearest to `count`."""
        return min(self.most, max(self.least, count))


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


class FleetLoad(NamedTuple):
    sequences: int  # live ones
    tokens: int  # of prompts without a token yet


class Room(NamedTuple):
    """The capacity of one replica's step."""

    sequences: int
    tokens: int


def replicas_for(demand: FleetLoad, room: Room) -> int:
    """Return the number of replicas with room for a demand, at least 1."""
    rows = demand.sequences / (BUSY * room.sequences)
    tokens = demand.tokens / (AHEAD * room.tokens)
    return max(1, math.ceil(max(rows, tokens)))


class Autoscaler:
    """Follows a load: quickly to more replicas, slowly to fewer, since removed replicas lose their caches."""

    def __init__(self, size: Range, more: float = MORE_SECONDS, fewer: float = FEWER_SECONDS) -> None:
        self.size = size
        self._more, self._fewer = more, fewer
        self._demands: deque[tuple[float, int]] = deque()  # pairs of time and demanded replicas

    def look(self, now: float, demand: int, replicas: int) -> int:
        """Return the number of replicas to have. The load demands `demand` replicas now, and there are `replicas`."""
        self._demands.append((now, demand))
        while len(self._demands) > 1 and self._demands[1][0] <= now - self._fewer:
            self._demands.popleft()
        more, fewer = self._during(now, self._more), self._during(now, self._fewer)
        if more and min(more) > replicas:
            return self.size.nearest(min(more))
        if fewer and max(fewer) < replicas:
            return self.size.nearest(max(fewer))
        return self.size.nearest(replicas)

    def _during(self, now: float, seconds: float) -> list[int]:
        """Return the demands of the last `seconds`; empty if the record is shorter."""
        if self._demands[0][0] > now - seconds:
            return []
        earlier = [demand for at, demand in self._demands if at <= now - seconds]
        return [earlier[-1], *(demand for at, demand in self._demands if at > now - seconds)]
