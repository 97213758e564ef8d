"""The pictures of a prompt: the places of their rows among its tokens, and their tokens' names in the cache.

A picture takes the place of some tokens of the prompt, which all have the same id. Their keys and values depend on the
picture, so the prefix tree must not take two pictures for the same prefix. It therefore knows the tokens of a page
that has part of a picture by other names: numbers that are made of all tokens of the page, and of the digests of its
pictures in full. They look like tokens to everything that compares, stores or sends pages, but they are negative, and
the names of two pages agree only if both pages have the same tokens and the same pictures. Pages without a picture are
known by their tokens, so they are shared with prompts that have no picture.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence
from hashlib import shake_128
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.extension import Extension, PromptNote

IntArray = NDArray[np.int32]
UNNAMED = -1  # stands for a token of a picture in a page that is not full; it equals nothing
_FIRST = -2  # the largest of a page's names


class PictureStatistics(NamedTuple):
    """The figures of a session that reads pictures."""

    pictures_encoded: int
    pictures_waiting: int  # including the ones being encoded
    picture_row_bytes: int  # of rows in host memory
    encoder_bytes: int  # of the encoder's weights on the device; 0 before the first picture, and asleep
    encoder_compilations: int


class PictureSpan(NamedTuple):
    """The place of a picture in its prompt."""

    start: int
    stop: int
    digest: bytes  # of the picture, and of all else that its rows depend on but the weights


class TokenGrid(NamedTuple):
    """The tokens of a picture, or of a tile of it, row by row."""

    rows: int
    columns: int
    tile: tuple[int, int] | None = None  # row and column of the tile; None: the tokens are of the whole picture


class PicturePatch(NamedTuple):
    """The place in a picture that a token of a prompt stands for. All numbers count from 0."""

    picture: int  # of the prompt
    row: int
    column: int
    grid: TokenGrid  # that row and column are in

    def __str__(self) -> str:
        tile = "" if self.grid.tile is None else "tile {}, {}, ".format(*self.grid.tile)
        of = f"of {self.grid.rows} × {self.grid.columns}"
        return f"picture {self.picture}, {tile}row {self.row}, column {self.column} {of}"


class PictureRun(NamedTuple):
    """Neighbouring positions of a prompt, [start, stop), filled by a picture or a tile of one."""

    start: int
    stop: int
    picture: int  # of the prompt, from 0 on
    grid: TokenGrid

    def patch(self, position: int) -> PicturePatch:
        """Return the place in the picture of the token at this position."""
        row, column = divmod(position - self.start, self.grid.columns)
        return PicturePatch(self.picture, row, column, self.grid)


def picture_runs(runs: Sequence[tuple[int, int]], grids: Sequence[Sequence[TokenGrid]]) -> tuple[PictureRun, ...]:
    """Return the runs of a prompt from their positions, in its order, and from the grids of each picture."""
    places = [(number, grid) for number, own in enumerate(grids) for grid in own]
    return tuple(
        PictureRun(start, stop, number, grid) for (start, stop), (number, grid) in zip(runs, places, strict=True)
    )


def patches_of(runs: Sequence[PictureRun]) -> dict[int, PicturePatch]:
    """Return the place of each token of the runs, by its position."""
    return {position: run.patch(position) for run in runs for position in range(run.start, run.stop)}


class PictureCost(NamedTuple):
    """The tokens that a picture adds to its prompt, and the bytes of its encoded rows in host memory."""

    tokens: int
    bytes: int


class RowsOrigin(enum.Enum):
    """The place that the rows of a picture came from."""

    ENCODER = "computed"
    MEMORY = "in memory"
    DISK = "on disk"


class EncodedRows(NamedTuple):
    """The rows of a picture [1 + levels, its tokens, E], and the place that they came from."""

    rows: NDArray[Any]
    origin: RowsOrigin


class PictureLike(Protocol):
    """A picture of a request, decoded or still to be decoded."""

    @property
    def digest(self) -> bytes:
        """The digest of its content, known once its rows are."""
        ...

    @property
    def content(self) -> str:
        """A digest of the passed value, known at once."""
        ...

    def uri(self) -> str:
        """Return it as a `data:` URI. Raises `InvalidRequest` for one that would be too large to be read again."""
        ...

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def grids(self) -> Sequence[TokenGrid]:
        """The tokens of each of its runs of rows."""
        ...

    @property
    def thumbnail(self) -> str:
        """A small picture of it as a `data:` URI, made when it is read first; empty if there is none."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PictureUse(Extension):
    """Pictures stand in the prompt."""

    spans: tuple[PictureSpan, ...]  # in the order of the prompt; no two of them overlap
    # Of each span, [1 + levels, its tokens, E]: the stream's beginning, and additions to layers
    rows: tuple[NDArray[Any], ...]
    coordinates: IntArray | None = None  # [tokens of the prompt, 3], where ropes have coordinates; see `RopeSpec`
    offset: int = 0  # added to the positions of tokens after the prompt, where ropes have coordinates
    whole: bool = False  # a picture's tokens see each other, so that a step computes all of them or none
    origins: tuple[RowsOrigin, ...] = ()  # of each picture's rows
    grids: tuple[tuple[TokenGrid, ...], ...] = ()  # of each picture's spans
    _words: dict[tuple[int, int], IntArray] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def runs(self) -> tuple[PictureRun, ...]:
        """The places of the pictures, with their grids."""
        return picture_runs([(span.start, span.stop) for span in self.spans], self.grids)

    def cut(self, start: int, length: int, room: int) -> int:
        stop = start + length
        inside = next((span for span in self.spans if span.start < stop < span.stop), None) if self.whole else None
        if inside is None:
            return length
        if inside.start > start:
            return inside.start - start
        return inside.stop - start if inside.stop - start <= room else 0

    def note(self, cached: int) -> PromptNote:
        tokens = sum(span.stop - span.start for span in self.spans)
        hit = sum(max(0, min(span.stop, cached) - span.start) for span in self.spans)
        pictures = words.count(len(self.origins) or len(self.spans), "picture")
        counted = f"{pictures} with {words.count(tokens, 'token')}, {hit} of them cached"
        return PromptNote("picture", tokens, hit, f"{counted}; {self._encoding()}")

    def _encoding(self) -> str:
        """Say whether the encoder ran, and where the rows of the other pictures were."""
        counts = Counter(self.origins)
        ran = counts.pop(RowsOrigin.ENCODER, 0)
        parts = [f"the encoder ran for {ran} of them" if ran else "the encoder did not run"]
        parts += [f"the rows of {count} were {origin.value}" for origin, count in counts.items()]
        return ", and ".join(parts)

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

    def _within(self, start: int, stop: int) -> list[PictureSpan]:
        return [span for span in self.spans if span.start < stop and span.stop > start]

    def _named(self, hidden: IntArray, page: int, page_size: int) -> IntArray:
        key = page, page_size
        words = self._words.get(key)
        if words is None:
            words = page_words(hidden, page * page_size, self.spans)
            if (page + 1) * page_size <= self.spans[-1].stop:  # the tokens after it may be another sequence's
                self._words[key] = words
        return words


def page_words(hidden: IntArray, start: int, spans: Sequence[PictureSpan]) -> IntArray:
    """Return the names of a page's tokens. `hidden` are its tokens, UNNAMED in pictures; `start` is its position."""
    content = [len(hidden).to_bytes(8, "little"), hidden.astype("<i4").tobytes()]
    for span in spans:
        if span.start < start + len(hidden) and span.stop > start:
            place = np.array([span.start - start, span.stop - start, len(span.digest)], "<i8")
            content += [place.tobytes(), span.digest]
    words = np.frombuffer(shake_128(b"".join(content)).digest(4 * len(hidden)), "<u4")
    return (_FIRST - (words & 0x3FFFFFFF).astype(np.int64)).astype(np.int32)


def _touched(spans: Sequence[PictureSpan], first: int, last: int, page_size: int) -> list[int]:
    """Return the pages [first, last) that have part of a picture."""
    pages = set[int]()
    for span in spans:
        pages.update(range(max(first, span.start // page_size), min(last, (span.stop - 1) // page_size + 1)))
    return sorted(pages)
