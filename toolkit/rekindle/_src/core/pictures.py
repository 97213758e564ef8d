"""The pictures of a prompt: the places of their rows among its tokens, and their tokens' names in the cache.

A picture takes the place of some tokens of the prompt, which all have the same id. Their keys and values depend on the
picture, so the prefix tree must not take two pictures for the same prefix. It therefore knows the tokens of a page
that has part of a picture by other names: numbers that are made of all tokens of the page, and of the digests of its
pictures in full. They look like tokens to everything that compares, stores or sends pages, but they are negative, and
the names of two pages agree only if both pages have the same tokens and the same pictures. Pages without a picture are
known by their tokens, so they are shared with prompts that have no picture.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.prompt_rows import PromptRows

IntArray = NDArray[np.int32]


class PictureStatistics(NamedTuple):
    """The figures of a session that reads pictures."""

    pictures_encoded: int
    pictures_waiting: int  # including the ones being encoded
    picture_row_bytes: int  # of rows in host memory
    encoder_bytes: int  # of the encoder's weights on the device; 0 before the first picture, and asleep
    encoder_compilations: int


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


class PictureGrids(NamedTuple):
    """The grids of a prompt's pictures, as the source of its rows."""

    grids: tuple[tuple[TokenGrid, ...], ...]  # of each picture's spans


def runs_of(use: PromptRows | None) -> tuple[PictureRun, ...]:
    """Return the places of a prompt's pictures, with their grids; empty for rows of another kind."""
    if use is None or not isinstance(use.source, PictureGrids):
        return ()
    return picture_runs([(span.start, span.stop) for span in use.spans], use.source.grids)


def origins_in_words(origins: Sequence[RowsOrigin]) -> str:
    """Say whether the encoder ran, and where the rows of the other pictures were."""
    counts = Counter(origins)
    ran = counts.pop(RowsOrigin.ENCODER, 0)
    parts = [f"the encoder ran for {ran} of them" if ran else "the encoder did not run"]
    parts += [f"the rows of {count} were {origin.value}" for origin, count in counts.items()]
    return ", and ".join(parts)


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
