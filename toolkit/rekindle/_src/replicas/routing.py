"""Routers: pure functions from a request's keys and the replicas' loads to the replica for the request.

Affinity has no state: rendezvous hashing gives a conversation one of a few replicas of its system prompt, unless that
one has too many requests. In a simulation of 64 replicas, 81 % of prompt tokens were cached with it, 27 % with round
robin, and 67 % with an exact index of each replica's pages; `rekindle simulate` has the scenario.

Equal arguments give equal results in every process. If a replica goes, only its own conversations move.

Replicas may have roles: some compute prompts, and others continue them, so long prompts don't delay streams.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from rekindle.errors import ConfigError

if TYPE_CHECKING:
    # It imports numpy, a tenth of a second that a command line has not.
    from rekindle._src.core.records import IntArray, Request

RouterName = Literal["affinity", "round-robin", "shortest"]
BOUND = 1.25  # times the mean load: affinity's limit for a replica
LEAST = 2  # requests that a replica may always have, so that a nearly idle fleet keeps its conversations together
SPREAD = 4  # replicas of one system prompt at most; half of a smaller fleet


class AffinityKeys(NamedTuple):
    """Digests that are equal for requests with the same beginning."""

    opening: bytes  # of their system prompt
    conversation: bytes  # of the messages that stay the same while the conversation goes on


class Load(NamedTuple):
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

    def choose(self, keys: AffinityKeys, loads: Sequence[Load]) -> Route | None:
        """Return the replica for a request, or None if all are full. `loads` may be in any order."""
        ...


def rendezvous(key: bytes, names: Iterable[str]) -> list[str]:
    """Return names in the order of `key`'s preference. If a name goes, the others keep their order."""

    digest = hashlib.blake2b(key, digest_size=16).digest()

    def weight(name: str) -> tuple[bytes, str]:
        return hashlib.blake2b(name.encode(), key=digest, digest_size=16).digest(), name

    return sorted(names, key=weight)


def most(loads: Sequence[Load]) -> int:
    """Return affinity's limit on a replica's requests, including the next one."""
    total = 1 + sum(load.running for load in loads)
    return max(LEAST, math.ceil(BOUND * total / len(loads)))


