"""`allowed_token_ids` and `bad_words`: a guide that forbids tokens, alone or over the guide of a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rekindle._src.core.contracts import TokenizerLike
from rekindle._src.core.records import GuideLike, GuideReport, Mask, mask_words
from rekindle._src.core.sampling import Sampling
from rekindle.errors import InvalidRequest


class TokenRules(NamedTuple):
    """Tokens that are always forbidden, and those forbidden after other tokens. Sequences share it."""

    always: Mask  # the tokens that may come at all
    behind: tuple[tuple[tuple[int, ...], int], ...]  # tokens, and the one that may not follow them
    options: str  # the names of these options

    @property
    def memory(self) -> int:
        """Number of latest tokens that the rules read."""
        return max((len(before) for before, _ in self.behind), default=0)

    def apply(self, mask: Mask, latest: tuple[int, ...]) -> None:
        """Remove from `mask` the tokens that may not come after the `latest` ones."""
        mask &= self.always
        for before, token in self.behind:
            if latest[len(latest) - len(before) :] == before:
                mask[token >> 5] &= ~np.uint32(1 << (token & 31)).view(np.int32)


def rules_of(sampling: Sampling, tokenizer: TokenizerLike, vocab: int) -> TokenRules | None:
    """Return the rules of a request; None if all tokens may come. Raises `InvalidRequest` for unspellable words."""
    if not sampling.restricted:
        return None
    allowed, words = sampling.allowed_token_ids or (), sampling.bad_words
    if words and not tokenizer.has_text:
        raise InvalidRequest("bad_words", words, "need a tokenizer", "Open a model with tokenizer.json")
    bits = np.full(mask_words(vocab) * 32, not allowed, np.bool_)
    bits[list(allowed)] = True
    behind: dict[tuple[tuple[int, ...], int], None] = {}
    for spelling in _spellings(words, tokenizer):
        *before, last = spelling
        if before:
            behind[tuple(before), last] = None
        else:
            bits[last] = False
    names = [name for name, value in (("allowed_token_ids", allowed), ("bad_words", words)) if value]
    always = np.packbits(bits, bitorder="little").view(np.int32)
    return TokenRules(always, tuple(behind), " and ".join(names))


def _spellings(words: Iterable[str], tokenizer: TokenizerLike) -> Iterable[Sequence[int]]:
    """Yield the tokens of each word at the beginning of a text, and after a space where that is another spelling."""
    for word in words:
        bare = tokenizer.encode(word.strip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.strip(), add_special_tokens=False)
        if not bare:
            raise InvalidRequest("bad_words", word, "has no tokens", "Remove it")
        yield bare
        if spaced[-len(bare) :] != bare:
            yield spaced


class RestrictedGuide:
    """A `GuideLike` over another one, or over none."""

    def __init__(self, rules: TokenRules, inner: GuideLike | None = None) -> None:
        self._rules, self._inner = rules, inner
        self._latest: tuple[int, ...] = ()
        self._memory = rules.memory
        self.spent: float = 0.0
        self.consumed: int = 0

    @property
    def inner(self) -> GuideLike | None:
        """The guide that this one narrows; None if all other tokens may come."""
        return self._inner

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended

    def copy(self) -> RestrictedGuide:
        clone = RestrictedGuide(self._rules, None if self._inner is None else self._inner.copy())
        clone._latest, clone.consumed = self._latest, self.consumed
        return clone

    def fill(self, mask: Mask) -> str:
        if self._inner is None:
            mask.fill(-1)
        elif problem := self._inner.fill(mask):
            return problem
        self._rules.apply(mask, self._latest)
        suffix = "" if self._inner is None else " that the structure allows"
        return "" if mask.any() else f"{self._rules.options} leave no token{suffix}"

    def consume(self, token: int) -> GuideReport:
        self.consumed += 1
        if self._memory:
            self._latest = (*self._latest, token)[-self._memory :]
        return GuideReport() if self._inner is None else self._inner.consume(token)
