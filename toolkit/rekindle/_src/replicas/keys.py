"""A request's keys for a router: digests of its conversation's beginning and of its system prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle._src.core.records import IntArray
from rekindle._src.replicas.routing import Keys

# For a prompt that is no chat. If two prompts share more than OPENING_TOKENS, that beginning counts as a system prompt.
OPENING_TOKENS = 64
CONVERSATION_TOKENS = 256
MOST_CHARACTERS = 1 << 16  # of a message's text in the digest, so that long messages don't delay others
MOST_PARTS = 64  # of a message's content in the digest


def keys_of_messages(messages: Sequence[Mapping[str, Any]], salt: str | None = None) -> Keys:
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
    return Keys(_digest(messages[:system], salt) if system else conversation, conversation)


def keys_of_tokens(tokens: IntArray, salt: str | None = None) -> Keys:
    """Return the keys of any other prompt: of its first tokens."""
    conversation = _salted(tokens[:CONVERSATION_TOKENS].tobytes(), salt)
    opening = _salted(tokens[:OPENING_TOKENS].tobytes(), salt) if len(tokens) > OPENING_TOKENS else conversation
    return Keys(opening, conversation)


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
