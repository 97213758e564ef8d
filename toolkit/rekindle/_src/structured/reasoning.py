"""The reasoning of a reply: how many tokens it may take, and where the answer begins that a grammar is for.

A `ReasoningGuide` follows a reply by its text. Within reasoning any token may come; once its budget is used up, the
tag that ends it has to be written. A grammar begins with the answer: after the reasoning, however it ended. As any
guide it is copied to look ahead, so that a draft that is rejected leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.records import GuideReport, Mask, NewGuide

if TYPE_CHECKING:
    from rekindle._src.text.replies import ReplyPlan

AHEAD = 16  # most forced tokens that are reported
_CHARACTER = 4  # bytes of a character at most
_BROKEN = "\ufffd"  # the text of bytes that are no whole character


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningRules:
    """The marks of a reply's reasoning, and its budget. The values are plain, so that they can be sent."""

    opening: str
    closings: tuple[str, ...]  # a forced end is the first one
    inside: bool = False  # the prompt ends within it
    opens: bool = True  # the reply may begin with it
    again: bool = False  # it may also come later
    budget: int | None = None
    used: int = 0  # tokens of it in the prompt
    message: str = ""  # before a forced end
    bridge: str = ""  # between reasoning and whatever follows it
    lead: str = ""  # before an answer that a grammar is for
    gap: str = ""  # whitespace that may stand before such an answer

    @classmethod
    def read(cls, values: Sequence[object]) -> ReasoningRules:
        """Return the rules with the values of fields in order. Raise `TypeError` or `ValueError` for others."""
        rules = cls(*values)  # type: ignore[arg-type]
        closings = tuple(rules.closings)
        texts = (rules.opening, *closings, rules.message, rules.bridge, rules.lead, rules.gap)
        if not closings or not all(isinstance(text, str) for text in texts):
            raise ValueError("reasoning needs the texts of its marks")
        numbers = (rules.used, 0 if rules.budget is None else rules.budget)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a budget is a number of tokens")
        return dataclasses.replace(rules, closings=closings)

    @classmethod
    def of(
        cls,
        plan: ReplyPlan,
        prompt: str,
        budget: tuple[int, str] | None,
        *,
        calls: bool = False,
        spaced: bool = False,
        free: bool = False,
    ) -> ReasoningRules:
        """Return the rules for a reply to a prompt that ends with this text, in a family that marks its reasoning.

        A grammar for the reply is one of `calls` or of its answer. `spaced` says that whitespace may stand before it.
        If the answer is `free`, a call ends its reasoning, too. The `budget` has a message.
        """
        format = plan.format
        thoughts, lead = format.thoughts, "" if calls else format.lead
        assert thoughts is not None, "the family marks its reasoning"
        thinks = format.thinks_after(prompt, plan.continued)
        openers = () if format.calls is None or not plan.tools else format.calls.openers
        calls_begin = tuple(opener.text for opener in openers if not opener.bare) if free else ()
        return cls(
            opening=thoughts.opening + format.marks.header,
            closings=(thoughts.closing, *format.marks.text_begins, *calls_begin),
            inside=bool(thinks),
            opens=thinks is not False or thoughts.again,
            again=thoughts.again,
            budget=None if budget is None else budget[0],
            message="" if budget is None else budget[1],
            bridge=thoughts.bridge,
            lead=lead,
            gap="\n\n" if (spaced or calls) and not (thoughts.bridge or lead) else "",
        )

    def after(self, token_ids: Sequence[int], texts: TokenTexts) -> ReasoningRules:
        """Return the rules with the tokens of reasoning counted that a prompt ends with."""
        if not self.inside or self.budget is None:
            return self
        marks, head, used = len(texts.tokens_of(self.opening)), "", 0
        for count, token in enumerate(reversed(token_ids), start=1):
            head = texts.text_of(token) + head[: len(self.opening)]
            if self.opening in head or count > self.budget + marks:
                used = min(self.budget, max(0, count - marks))
                break
        while used and not texts.text_of(token_ids[len(token_ids) - used]).strip():
            used -= 1  # the template's own line break
        return dataclasses.replace(self, used=used)

    def answer_in(self, token_ids: Sequence[int], texts: TokenTexts) -> tuple[int, str]:
        """Return the place of the answer's first token, and text of the answer in the token before it."""
        at, inside, rest = 0, self.inside, ""
        longest = max(map(len, self.closings))
        while inside or (place := _skip_mark(token_ids, at, texts.tokens_of(self.opening))) > at:
            text, at = "", at if inside else place
            while not (ends := [text.partition(one)[2] for one in self.closings if one in text]):
                if at == len(token_ids):
                    return at, ""
                text, at = text[-longest:] + texts.text_of(token_ids[at]), at + 1
            rest, inside = max(ends, key=len).strip(), False
            at = _skip_mark(token_ids, at, texts.tokens_of(self.bridge))
            if not self.again:
                break
        return _skip_mark(token_ids, at, texts.tokens_of(self.lead)), rest

    def values(self) -> list[object]:
        """Return the values of all fields in order."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _skip_mark(token_ids: Sequence[int], at: int, mark: Sequence[int]) -> int:
    """Return the place after a mark that begins at `at`; `at` if it doesn't."""
    end = at + len(mark)
    return end if list(token_ids[at:end]) == list(mark) else at


