"""SmolVLM and Idefics3: pictures in tiles, row by row, and the whole picture once more in the size of a tile."""

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
from rekindle._src.images.settings import MOST_SIDE, ProcessorSettings
from rekindle._src.images.transforms import (
    LANCZOS,
    PixelLevels,
    patches_channels_first,
    positions_by_row,
    resized,
)

_HALF = (0.5, 0.5, 0.5)
_MOST_TILES = 32  # along a side


class _Sizes(NamedTuple):
    """Height and width after the first resize, and after the second, to whole tiles."""

    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True)
class SmolvlmPictures(PictureProcessor):
    """`SmolVLMImageProcessor` and `Idefics3ImageProcessor`.

    A picture is resized until its longer side has `longest` pixels, then to multiples of `tile`. Each tile has
    `tokens` tokens. Without `splits` it is one view, stretched to a tile.
    """

    longest: int
    tile: int
    patch: int
    tokens: int
    splits: bool
    method: int
    levels: PixelLevels

    marker: ClassVar[str] = "<image>"
    image_token: ClassVar[str] = "<image>"

    @classmethod
    def read(cls, settings: ProcessorSettings, processor: ProcessorSettings, config: ProcessorSettings) -> Self:
        settings.only("do_resize", True)
        longest, tile = 4 * 364, 364
        if "size" in settings:
            (longest,) = settings.sides("size", "longest_edge")
        if "max_image_size" in settings:
            (tile,) = settings.sides("max_image_size", "longest_edge")
        if math.ceil(longest / tile) > _MOST_TILES:
            raise settings.wrong("max_image_size", f"makes more than {_MOST_TILES} tiles of a side of {longest} pixels")
        vision = config.part("vision_config")
        patch = vision.whole("patch_size", 16 if tile % 14 else 14, 1, 256)
        if tile % patch:
            raise settings.wrong("max_image_size", f"is {tile} pixels, which are no whole patches of {patch}")
        scale = config.whole("scale_factor", 0, 1, 64)
        if scale and tile // patch % scale:
            raise config.wrong("scale_factor", f"does not divide the {tile // patch} patches of a tile's side")
        tokens = processor.whole("image_seq_len", (tile // patch // scale) ** 2 if scale else 169)
        if scale and tokens != (tile // patch // scale) ** 2:
            raise processor.wrong("image_seq_len", f"is not the {(tile // patch // scale) ** 2} tokens of a tile")
        return cls(
            longest, tile, patch, tokens, settings.flag("do_image_splitting", True), settings.filter(LANCZOS),
            PixelLevels.read(settings, _HALF, _HALF),
        )  # fmt: skip

    @classmethod
    def from_mmproj(cls, clip: ProcessorSettings, tokens: tuple[int, int] | None) -> Self:
        tile, patch = clip.whole("image_size", 512), clip.whole("patch_size", 16, 1, 256)
        keys = {
            "size": {"longest_edge": clip.whole("preproc_image_size", min(4 * tile, MOST_SIDE))},
            "max_image_size": {"longest_edge": tile},
        }
        scale = clip.whole("projector.scale_factor", 4, 1, 64)
        return cls._of_mmproj(clip, keys, {"scale_factor": scale, "vision_config": {"patch_size": patch}})

    def _sizes(self, width: int, height: int) -> _Sizes:
        """Return the sizes that the picture passes through; their roundings are transformers'."""
        ratio = width / height
        if width >= height:
            width, height = self.longest, int(self.longest / ratio)
            height += height % 2
        else:
            height, width = self.longest, int(self.longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        first, ratio = (height, width), width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            height = math.ceil(height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        return _Sizes(first, (height, width))

    @property
    def patch_length(self) -> int:
        return 3 * self.patch**2

    def plan(self, width: int, height: int, *, field: str = "images") -> PicturePlan:
        side = self.tile // self.patch
        view = PictureView(self.tile, self.tile, side, side, self.tokens)
        if not self.splits:
            return PicturePlan(width, height, (view,))
        rows, columns = (length // self.tile for length in self._sizes(width, height).second)
        if rows == columns == 1:
            return PicturePlan(width, height, (view,))
        return PicturePlan(width, height, (view,) * (rows * columns + 1), rows, columns)

    def patches(self, picture: Picture) -> PicturePatches:
        plan, tile = self.plan(picture.width, picture.height), self.tile
        sizes = self._sizes(picture.width, picture.height)
        pixels = resized(picture.pixels, *sizes.first, self.method)
        if self.splits:
            pixels = resized(pixels, *sizes.second, self.method)
        views = [
            pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
            for row in range(plan.tile_rows)
            for column in range(plan.tile_columns)
        ]
        views.append(resized(pixels, tile, tile, self.method))
        positions = positions_by_row(tile // self.patch, tile // self.patch)
        return PicturePatches(
            plan,
            joined([patches_channels_first(view, self.patch) for view in views]),
            self.levels.table(),
            patch_channels(self.patch, last=False),
            np.tile(positions, (len(views), 1)),
        )

    def expansion(self, plan: PicturePlan) -> tuple[str | TokenRun, ...]:
        around, image = "<fake_token_around_image>", TokenRun(self.image_token, self.tokens)
        text: list[str | TokenRun] = []
        for row in range(plan.tile_rows):
            for column in range(plan.tile_columns):
                text += [f"{around}<row_{row + 1}_col_{column + 1}>", image]
            text.append("\n")
        if plan.tile_rows:
            text.append("\n")
        return (*text, f"{around}<global-img>", image, around)
