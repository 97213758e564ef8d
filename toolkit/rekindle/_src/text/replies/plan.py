"""The settings of a chat's reply that are known before it begins, and the scanner for it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from rekindle._src.text.replies.format import ReplyFormat
from rekindle._src.text.replies.scanner import ReplyScanner


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyPlan:
    """The settings for reading the reply of one chat; each of its `n` sequences has a scanner."""

    format: ReplyFormat
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas; without them no calls are recognized
    continued: str | None = None  # the last message, if the reply goes on with it
    pieces: bool = False  # calls are emitted while they arrive

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that need a text, because the scanner reads them."""
        return self.format.markers(tools=bool(self.tools))

    def after(self, prompt: str, text: str) -> ReplyPlan:
        """Return the plan of a reply that continues `text`, the beginning of a reply to `prompt`."""
        before = self.continued
        if before is None:
            before = self.format.reasoning[0] if self.format.reasoning and self.format.opens_reasoning(prompt) else ""
        return dataclasses.replace(self, continued=before + text)

    def scanner(self, prompt: str, token_ids: bytes, seed: int | None) -> ReplyScanner:
        """Return the scanner for a reply to `prompt`. Its tokens and the seed decide the ids of calls."""
        key = hashlib.blake2b(token_ids, digest_size=32, person=b"tool calls")
        key.update(str(seed).encode())
        format, reasoning_open = self.format, self.format.opens_reasoning(prompt)
        if self.continued is not None:
            reasoning_open = format.reasoning is not None and is_open(self.continued, *format.reasoning)
            if self.continued.strip() and not reasoning_open:
                format = dataclasses.replace(format, reasoning=None)  # the place for reasoning is past
        return format.scanner(tools=self.tools, reasoning_open=reasoning_open, seed=key.digest(), pieces=self.pieces)


def is_open(text: str, opening: str, closing: str) -> bool:
    """True if `text` ends inside of these tags."""
    return text.rfind(opening) > text.rfind(closing)