class TokenTexts:
    """The texts of a tokenizer's single tokens, and the tokens of texts, as far as they were needed."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.text_of = functools.lru_cache(maxsize=4_096)(self._text_of)
        self.tokens_of = functools.lru_cache(maxsize=256)(self._tokens_of)
        self._tokenizer = tokenizer

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def whole(self, tokens: Sequence[int]) -> bool:
        """True if these tokens, the last ones of a text, end with a whole character."""
        return not self._tokenizer.decode(tokens, skip_special_tokens=False).endswith(_BROKEN)


class ReasoningGuide:
    """A guide for a reply that reasons first; `inner` guides its answer, if that is structured."""

    def __init__(self, rules: ReasoningRules, texts: TokenTexts, ends: Sequence[int], inner: NewGuide | None) -> None:
        self.rules, self._texts, self._ends = rules, texts, tuple(ends)
        self._inner = _LeadGuide(texts.tokens_of(rules.lead), inner) if inner is not None and rules.lead else inner
        self._opening = texts.tokens_of(rules.opening)
        self._inside = rules.inside
        self._used = rules.used
        self._run: tuple[int, ...] = ()  # tokens that have to follow
        self._tail = ""  # text in which the next mark may begin
        self._latest: tuple[int, ...] = ()  # tokens of reasoning that may end within a character
        self._opens = rules.opens and not rules.inside
        self._begun = False  # the answer has begun
        self._trial: NewGuide | None = None  # of an answer that begins as the opening tag does
        self._matched = 0  # tokens of the opening tag that have come
        self._gap: tuple[int, ...] = ()  # whitespace that may come
        self._longest = max(map(len, (rules.opening, *rules.closings)))
        self._over: bool = False
        self.consumed: int = 0
        self.spent: float = 0.0
        if self._inside:
            self._look_at_budget()

    def copy(self) -> ReasoningGuide:
        clone = object.__new__(ReasoningGuide)
        clone.__dict__.update(self.__dict__)
        clone._inner = None if self._inner is None else _copied(self._inner)
        clone._trial = None if self._trial is None else _copied(self._trial)
        return clone

    @property
    def ended(self) -> bool:
        return self._over

    @ended.setter
    def ended(self, over: bool) -> None:
        self._over = over
        if self._begun and self._inner is not None:
            self._inner.ended = over

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens that must follow, in the tokenizer's usual spelling."""
        if self._run:
            return self._run[:AHEAD]
        free = self._inside or self._inner is None or not (self._begun or not (self._opens or self._gap))
        return () if free or self._inner is None else self._inner.ahead

    def fill(self, mask: Mask) -> str:
        if self._run:
            mask.fill(0)
            _allow(mask, self._run[0])
            return ""
        if self._inside or self._inner is None:
            mask.fill(-1)
            for token in self._ends if self._inner is not None else self._barred():
                mask[token >> 5] &= ~_bit(token)
            return ""
        if self._begun:
            return self._inner.fill(mask)
        answer = self._inner if not self._matched else self._trial
        mask.fill(0)
        problem = "nothing may follow" if answer is None else answer.fill(mask)
        more = [*([self._opening[self._matched]] if self._opens else ()), *self._gap[:1]]
        for token in more:
            _allow(mask, token)
        return "" if more else problem

    def _barred(self) -> tuple[int, ...]:
        """Return the tokens that would begin another message of reasoning where none may come."""
        if self._inside or self.rules.budget != 0 or not self.rules.bridge or len(self._opening) < 2:
            return ()
        return self._opening[1:2] if self._tail.endswith(self._texts.text_of(self._opening[0])) else ()

    def consume(self, token: int) -> GuideReport:
        self.consumed += 1
        if self._run and token != self._run[0]:
            return GuideReport(problem="another token has to follow")
        forced = bool(self._run)
        self._run = self._run[1:]
        if self._inside:
            problem = self._think(token, forced=forced)
        elif forced:
            problem = ""
        elif self._inner is None:
            problem = self._watch(self._texts.text_of(token))
        elif not self._begun and (self._takes_opening(token) or self._takes_gap(token)):
            problem = ""
        else:
            return self._answer(token)
        if problem:
            return GuideReport(problem=problem)
        return GuideReport(forced=forced, ahead=self.ahead)

    def _think(self, token: int, *, forced: bool) -> str:
        """Move on within reasoning. Return the reason why it can't go on."""
        self._tail += self._texts.text_of(token)
        places = [(place, text) for text in self.rules.closings if (place := self._tail.find(text)) >= 0]
        if places:
            place, closing = min(places)
            rest, self._tail = self._tail[place + len(closing) :], ""
            return self._leave(rest, forced=forced)
        self._tail = self._tail[-self._longest :]
        if not forced:
            self._used += 1
            self._latest = (*self._latest, token)[-_CHARACTER:]
            self._look_at_budget()
        return ""

    def _look_at_budget(self) -> None:
        """Force the end of reasoning if its tokens are used up.

        A character is written to its last byte before, and an end that the model has begun is left to it.
        """
        budget, rules = self.rules.budget, self.rules
        if budget is None or self._used < budget:
            return
        late, text = self._used - budget, self._tail
        broken = late < _CHARACTER and self._latest and not self._texts.whole(self._latest)
        begun = late < len(rules.closings[0]) and any(
            text.endswith(rules.closings[0][:size]) for size in range(1, len(rules.closings[0]))
        )
        if not (broken or begun):
            self._run = self._texts.tokens_of(rules.message + rules.closings[0])

    def _enter(self) -> None:
        self._inside, self._used, self._tail, self._latest = True, 0, "", ()
        self._matched, self._trial = 0, None
        self._look_at_budget()

    def _leave(self, rest: str, *, forced: bool) -> str:
        """Go on after the end of reasoning, with the text that came in its last token after it.

        Return the reason why it can't go on. After a forced end no more reasoning may follow.
        """
        self._inside, self._latest, self._run = False, (), ()
        self._opens = self.rules.again and (self._inner is None or not forced)
        if self._inner is None:
            return self._watch(rest)
        self._run = self._texts.tokens_of(self.rules.bridge) if self.rules.bridge else ()
        self._gap = self._texts.tokens_of(self.rules.gap) if self.rules.gap and not rest else ()
        # A token may hold the end of reasoning and the beginning of the answer.
        for token in self._texts.tokens_of(rest.lstrip()) if rest.strip() else ():
            if problem := self._answer(token).problem:
                return problem
        return ""

    def _watch(self, text: str) -> str:
        """Look for reasoning in a free text."""
        if not self._opens:
            return ""
        opening = self.rules.opening
        self._tail += text
        place = self._tail.find(opening)
        if not self.rules.again:
            self._tail = self._tail.lstrip()
            self._opens = opening.startswith(self._tail[: len(opening)])
            place = 0 if self._opens and len(self._tail) >= len(opening) else -1
        if place < 0:
            self._tail = self._tail[-len(opening) :]
            return ""
        rest = self._tail[place + len(opening) :]
        self._enter()
        self._tail = rest
        return ""

    def _takes_opening(self, token: int) -> bool:
        """Take a token of the opening tag; False for any other."""
        if not self._opens or token != self._opening[self._matched]:
            return False
        assert self._inner is not None, "it is for an answer that a grammar guides"
        trial = self._trial if self._matched else _copied(self._inner)
        if trial is not None and trial.consume(token).problem:
            trial = None
        self._matched, self._trial = self._matched + 1, trial
        if self._matched == len(self._opening):
            self._enter()
        return True

    def _takes_gap(self, token: int) -> bool:
        if self._matched or token not in self._gap[:1]:
            return False
        self._gap, self._opens = self._gap[1:], False
        return True

    def _answer(self, token: int) -> GuideReport:
        """Move on within the answer."""
        if not self._begun:
            self._begun, self._gap = True, ()
            if self._matched:
                self._inner, self._trial = self._trial, None
            if self._inner is not None:
                self._inner.consumed = self.consumed - 1  # it ends in time for all tokens together
        if self._inner is None:
            return GuideReport(problem="nothing may follow")
        report = self._inner.consume(token)
        self._over = report.ended
        return report


