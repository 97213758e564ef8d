"""The contract of image processors: a plan made by arithmetic alone, patches, and the text of an image."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from rekindle._src.core.pictures import TokenGrid
from rekindle._src.images.picture import Picture
from rekindle._src.images.settings import ProcessorSettings
from rekindle._src.images.transforms import Codes, Floats
from rekindle.errors import InvalidRequest

_HALF = (0.5, 0.5, 0.5)


class PictureView(NamedTuple):
    """One image that the tower sees: the whole picture, or a tile of it; its size in pixels, patches and tokens."""

    height: int
    width: int
    rows: int  # of patches
    columns: int
    tokens: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of its tokens. Each stands for a square of patches."""
        side = math.isqrt(self.rows * self.columns // self.tokens)
        return self.rows // side, self.columns // side


@dataclass(frozen=True, slots=True)
class PicturePlan:
    """The views of a picture of this size, in the order of their patches, and of their tokens in the text.

    `tile_rows` and `tile_columns` are 0 where the picture is not cut into tiles.
    """

    width: int
    height: int
    views: tuple[PictureView, ...]
    tile_rows: int = 0
    tile_columns: int = 0

    @property
    def tokens(self) -> int:
        """Count the prompt's positions for output of the tower."""
        return sum(view.tokens for view in self.views)

    @property
    def grids(self) -> tuple[TokenGrid, ...]:
        """The tokens of each view. Tiles come first, row by row."""
        tiles = self.tile_rows * self.tile_columns
        return tuple(
            TokenGrid(*view.grid, tile=divmod(index, self.tile_columns) if index < tiles else None)
            for index, view in enumerate(self.views)
        )

    @property
    def patches(self) -> int:
        return sum(view.rows * view.columns for view in self.views)


class PicturePatches(NamedTuple):
    """A picture as its tower reads it. Axes: P patches of all views one after another, D values of a patch.

    `codes` are the bytes, [P, D], a quarter of the floats' size; `levels` has the float of each byte, [3, 256], and
    `channels` the channel of each of the D values. `positions` are row and column within the view, [P, 2].
    """

    plan: PicturePlan
    codes: Codes
    levels: Floats
    channels: np.ndarray[Any, np.dtype[np.intp]]
    positions: np.ndarray[Any, np.dtype[np.int32]]

    def floats(self, codes: Codes | None = None) -> Floats:
        """Return the patches in float32, [P, D], as transformers' processor computes them; or some, from their codes.

        All patches of a picture of 4096 × 4096 take 400 MB so, and a quarter of that as codes.
        """
        codes = self.codes if codes is None else codes
        if (self.levels == self.levels[0]).all():
            return self.levels[0][codes]
        return self.levels[self.channels, codes]

    def views(self) -> Iterator[tuple[PictureView, ViewPatches]]:
        """Yield each view with its patches."""
        first = 0
        for view in self.plan.views:
            stop = first + view.rows * view.columns
            yield view, ViewPatches(self, self.codes[first:stop])
            first = stop


class ViewPatches:
    """The patches of a view. Their floats are computed when they are taken."""

    __slots__ = ("_codes", "_whole")

    def __init__(self, whole: PicturePatches, codes: Codes) -> None:
        self._whole, self._codes = whole, codes

    @property
    def shape(self) -> tuple[int, ...]:
        return self._codes.shape

    def __getitem__(self, patches: np.ndarray[Any, np.dtype[np.int32]]) -> Floats:
        return self._whole.floats(self._codes[patches])


class TokenRun(NamedTuple):
    """A token as often as it stands in a row."""

    token: str
    times: int


@dataclass(frozen=True)
class PictureProcessor(abc.ABC):
    """How one family's pictures become patches and tokens; its fields are the numbers of a checkpoint's files.

    `marker` stands for an image in a chat's text, and is what `expansion` replaces. `before` and `after` are the tokens
    around it that a chat template writes. Rows of patches with an embedding from the tower have `image_token`.
    """

    marker: ClassVar[str]
    image_token: ClassVar[str]
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""

    @classmethod
    @abc.abstractmethod
    def read(cls, settings: ProcessorSettings, processor: ProcessorSettings, config: ProcessorSettings) -> Self:
        """Return the processor of a checkpoint's files. Raises `UnsupportedModel`.

        `settings` are those of the image processor, `processor` those of processor_config.json, `config` the model's.
        """

    @classmethod
    @abc.abstractmethod
    def from_mmproj(cls, clip: ProcessorSettings, tokens: tuple[int, int] | None) -> Self:
        """Return the processor of an mmproj file's `clip.vision` keys. Raises `UnsupportedModel`.

        `tokens` are the least and the most of a picture, where a family has such bounds. They are not in the file:
        without them they are those of the family's files for transformers.
        """

    @property
    @abc.abstractmethod
    def patch_length(self) -> int:
        """The values of a patch."""

    @abc.abstractmethod
    def plan(self, width: int, height: int, *, field: str = "images") -> PicturePlan:
        """Plan a picture of this size. Raises `InvalidRequest` if the family can't read that size."""

    @abc.abstractmethod
    def patches(self, picture: Picture) -> PicturePatches:
        """Return the picture's patches, as transformers computes them from the same pixels."""

    @abc.abstractmethod
    def expansion(self, plan: PicturePlan) -> tuple[str | TokenRun, ...]:
        """Return the replacement of `marker`: text and runs of tokens, one of `image_token` for each view."""

    @classmethod
    def _of_mmproj(cls, clip: ProcessorSettings, keys: Mapping[str, object], config: Mapping[str, object]) -> Self:
        """Return the processor of these keys of a checkpoint's files, with the mean and deviation of an mmproj file."""
        channels = {
            "image_mean": clip.channels("image_mean", _HALF, -1e3),
            "image_std": clip.channels("image_std", _HALF, 1e-6),
        }
        return cls.read(*(ProcessorSettings(part, clip.where) for part in ({**channels, **keys}, {}, config)))


def text_of(expansion: tuple[str | TokenRun, ...]) -> str:
    """Return an expansion as the text that transformers' processor writes."""
    return "".join(part if isinstance(part, str) else part.token * part.times for part in expansion)


def refused_size(width: int, height: int, problem: str, field: str) -> InvalidRequest:
    """Return the error for a picture size that the family can't read."""
    fix = "Crop it, or add a margin to its shorter side"
    return InvalidRequest(field, f"{width}×{height}", problem, fix)


def patch_channels(patch: int, *, last: bool, frames: int = 1) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the channel of each value of a patch."""
    channels = np.arange(3, dtype=np.intp)
    return np.tile(channels, patch * patch) if last else np.repeat(channels, frames * patch * patch)


def joined(parts: list[Codes]) -> Codes:
    """Return the patches of all views in one array."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
