"""Gemma 4: pictures that keep their ratio, as large as a budget of tokens allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from rekindle._src.images.picture import Picture
from rekindle._src.images.processor import (
    PicturePatches,
    PicturePlan,
    PictureProcessor,
    PictureView,
    TokenRun,
    patch_channels,
    refused_size,
)
from rekindle._src.images.settings import ProcessorSettings, whole_numbers
from rekindle._src.images.transforms import BICUBIC, PixelLevels, patches_channels_last, positions_by_row, resized

_TOKENS = (70, 140, 280, 560, 1120)  # the budgets that the models were trained with
_ZERO, _ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Gemma4Pictures(PictureProcessor):
    """`Gemma4ImageProcessor`: `pool` × `pool` patches make a token, and a picture has at most `most_tokens`."""

    patch: int
    pool: int
    most_tokens: int
    method: int
    levels: PixelLevels

    marker: ClassVar[str] = "<|image|>"
    image_token: ClassVar[str] = "<|image|>"
    fused: ClassVar[bool] = False

    @classmethod
    def read(cls, settings: ProcessorSettings, processor: ProcessorSettings, config: ProcessorSettings) -> Self:
        settings.only("do_resize", True)
        tokens = settings.whole("max_soft_tokens", 280)
        if tokens not in _TOKENS:
            raise settings.wrong("max_soft_tokens", f"is none of {whole_numbers(_TOKENS)}")
        return cls(
            settings.whole("patch_size", 16, 1, 256),
            settings.whole("pooling_kernel_size", 3, 1, 16),
            tokens,
            settings.filter(BICUBIC),
            PixelLevels.read(settings, _ZERO, _ONE, normalize=False, fused=cls.fused),
        )

    @classmethod
    def from_mmproj(cls, clip: ProcessorSettings, tokens: tuple[int, int] | None) -> Self:
        keys = {
            "patch_size": clip.whole("patch_size", 16, 1, 256),
            "pooling_kernel_size": clip.whole("projector.scale_factor", 3, 1, 16),
            "max_soft_tokens": tokens[1] if tokens is not None else 280,
        }
        return cls._of_mmproj(clip, keys, {})

    @property
    def side(self) -> int:
        """The pixels of a token's side."""
        return self.patch * self.pool

    @property
    def patch_length(self) -> int:
        return 3 * self.patch**2

    def plan(self, width: int, height: int, *, field: str = "images") -> PicturePlan:
        budget = self.most_tokens * self.pool**2 * self.patch**2  # pixels
        factor = math.sqrt(budget / (height * width))
        new_height = math.floor(factor * height / self.side) * self.side
        new_width = math.floor(factor * width / self.side) * self.side
        if new_height == 0:
            new_height, new_width = self.side, min(width // height, self.most_tokens) * self.side
        elif new_width == 0:
            new_height, new_width = min(height // width, self.most_tokens) * self.side, self.side
        if not 0 < new_height * new_width <= budget:
            raise refused_size(width, height, f"it has no size within {self.most_tokens} tokens", field)
        rows, columns = new_height // self.patch, new_width // self.patch
        return PicturePlan(
            width, height, (PictureView(new_height, new_width, rows, columns, rows * columns // self.pool**2),)
        )

    def patches(self, picture: Picture) -> PicturePatches:
        plan = self.plan(picture.width, picture.height)
        view = plan.views[0]
        pixels = resized(picture.pixels, view.height, view.width, self.method)
        return PicturePatches(
            plan,
            patches_channels_last(pixels, self.patch),
            self.levels.table(),
            patch_channels(self.patch, last=True),
            positions_by_row(view.rows, view.columns),
        )

    def expansion(self, plan: PicturePlan) -> tuple[str | TokenRun, ...]:
        return ("<|image>", TokenRun(self.image_token, plan.tokens), "<image|>")


@dataclass(frozen=True)
class Gemma4UnifiedPictures(Gemma4Pictures):
    """`Gemma4UnifiedImageProcessor`: one patch a token, as large as the pooled ones of the models with a tower.

    Transformers has it on torchvision alone, which resizes by slightly other arithmetic: some bytes differ by one
    (0.8 % of them at most in 29 of 30 sizes with torchvision 0.28, 21 % in a smooth one).
    """

    fused: ClassVar[bool] = True

    @property
    def patch_length(self) -> int:
        return 3 * self.side**2

    def plan(self, width: int, height: int, *, field: str = "images") -> PicturePlan:
        plan = super().plan(width, height, field=field)
        view = plan.views[0]
        rows, columns = view.height // self.side, view.width // self.side
        return PicturePlan(width, height, (PictureView(view.height, view.width, rows, columns, rows * columns),))

    def patches(self, picture: Picture) -> PicturePatches:
        plan = self.plan(picture.width, picture.height)
        view = plan.views[0]
        pixels = resized(picture.pixels, view.height, view.width, self.method)
        return PicturePatches(
            plan,
            patches_channels_last(pixels, self.side),
            self.levels.table(),
            patch_channels(self.side, last=True),
            positions_by_row(view.rows, view.columns),
        )
