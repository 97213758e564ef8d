"""Ends of texts by a function of the caller's, and where the latest tokens repeat themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rekindle._src.text.detokenizer import Detokenizer, FinalText

LONGEST_BLOCK = 64  # tokens of a repeated block
LEAST_REPEATED = 32  # tokens of all repetitions together: rules, spaces and tables repeat shorter ones
UNTIL, REPEATS = "until", "repeats"  # the stop reasons
Until = Callable[[str, Sequence[int]], bool]


class RepeatDetector:
    """Finds a block of tokens that came several times in a row, at a fixed cost for each token."""

    def __init__(self, times: int) -> None:
        """`times` is how often the block has to come."""
        blocks = np.arange(1, LONGEST_BLOCK + 1)
        self._needed = np.maximum(blocks * (times - 1), LEAST_REPEATED - blocks)
        self._latest = np.full(LONGEST_BLOCK, -1)  # the newest first
        self._runs = np.zeros(LONGEST_BLOCK, np.int64)  # latest tokens that equal those a block before, by its length

    def push(self, token_id: int) -> bool:
        """Add a token. True if it ends such a repetition."""
        self._runs = np.where(self._latest == token_id, self._runs + 1, 0)
        self._latest[1:] = self._latest[:-1].copy()
        self._latest[0] = token_id
        return bool((self._runs >= self._needed).any())


class WatchedText:
    """A detokenizer that ends its text once `until` returns True, or once the latest tokens repeat themselves.

    Both look after each token, so the end does not depend on how tokens were grouped into pushes.
    """

    def __init__(self, inner: Detokenizer, *, until: Until | None, repeats: int, min_tokens: int = 0) -> None:
        """Watch the text of `inner`. With `repeats`, a block that comes so often in a row ends it."""
        self._inner, self._until, self._min_tokens = inner, until, min_tokens
        self._repetition = RepeatDetector(repeats) if repeats else None
        self._tokens: list[int] = []
        self._text = ""
        self.stopped: str | None = None
        self.tokens = 0  # pushed so far, except those after the end
        self.released = 0  # of them, with fully delivered text
        self.ends = inner.ends

    def push(self, token_ids: Sequence[int]) -> FinalText:
        """Decode the next tokens. After an end, tokens are ignored and no more text is returned."""
        before = len(self._text)
        for token_id in token_ids:
            if self.stopped is not None:
                break
            text, self.stopped = self._inner.push([token_id])
            self._text += text
            self._tokens.append(token_id)
            if self.stopped is None and (reason := self._end(token_id)) is not None:
                self._text += self._inner.flush()
                self.stopped = self._inner.stopped or reason
        self.tokens, self.released = self._inner.tokens, self._inner.released
        return FinalText(self._text[before:], self.stopped)

    def flush(self) -> str:
        """Return the remaining text, when no token follows. It may complete a stop string: see `stopped`."""
        if self.stopped is not None:
            return ""
        text = self._inner.flush()
        self.stopped, self.released = self._inner.stopped, self._inner.released
        return text

    def _end(self, token_id: int) -> str | None:
        """Return why the text ends with its latest token; None if it goes on."""
        repeats = self._repetition is not None and self._repetition.push(token_id)
        if self._inner.tokens <= self._min_tokens:
            return None
        if self._until is not None and self._until(self._text, self._tokens):
            return UNTIL
        return REPEATS if repeats else None
