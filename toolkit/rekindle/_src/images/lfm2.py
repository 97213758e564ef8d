"""LFM2-VL: small pictures as they are, large ones in tiles with a thumbnail.

Transformers' processor is on torchvision alone, which resizes by slightly other arithmetic than Pillow: sizes, tiles
and texts are equal, and some bytes differ by one (up to 3.5 % of them, in 30 sizes with torchvision 0.28).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from rekindle._src.images.picture import Picture
from rekindle._src.images.processor import (
    PicturePatches,
    PicturePlan,
    PictureProcessor,
    PictureView,
    TokenRun,
    joined,
    patch_channels,
)
from rekindle._src.images.settings import ProcessorSettings
from rekindle._src.images.transforms import BILINEAR, PixelLevels, patches_channels_last, positions_by_row, resized

_HALF = (0.5, 0.5, 0.5)


class TileBounds(NamedTuple):
    """How a large picture is cut: the fewest and the most tiles, the pixels of a tile's side, and the thumbnail."""

    least: int
    most: int
    side: int
    thumbnail: bool

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of the grid with the ratio closest to the picture's."""
        ratios = [
            (columns, rows)
            for count in range(self.least, self.most + 1)
            for columns in range(1, count + 1)
            for rows in range(1, count + 1)
            if self.least <= columns * rows <= self.most
        ]
        best, closest = (1, 1), math.inf
        # Equally close ones are taken in the order of transformers' set, whose place decides between them.
        for columns, rows in sorted(set(ratios), key=lambda ratio: ratio[0] * ratio[1]):
            distance = abs(width / height - columns / rows)
            if distance < closest:
                best, closest = (columns, rows), distance
            elif distance == closest and width * height > 0.5 * (self.side * self.side * columns * rows):
                best = (columns, rows)
        return best


@dataclass(frozen=True)
class Lfm2Pictures(PictureProcessor):
    """`Lfm2VlImageProcessor`: `merge` × `merge` patches make a token.

    A picture is cut into tiles if it has more than `tolerance` times the pixels of the most tokens.
    """

    patch: int
    merge: int
    least_tokens: int
    most_tokens: int
    tolerance: float
    tiles: TileBounds | None
    special_tokens: bool
    method: int
    levels: PixelLevels

    marker: ClassVar[str] = "<image>"
    image_token: ClassVar[str] = "<image>"

    @classmethod
    def read(cls, settings: ProcessorSettings, processor: ProcessorSettings, config: ProcessorSettings) -> Self:
        patch, merge = settings.whole("encoder_patch_size", 16, 1, 256), settings.whole("downsample_factor", 2, 1, 16)
        tiles = TileBounds(
            settings.whole("min_tiles", 2, 1, 32),
            settings.whole("max_tiles", 10, 1, 32),
            settings.whole("tile_size", 512),
            settings.flag("use_thumbnail", True),
        )
        least, most = settings.whole("min_image_tokens", 64), settings.whole("max_image_tokens", 256)
        if tiles.least > tiles.most:
            raise settings.wrong("min_tiles", f"is more than the {tiles.most} of max_tiles")
        if tiles.side % (patch * merge):
            raise settings.wrong("tile_size", f"is {tiles.side} pixels, which are no whole tokens of {patch * merge}")
        if least > most:
            raise settings.wrong("min_image_tokens", f"is more than the {most} of max_image_tokens")
        splits = settings.flag("do_image_splitting", True) and tiles.most > 1
        return cls(
            patch, merge, least, most, settings.number("max_pixels_tolerance", 2.0, 0.0, 1e3),
            tiles if splits else None, processor.flag("use_image_special_tokens", True), settings.filter(BILINEAR),
            PixelLevels.read(settings, _HALF, _HALF, fused=True),
        )  # fmt: skip

    @classmethod
    def from_mmproj(cls, clip: ProcessorSettings, tokens: tuple[int, int] | None) -> Self:
        least, most = tokens or (64, 256)
        keys = {
            "encoder_patch_size": clip.whole("patch_size", 16, 1, 256),
            "downsample_factor": clip.whole("projector.scale_factor", 2, 1, 16),
            "min_image_tokens": least,
            "max_image_tokens": most,
        }
        return cls._of_mmproj(clip, keys, {})

    @property
    def side(self) -> int:
        """The pixels of a token's side."""
        return self.patch * self.merge

    def _whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Return height and width of the picture as one view."""
        side, area = self.side, self.side**2
        new_height, new_width = (max(side, round(length / side) * side) for length in (height, width))
        if new_height * new_width > self.most_tokens * area:
            beta = math.sqrt((height * width) / (self.most_tokens * area))
            new_height, new_width = (max(side, math.floor(length / beta / side) * side) for length in (height, width))
        elif new_height * new_width < self.least_tokens * area:
            beta = math.sqrt(self.least_tokens * area / (height * width))
            new_height, new_width = (math.ceil(length * beta / side) * side for length in (height, width))
        return new_height, new_width

    def _is_large(self, width: int, height: int) -> bool:
        new_height, new_width = (max(self.patch, round(length / self.side) * self.side) for length in (height, width))
        return new_height * new_width > self.most_tokens * self.side**2 * self.tolerance

    @property
    def patch_length(self) -> int:
        return 3 * self.patch**2

    def plan(self, width: int, height: int, *, field: str = "images") -> PicturePlan:
        whole = self._view(*self._whole_size(width, height))
        if self.tiles is None or not self._is_large(width, height):
            return PicturePlan(width, height, (whole,))
        columns, rows = self.tiles.grid(width, height)
        views = (self._view(self.tiles.side, self.tiles.side),) * (rows * columns)
        if self.tiles.thumbnail and rows * columns != 1:
            views += (whole,)
        return PicturePlan(width, height, views, rows, columns)

    def _view(self, height: int, width: int) -> PictureView:
        rows, columns = height // self.patch, width // self.patch
        return PictureView(height, width, rows, columns, (rows // self.merge) * (columns // self.merge))

    def patches(self, picture: Picture) -> PicturePatches:
        plan = self.plan(picture.width, picture.height)
        views = []
        if plan.tile_rows:
            tile = plan.views[0].height
            size = plan.tile_rows * tile, plan.tile_columns * tile
            pixels = resized(picture.pixels, *size, self.method)
            views += [
                pixels[top : top + tile, left : left + tile]
                for top in range(0, size[0], tile)
                for left in range(0, size[1], tile)
            ]
        views += [resized(picture.pixels, view.height, view.width, self.method) for view in plan.views[len(views) :]]
        return PicturePatches(
            plan,
            joined([patches_channels_last(view, self.patch) for view in views]),
            self.levels.table(),
            patch_channels(self.patch, last=True),
            np.concatenate([positions_by_row(view.rows, view.columns) for view in plan.views]),
        )

    def expansion(self, plan: PicturePlan) -> tuple[str | TokenRun, ...]:
        text: list[str | TokenRun] = []
        names = [
            f"<|img_row_{row + 1}_col_{column + 1}|>"
            for row in range(plan.tile_rows)
            for column in range(plan.tile_columns)
        ]
        for number, view in enumerate(plan.views):
            if self.special_tokens and len(plan.views) > 1:
                text.append(names[number] if number < len(names) else "<|img_thumbnail|>")
            text.append(TokenRun(self.image_token, view.tokens))
        return ("<|image_start|>", *text, "<|image_end|>") if self.special_tokens else tuple(text)
