"""Qwen3-VL and Qwen3.5: pictures at their own resolution, in patches ordered by the blocks that the merger joins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

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
from rekindle._src.images.settings import MOST_PIXELS, ProcessorSettings
from rekindle._src.images.transforms import BICUBIC, PixelLevels, resized

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # transformers' defaults
_MOST_RATIO = 200


@dataclass(frozen=True)
class QwenPictures(PictureProcessor):
    """`Qwen2VLImageProcessor`: sizes are multiples of a merged block of patches, within bounds of pixels.

    A chat template writes the two tokens around the marker. `frames` is how often a picture's patches are doubled for
    the convolution over time.
    """

    patch: int
    merge: int
    frames: int
    least_pixels: int
    most_pixels: int
    method: int
    levels: PixelLevels

    marker: ClassVar[str] = "<|image_pad|>"
    image_token: ClassVar[str] = "<|image_pad|>"
    before: ClassVar[str] = "<|vision_start|>"
    after: ClassVar[str] = "<|vision_end|>"

    @classmethod
    def read(cls, settings: ProcessorSettings, processor: ProcessorSettings, config: ProcessorSettings) -> Self:
        settings.only("do_resize", True)
        least, most = 56 * 56, 28 * 28 * 1280
        if "size" in settings:
            least, most = settings.sides("size", "shortest_edge", "longest_edge", most=MOST_PIXELS)
        least = settings.whole("min_pixels", least, 1, MOST_PIXELS)
        most = settings.whole("max_pixels", most, 1, MOST_PIXELS)
        if least > most:
            raise settings.wrong("size", f"has at least {least:,} pixels and at most {most:,}")
        return cls(
            patch=settings.whole("patch_size", 14, 1, 256),
            merge=settings.whole("merge_size", 2, 1, 16),
            frames=settings.whole("temporal_patch_size", 2, 1, 8),
            least_pixels=least,
            most_pixels=most,
            method=settings.filter(BICUBIC),
            levels=PixelLevels.read(settings, _MEAN, _STD),
        )

    @property
    def patch_length(self) -> int:
        return 3 * self.frames * self.patch**2

    def plan(self, width: int, height: int, *, field: str = "images") -> PicturePlan:
        if max(width, height) / min(width, height) > _MOST_RATIO:
            problem = f"one side is more than {_MOST_RATIO} times as long as the other, which this model can't read"
            raise refused_size(width, height, problem, field)
        block = self.patch * self.merge
        new_height, new_width = round(height / block) * block, round(width / block) * block
        if new_height * new_width > self.most_pixels:
            beta = math.sqrt((height * width) / self.most_pixels)
            new_height = max(block, math.floor(height / beta / block) * block)
            new_width = max(block, math.floor(width / beta / block) * block)
        elif new_height * new_width < self.least_pixels:
            beta = math.sqrt(self.least_pixels / (height * width))
            new_height = math.ceil(height * beta / block) * block
            new_width = math.ceil(width * beta / block) * block
        rows, columns = new_height // self.patch, new_width // self.patch
        view = PictureView(new_height, new_width, rows, columns, rows * columns // self.merge**2)
        return PicturePlan(width, height, (view,))

    def patches(self, picture: Picture) -> PicturePatches:
        plan = self.plan(picture.width, picture.height)
        view, patch, merge = plan.views[0], self.patch, self.merge
        pixels = resized(picture.pixels, view.height, view.width, self.method)
        rows, columns = view.rows // merge, view.columns // merge
        blocks = pixels.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        frames = np.broadcast_to(blocks[..., None, :, :], (*blocks.shape[:5], self.frames, patch, patch))
        places = np.indices((view.rows, view.columns), dtype=np.int32)
        positions = places.reshape(2, rows, merge, columns, merge).transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        return PicturePatches(
            plan,
            frames.reshape(view.rows * view.columns, -1),
            self.levels.table(),
            patch_channels(patch, last=False, frames=self.frames),
            np.ascontiguousarray(positions),
        )

    def expansion(self, plan: PicturePlan) -> tuple[str | TokenRun, ...]:
        return (TokenRun(self.image_token, plan.tokens),)

    @classmethod
    def from_mmproj(cls, clip: ProcessorSettings, tokens: tuple[int, int] | None) -> Self:
        patch, merge = clip.whole("patch_size", 16, 1, 256), clip.whole("spatial_merge_size", 2, 1, 16)
        least, most = tokens or (64, 16_384)  # 65,536 and 16,777,216 pixels, as in Qwen3-VL's own files
        size = {"shortest_edge": least * (patch * merge) ** 2, "longest_edge": most * (patch * merge) ** 2}
        return cls._of_mmproj(clip, {"patch_size": patch, "merge_size": merge, "size": size}, {})
