"""Guides without llguidance: which tokens may come is a function of the position and the token before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rekindle._src.core.records import GuideReport, Mask

Rule = Callable[[int, int], Sequence[int]]  # position, token before (-1 at first) → the tokens that may come


@dataclasses.dataclass
class RuleGuide:
    """Allows what `rule` gives; ends after `length` tokens. `wrong` are tokens that it forces in another spelling."""

    rule: Rule
    length: int = 1 << 30
    consumed: int = 0
    ended: bool = False
    last: int = -1
    spent: float = 0.0
    fails_at: int = -1  # position at which it can't go on
    history: list[int] = dataclasses.field(default_factory=list)

    def fill(self, mask: Mask) -> str:
        assert not self.ended, "an ended guide was asked"
        if self.consumed == self.fails_at:
            return "it was told to fail"
        mask[:] = 0
        for token in self.rule(self.consumed, self.last):
            mask[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).view(np.int32))
        return ""

    def consume(self, token: int) -> GuideReport:
        allowed = self.rule(self.consumed, self.last)
        self.consumed, self.last = self.consumed + 1, token
        self.history.append(token)
        if token not in allowed:
            self.ended = True
            return GuideReport(ended=True, problem=f"{token} is not among {list(allowed)[:5]}")
        self.ended = self.consumed >= self.length
        return GuideReport(
            len(allowed) == 1, self.ended, accepting=self.ended, ahead=() if self.ended else self.ahead()
        )

    def ahead(self) -> tuple[int, ...]:
        found: list[int] = []
        last = self.last
        while self.consumed + len(found) < self.length and len(found) < 16:
            allowed = self.rule(self.consumed + len(found), last)
            if len(allowed) != 1:
                break
            last = allowed[0]
            found.append(last)
        return tuple(found)

    def copy(self) -> RuleGuide:
        return dataclasses.replace(self, history=[*self.history])


def allowed_in(mask: Mask) -> set[int]:
    """The tokens of a mask."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def letters(position: int, last: int) -> Sequence[int]:
    """Allow any of eight letters at every third position, else the one that the letter before forces."""
    return tuple(range(97, 105)) if position % 3 == 0 else (last + 8,)
