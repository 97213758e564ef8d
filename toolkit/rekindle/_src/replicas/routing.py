"""Routers: pure functions from a request's keys and the replicas' loads to the replica for the request.

Affinity has no state: rendezvous hashing gives a conversation one of a few replicas of its system prompt, unless that
one has too many requests. In a simulation of 64 replicas, 81 % of prompt tokens were cached with it, 27 % with round
robin, and 67 % with an exact index of each replica's pages; `rekindle simulate` has the scenario.

Equal arguments give equal results in every process. If a replica goes, only its own conversations move.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

from rekindle.errors import ConfigError

RouterName = Literal["affinity", "round-robin", "shortest"]
BOUND = 1.25  # times the mean load: affinity's limit for a replica
LEAST = 2  # requests that a replica may always have, so that a nearly idle fleet keeps its conversations together
SPREAD = 4  # replicas of one system prompt at most; half of a smaller fleet


class Keys(NamedTuple):
    """Digests that are equal for requests with the same beginning."""

    opening: bytes  # of their system prompt
    conversation: bytes  # of the messages that stay the same while the conversation goes on


class Load(NamedTuple):
    """The load of a replica."""

    name: str
    running: int  # sequences that were sent to it and have not ended
    places: int  # sequences that it has room for

    @property
    def full(self) -> bool:
        return self.running >= self.places


class Route(NamedTuple):
    """The replica for a request, and the reason."""

    name: str
    why: str


class Router(Protocol):
    """A policy that chooses a replica for each request."""

    def choose(self, keys: Keys, loads: Sequence[Load]) -> Route | None:
        """Return the replica for a request, or None if all are full. `loads` may be in any order."""
        ...


def rendezvous(key: bytes, names: Iterable[str]) -> list[str]:
    """Return names in the order of `key`'s preference. If a name goes, the others keep their order."""

    digest = hashlib.blake2b(key, digest_size=16).digest()

    def weight(name: str) -> tuple[bytes, str]:
        return hashlib.blake2b(name.encode(), key=digest, digest_size=16).digest(), name

    return sorted(names, key=weight)


def most(loads: Sequence[Load], bound: float = BOUND, least: int = LEAST) -> int:
    """Return affinity's limit on a replica's requests, including the next one."""
    total = 1 + sum(load.running for load in loads)
    return max(least, math.ceil(bound * total / len(loads)))


def affinity(
    keys: Keys, loads: Sequence[Load], *, spread: int | None = None, bound: float = BOUND, least: int = LEAST
) -> Route | None:
    """Return the conversation's choice among `spread` replicas of the system prompt, if its load is within the bound.

    Otherwise return the next one in the order of the conversation, then of the system prompt.
    """
    if not loads:
        return None
    by_name = {load.name: load for load in loads}
    ranked = rendezvous(keys.opening, by_name)
    candidates = ranked[: spread or min(SPREAD, -(-len(loads) // 2))]
    order = [*rendezvous(keys.conversation, candidates), *ranked[len(candidates) :]]
    limit = most(loads, bound, least)
    for place, name in enumerate(order):
        load = by_name[name]
        if load.running < limit and not load.full:
            if place == 0:
                return Route(name, "the conversation's own replica")
            description = "another replica" if place < len(candidates) else "a replica beyond those"
            preferred = by_name[order[0]].running
            return Route(
                name, f"{description} of its system prompt: {order[0]} has {preferred} requests and {limit} may be"
            )
    route = shortest(loads)  # all replicas within the bound are full
    return None if route is None else Route(route.name, "every replica within the bound is full")


def shortest(loads: Sequence[Load]) -> Route | None:
    """Return the replica with the fewest requests; of equals, the first by name."""
    free = [load for load in loads if not load.full]
    if not free:
        return None
    best = min(free, key=lambda load: (load.running, load.name))
    return Route(best.name, f"it has the fewest requests, {best.running}")


def round_robin(last: str, loads: Sequence[Load]) -> Route | None:
    """Return the replica that follows `last` by name, in a circle. Skip full ones."""
    names = sorted(load.name for load in loads if not load.full)
    if not names:
        return None
    following = [name for name in names if name > last]
    return Route(following[0] if following else names[0], "its turn")


class Affinity:
    """The router `affinity`."""

    def choose(self, keys: Keys, loads: Sequence[Load]) -> Route | None:
        return affinity(keys, loads)


class Shortest:
    """The router `shortest`."""

    def choose(self, keys: Keys, loads: Sequence[Load]) -> Route | None:
        return shortest(loads)


class RoundRobin:
    """The router `round-robin`. It remembers only the last replica."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, keys: Keys, loads: Sequence[Load]) -> Route | None:
        route = round_robin(self._last, loads)
        if route is not None:
            self._last = route.name
        return route


def router(name: str) -> Router:
    """Return the router of this name. Raise `ConfigError` for an unknown one."""
    match name:
        case "affinity":
            return Affinity()
        case "round-robin":
            return RoundRobin()
        case "shortest":
            return Shortest()
        case _:
            known = ", ".join(map(repr, get_args(RouterName)))
            raise ConfigError("router", name, "is not known", f"Use one of {known}")
