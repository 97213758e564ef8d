"""Roles of replicas: some compute prompts, and others continue them, so long prompts don't delay streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rekindle._src.core.records import Request
from rekindle.errors import ConfigError

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
    long_prompt = request.pooling is None and request.resumed is None and request.prompt_length >= SHORT
    more_tokens = sampling.max_tokens > 1 and request.prompt_length + 2 <= longest
    return long_prompt and more_tokens and (request.guide is None or sampling.min_tokens < 2)


def prompt_only(request: Request) -> Request:
    """Return the part of a request for the replica that computes its prompt: up to the first token."""
    sampling = request.sampling
    changes: dict[str, Any] = {"max_tokens": 1, "min_tokens": min(1, sampling.min_tokens)}
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, **changes))
