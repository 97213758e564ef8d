"""Roles of replicas: some compute prompts, others go on from there, so that long prompts don't make streams wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rekindle._src.core.records import Request
from rekindle.errors import ConfigError

Role = Literal["both", "prefill", "decode"]
SHORT = 64  # tokens of a prompt that is not worth the way through two replicas
_FIX = 'Pass {"prefill": 1, "decode": 2}, or leave it out: replicas then do both'


def roles_of(roles: Mapping[Literal["prefill", "decode"], int] | None, replicas: int | None) -> tuple[Role, ...]:
    """The role of each replica, those that compute prompts first. Raises ConfigError for what makes no fleet."""
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
    """Whether a prompt is computed in one replica and its answer in another, where there are roles.

    Not if one of the two has next to nothing to do, nor if the answer may be over with its first token in a way that
    only the whole request can tell.
    """
    asked = request.sampling
    enough = request.pooling is None and request.resumed is None and request.prompt_length >= SHORT
    room = asked.max_tokens > 1 and request.prompt_length + 2 <= longest
    return enough and room and (request.guide is None or asked.min_tokens < 2)


def prompt_only(request: Request) -> Request:
    """The part of a request for the replica that computes its prompt: up to the first token."""
    asked = request.sampling
    changes: dict[str, Any] = {"max_tokens": 1, "min_tokens": min(1, asked.min_tokens)}
    return dataclasses.replace(request, sampling=dataclasses.replace(asked, **changes))
