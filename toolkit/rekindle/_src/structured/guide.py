"""A guide over llguidance's matcher: finds the allowed next tokens, and follows the sampled ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.core.guides import Guided, Mask
from rekindle._src.structured.compilers import first_line
from rekindle._src.structured.endings import Ending

AHEAD = 16  # most forced tokens that are reported


class Reasoning(NamedTuple):
    """Tokens around a model's reasoning before its answer; a grammar begins behind it."""

    opens: int
    closes: int
    inside: bool = False  # the prompt ends inside of it; otherwise the first token may open it


class First(NamedTuple):
    """A grammar's state at the beginning of a text."""

    mask: Mask
    run: tuple[int, ...]  # tokens that have to follow


class Guide:
    """The implementation of `GuideLike`.

    Of the tokenizer's end tokens only those in `eos_ids` may come, at a place where the text is complete. Where nothing
    else can come, an end token is allowed whatever the request's options, because the text is over there.
    """

    __slots__ = (
        "_at",
        "_barred",
        "_ending",
        "_ends",
        "_first",
        "_matcher",
        "_reasoning",
        "_run",
        "_skip",
        "_thinks",
        "accepting",
        "consumed",
        "ended",
        "spent",
    )

    def __init__(
        self,
        matcher: Any,
        ends: frozenset[int],
        eos_ids: Collection[int],
        reasoning: Reasoning | None = None,
        first: First | None = None,
        ending: Ending | None = None,
    ) -> None:
        """Set up; `first` is the matcher's state at the beginning, which may have taken long to compute."""
        self._matcher, self._ending = matcher, ending
        self._ends = ends
        self._barred = tuple(_without(token) for token in ends.difference(eos_ids))
        self._reasoning = reasoning
        self._thinks = reasoning is not None and reasoning.inside
        self._first = first  # until the grammar takes a token
        self._run: tuple[int, ...] = ()  # forced tokens, of which those before `_at` have come
        self._at = self._skip = 0
        if reasoning is None:
            self._look_ahead()
        self.spent: float = 0.0
        self.consumed: int = 0
        self.ended: bool = False
        self.accepting: bool = False

    def copy(self) -> Guide:
        clone = object.__new__(Guide)
        for name in Guide.__slots__:
            setattr(clone, name, getattr(self, name))
        clone._matcher = self._matcher.deep_copy()
        clone._ending = None if self._ending is None else self._ending.copy()
        return clone

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens that have to follow, in the tokenizer's usual spelling."""
        return self._run[self._at : self._at + AHEAD]

    def fill(self, mask: Mask) -> str:
        if self._thinks:
            mask.fill(-1)
            for word, kept_bits in map(_without, self._ends):
                mask[word] &= kept_bits
            return ""
        if self._first is not None:
            mask[:] = self._first.mask
        else:
            data: int = mask.__array_interface__["data"][0]  # a third of the time of `mask.ctypes`
            self._matcher.unsafe_compute_mask_ptr(data, mask.nbytes)
            if self._matcher.is_error():
                return first_line(self._matcher.get_error())
        words = [mask[word] for word, _ in self._barred]
        for word, kept_bits in self._barred:
            mask[word] &= kept_bits
        any_left = bool(np.count_nonzero(mask))  # an eighth of the time of `any`
        if not any_left:
            for (word, _), bits in zip(self._barred, words, strict=True):
                mask[word] = bits
                any_left |= bool(bits)
        elif self._ending is not None:
            self._ending.limit(mask, self._matcher, self.consumed, forced=self._at < len(self._run))
        if self._reasoning is not None:  # no token was sampled yet, and the first may open it
            word, kept_bits = _without(self._reasoning.opens)
            mask[word] |= ~kept_bits
            any_left = True
        return "" if any_left else "the grammar allows no token"

    def consume(self, token: int) -> Guided:
        self.consumed += 1
        reasoning = self._reasoning
        if reasoning is not None and (self._thinks or token == reasoning.opens):
            self._thinks = token != reasoning.closes
            if not self._thinks:
                self._reasoning = None
                self._look_ahead()
            return Guided(ahead=self.ahead)
        self._reasoning = self._first = None
        forced = self._at < len(self._run) and self._run[self._at] == token
        matcher = self._matcher
        if self.ended and token in self._ends:  # a fork of a text that an end token ended
            return Guided(ended=True, by_eos=True, accepting=True)
        if not matcher.consume_token(token):
            self.ended = True
            return Guided(ended=True, problem=first_line(matcher.get_error()))
        self.accepting = matcher.is_accepting()
        self.ended = matcher.is_stopped()
        self._move_on(forced)
        by_eos = self.ended and token in self._ends
        self.accepting |= by_eos
        ending = self._ending
        if ending is None:
            return Guided(forced, self.ended, by_eos, self.accepting, self.ahead)
        ending.consume(token)
        steered, searched, due = ending.steered, ending.take_seconds(), ending.due(self.consumed)
        return Guided(forced, self.ended, by_eos, self.accepting, self.ahead, "", steered, searched, due)

    def _move_on(self, forced: bool) -> None:
        """Keep the run of forced tokens, or compute the next one.

        llguidance computes a run in time that is proportional to its length, without letting other threads run. So it
        is kept while the text follows it. Where the model spells it otherwise, a long run is not recomputed at once.
        """
        left = len(self._run) - self._at
        if self.ended:
            self._run = ()
        elif forced and left > 1:
            self._at += 1
        elif not forced and left > AHEAD:
            self._run, self._skip = (), left // AHEAD
        elif self._skip:
            self._skip -= 1
        else:
            self._look_ahead()

    def _look_ahead(self) -> None:
        self._run = self._first.run if self._first is not None else forced_run(self._matcher)
        self._at = 0


def forced_run(matcher: Any) -> tuple[int, ...]:
    """Return the tokens that have to follow."""
    return tuple(matcher.compute_ff_tokens())


def _without(token: int) -> tuple[int, np.int32]:
    """Return the index of a token's word in a mask, and all bits of the word but the token's."""
    return token >> 5, ~np.int32(np.uint32(1 << (token & 31)).view(np.int32))
