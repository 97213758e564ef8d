"""Rows in the place of some tokens' embeddings: where they stand in a prompt, and how its pages are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import shake_128
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.extension import Extension, PromptNote

IntArray = NDArray[np.int32]
UNNAMED = -1  # stands for a token with a row in a page that is not full; it equals nothing
_FIRST = -2  # the largest of a page's names


class RowSpan(NamedTuple):
    """The place of successive rows in their prompt."""

    start: int
    stop: int
    digest: bytes  # of the rows' source, and of all else that they depend on but the weights


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptRows(Extension):
    """Rows stand in the prompt in the place of embeddings."""

    spans: tuple[RowSpan, ...]  # in the order of the prompt; no two of them overlap
    # Of each span, [1 + levels, its tokens, E]: the stream's beginning, and additions to layers
    rows: tuple[NDArray[Any], ...]
    coordinates: IntArray | None = None  # [tokens of the prompt, 3], where ropes have coordinates; see `RopeSpec`
    offset: int = 0  # added to the positions of tokens after the prompt, where ropes have coordinates
    whole: bool = False  # the tokens of a span see each other, so that a step computes all of them or none
    wordless: bool = False  # the tokens where rows stand mean nothing: they are `uncounted`
    kind: str = "picture"  # of the rows' source, in one word
    count: int = 0  # sources, such as pictures; 0: as many as spans
    described: str = ""  # where the rows came from, in words
    source: object = None  # what their source says of the spans: the grids of pictures
    _page_names: dict[tuple[int, int], IntArray] = dataclasses.field(default_factory=dict, repr=False)

    def cut(self, start: int, length: int, room: int) -> int:
        stop = start + length
        inside = next((span for span in self.spans if span.start < stop < span.stop), None) if self.whole else None
        if inside is None:
            return length
        if inside.start > start:
            return inside.start - start
        return inside.stop - start if inside.stop - start <= room else 0

    @property
    def uncounted(self) -> tuple[tuple[int, int], ...]:
        return tuple((span.start, span.stop) for span in self.spans) if self.wordless else ()

    @property
    def embedded(self) -> tuple[tuple[int, int], ...]:
        return tuple((span.start, span.stop) for span in self.spans)

    def note(self, cached: int) -> PromptNote:
        tokens = sum(span.stop - span.start for span in self.spans)
        hit = sum(max(0, min(span.stop, cached) - span.start) for span in self.spans)
        sources = words.count(self.count or len(self.spans), self.kind)
        counted = f"{sources} with {words.count(tokens, 'token')}, {hit} of them cached"
        return PromptNote(self.kind, tokens, hit, f"{counted}; {self.described}" if self.described else counted)

    def names(self, tokens: IntArray, start: int, page_size: int) -> IntArray:
        spans, hidden = self._within(start, start + len(tokens)), self.masked(tokens, start)
        if not spans:
            return tokens
        named = hidden.copy()
        assert start % page_size == 0, "pages are named as a whole"
        for page in _touched(spans, start // page_size, (start + len(tokens)) // page_size, page_size):
            place = page * page_size - start
            named[place : place + page_size] = self._named(hidden[place : place + page_size], page, page_size)
        return named

    def masked(self, tokens: IntArray, start: int) -> IntArray:
        spans = self._within(start, start + len(tokens))
        if not spans:
            return tokens
        hidden = tokens.copy()
        for span in spans:
            hidden[max(0, span.start - start) : span.stop - start] = UNNAMED
        return hidden

    def _within(self, start: int, stop: int) -> list[RowSpan]:
        return [span for span in self.spans if span.start < stop and span.stop > start]

    def _named(self, hidden: IntArray, page: int, page_size: int) -> IntArray:
        key = page, page_size
        named = self._page_names.get(key)
        if named is None:
            named = page_words(hidden, page * page_size, self.spans)
            if (page + 1) * page_size <= self.spans[-1].stop:  # the tokens after it may be another sequence's
                self._page_names[key] = named
        return named


def page_words(hidden: IntArray, start: int, spans: Sequence[RowSpan]) -> IntArray:
    """Return the names of a page's tokens. `hidden` are its tokens, UNNAMED where rows stand, from position `start`."""
    content = [len(hidden).to_bytes(8, "little"), hidden.astype("<i4").tobytes()]
    for span in spans:
        if span.start < start + len(hidden) and span.stop > start:
            place = np.array([span.start - start, span.stop - start, len(span.digest)], "<i8")
            content += [place.tobytes(), span.digest]
    numbers = np.frombuffer(shake_128(b"".join(content)).digest(4 * len(hidden)), "<u4")
    return (_FIRST - (numbers & 0x3FFFFFFF).astype(np.int64)).astype(np.int32)


def _touched(spans: Sequence[RowSpan], first: int, last: int, page_size: int) -> list[int]:
    """Return the pages [first, last) that have part of a span."""
    pages = set[int]()
    for span in spans:
        pages.update(range(max(first, span.start // page_size), min(last, (span.stop - 1) // page_size + 1)))
    return sorted(pages)