def affinity(keys: AffinityKeys, loads: Sequence[Load], *, spread: int | None = None) -> Route | None:
    """Return the conversation's choice among `spread` replicas of the system prompt, if its load is within the bound.

    Otherwise return the next one in the order of the conversation, then of the system prompt.
    """
    if not loads:
        return None
    by_name = {load.name: load for load in loads}
    ranked = rendezvous(keys.opening, by_name)
    candidates = ranked[: spread or min(SPREAD, -(-len(loads) // 2))]
    order = [*rendezvous(keys.conversation, candidates), *ranked[len(candidates) :]]
    limit = most(loads)
    for place, name in enumerate(order):
        load = by_name[name]
        if load.running < limit and not load.full:
            if place == 0:
                return Route(name, "the conversation's own replica")
            description = "another replica" if place < len(candidates) else "a replica beyond those"
            preferred = by_name[order[0]].running
            why = f"{order[0]} has {preferred} requests and {limit} may be"
            return Route(name, f"{description} of its system prompt: {why}")
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


class Pure:
    """A router without state, by its function."""

    def __init__(self, choose: Callable[[AffinityKeys, Sequence[Load]], Route | None]) -> None:
        self.choose = choose


class RoundRobin:
    """The router `round-robin`. It remembers only the last replica."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, keys: AffinityKeys, loads: Sequence[Load]) -> Route | None:
        route = round_robin(self._last, loads)
        if route is not None:
            self._last = route.name
        return route


def router(name: str) -> Router:
    """Return the router of this name. Raise `ConfigError` for an unknown one."""
    match name:
        case "affinity":
            return Pure(affinity)
        case "round-robin":
            return RoundRobin()
        case "shortest":
            return Pure(lambda keys, loads: shortest(loads))
        case _:
            known = ", ".join(map(repr, get_args(RouterName)))
            raise ConfigError("router", name, "is not known", f"Use one of {known}")


# For a prompt that is no chat. If two prompts share more than OPENING_TOKENS, that beginning counts as a system prompt.
OPENING_TOKENS = 64
CONVERSATION_TOKENS = 256
MOST_CHARACTERS = 1 << 16  # of a message's text in the digest, so that long messages don't delay others
MOST_PARTS = 64  # of a message's content in the digest


def keys_of_messages(messages: Sequence[Mapping[str, Any]], salt: str | None = None) -> AffinityKeys:
    """Return the keys of a chat: of its system message, and of that with the user's first message.

    Chats without a system message have nothing in common, so they are spread over all replicas.
    """
    system = 0
    while system < len(messages) and messages[system].get("role") in ("system", "developer"):
        system += 1
    first = next(
        (index for index, message in enumerate(messages) if message.get("role") == "user"),
        max(system, len(messages) - 1),
    )
    conversation = _digest(messages[: first + 1], salt)
    return AffinityKeys(_digest(messages[:system], salt) if system else conversation, conversation)


def keys_of_tokens(tokens: IntArray, salt: str | None = None) -> AffinityKeys:
    """Return the keys of any other prompt: of its first tokens."""
    conversation = _salted(tokens[:CONVERSATION_TOKENS].tobytes(), salt)
    opening = _salted(tokens[:OPENING_TOKENS].tobytes(), salt) if len(tokens) > OPENING_TOKENS else conversation
    return AffinityKeys(opening, conversation)


def _digest(messages: Sequence[Mapping[str, Any]], salt: str | None) -> bytes:
    """Return the digest of roles and texts. A message's other fields say little about common beginnings."""
    state = _hashed(salt)
    for message in messages:
        for text in (message.get("role"), *_texts(message.get("content"))):
            data = text[:MOST_CHARACTERS].encode("utf-8", "surrogatepass") if isinstance(text, str) else b""
            state.update(len(data).to_bytes(4, "little") + data)
    return state.digest()


def _texts(content: Any) -> Iterator[Any]:
    if isinstance(content, list | tuple):
        yield from (part.get("text") if isinstance(part, Mapping) else part for part in content[:MOST_PARTS])
    else:
        yield content


def _salted(data: bytes, salt: str | None) -> bytes:
    state = _hashed(salt)
    state.update(data)
    return state.digest()


def _hashed(salt: str | None) -> Any:
    key = hashlib.blake2b((salt or "").encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return hashlib.blake2b(digest_size=16, key=key)


Role = Literal["both", "prefill", "decode"]
SHORT = 64  # tokens; a shorter prompt is not worth two replicas
_FIX = 'Pass {"prefill": 1, "decode": 2}, or leave it out: replicas then do both'


def roles_of(roles: Mapping[Literal["prefill", "decode"], int] | None, replicas: int | None) -> tuple[Role, ...]:
    """Return the role of each replica, prefill first. Raise ConfigError if the options make no fleet."""
    if roles is not None and (not isinstance(roles, Mapping) or set(roles) != {"prefill", "decode"}):
        raise ConfigError("roles", roles, "does not say how many replicas prefill and how many decode", _FIX)
    for option, value in (("replicas", replicas), *(roles or {}).items()):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(option, value, "is not a whole number above 0", "Use 2")
    if roles is None:
        return _of("both", 2 if replicas is None else replicas)
    if replicas is not None and replicas != sum(roles.values()):
        raise ConfigError("replicas", replicas, f"is not the sum of roles={dict(roles)}", "Leave one of them out")
    return _of("prefill", roles["prefill"]) + _of("decode", roles["decode"])


def _of(role: Role, count: int) -> tuple[Role, ...]:
    return (role,) * count


def goes_two_ways(request: Request, longest: int) -> bool:
    """True if one replica computes the prompt and another one the answer, in a fleet with roles.

    False if one of the two has next to no work, or if the answer may end with its first token for a reason that only
    the whole request shows.
    """
    sampling = request.sampling
    long_prompt = request.generates and request.resumed is None and request.prompt_length >= SHORT
    more_tokens = sampling.max_tokens > 1 and request.prompt_length + 2 <= longest
    return (
        long_prompt
        and more_tokens
        and (sampling.min_tokens < 2 or not any(one.ends_itself for one in request.extensions.values()))
    )


def prompt_only(request: Request) -> Request:
    """Return the part of a request for the replica that computes its prompt: up to the first token."""
    sampling = request.sampling
    changes: dict[str, Any] = {"max_tokens": 1, "min_tokens": min(1, sampling.min_tokens)}
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, **changes))
