"""The keys of a request for a router: what its conversation and its system prompt have in common with others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle._src.core.records import IntArray
from rekindle._src.replicas.routing import Keys

# Of a prompt that is no chat. What two prompts share beyond that many tokens counts as a system prompt.
OPENING_TOKENS = 64
CONVERSATION_TOKENS = 256


def keys_of_messages(messages: Sequence[Mapping[str, Any]], salt: str | None = None) -> Keys:
    """Of a chat: its system message, and that with the first message of the user.

    Chats without a system message have nothing in common, so that they are spread over all replicas.
    """
    system = 0
    while system < len(messages) and messages[system].get("role") in ("system", "developer"):
        system += 1
    first = next(
        (at for at, message in enumerate(messages) if message.get("role") == "user"), max(system, len(messages) - 1)
    )
    conversation = _digest(messages[: first + 1], salt)
    return Keys(_digest(messages[:system], salt) if system else conversation, conversation)


def keys_of_tokens(tokens: IntArray, salt: str | None = None) -> Keys:
    """Of any other prompt: its first tokens."""
    conversation = _salted(tokens[:CONVERSATION_TOKENS].tobytes(), salt)
    opening = _salted(tokens[:OPENING_TOKENS].tobytes(), salt) if len(tokens) > OPENING_TOKENS else conversation
    return Keys(opening, conversation)


def _digest(messages: Sequence[Mapping[str, Any]], salt: str | None) -> bytes:
    return _salted(json.dumps([dict(message) for message in messages], sort_keys=True, default=str).encode(), salt)


def _salted(data: bytes, salt: str | None) -> bytes:
    key = hashlib.blake2b((salt or "").encode(), digest_size=16).digest()
    return hashlib.blake2b(data, digest_size=16, key=key).digest()