class _LeadGuide:
    """A guide that writes fixed tokens first, then follows another one."""

    def __init__(self, lead: tuple[int, ...], inner: NewGuide) -> None:
        self._lead, self._inner = lead, inner
        self.consumed: int = 0
        self.spent: float = 0.0

    def copy(self) -> _LeadGuide:
        clone = _LeadGuide(self._lead, _copied(self._inner))
        clone.consumed = self.consumed
        return clone

    @property
    def ended(self) -> bool:
        return self._inner.ended

    @ended.setter
    def ended(self, over: bool) -> None:
        self._inner.ended = over

    @property
    def ahead(self) -> tuple[int, ...]:
        return self._lead[:AHEAD] or self._inner.ahead

    def fill(self, mask: Mask) -> str:
        if not self._lead:
            return self._inner.fill(mask)
        mask.fill(0)
        _allow(mask, self._lead[0])
        return ""

    def consume(self, token: int) -> GuideReport:
        self.consumed += 1
        if not self._lead:
            return self._inner.consume(token)
        if token != self._lead[0]:
            return GuideReport(problem="another token has to follow")
        self._lead = self._lead[1:]
        self._inner.consumed = self.consumed
        return GuideReport(forced=True, ahead=self.ahead)


def _copied(guide: NewGuide) -> NewGuide:
    clone = guide.copy()
    assert isinstance(clone, type(guide)), "a copy is of the same kind"
    return clone


def _bit(token: int) -> int:
    return 1 << (token & 31) if token & 31 != 31 else -(1 << 31)


def _allow(mask: Mask, token: int) -> None:
    mask[token >> 5] |= _bit(token)
