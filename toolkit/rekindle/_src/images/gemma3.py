"""Gemma 3: pictures stretched to one square, and, where a file asks for it, crops of wide ones (pan and scan)."""

from __future__ import annotations

import itertools
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
from rekindle._src.images.transforms import (
    BILINEAR,
    PixelLevels,
    patches_channels_first,
    positions_by_row,
    resized,
)

HALF = (0.5, 0.5, 0.5)


class PanAndScan(NamedTuple):
    """When crops of a picture are views too: from this ratio of its sides, up to `most`, of at least `side` pixels."""

    side: int
    most: int
    ratio: float

    def crops(self, width: int, height: int) -> tuple[tuple[int, int, int, int], ...]:
        """Return the crops: left, top, right and bottom, row by row, within the picture."""
        long, short = max(width, height), min(width, height)
        if long / short < self.ratio:
            return ()
        count = min(math.floor(long / self.side), math.floor(long / short + 0.5))
        count = min(self.most, max(2, count))
        across, down = (count, 1) if width >= height else (1, count)
        step_x, step_y = math.ceil(width / across), math.ceil(height / down)
        if min(step_x, step_y) < self.side:
            return ()
        return tuple(
            (step_x * x, step_y * y, min(step_x * (x + 1), width), min(step_y * (y + 1), height))
            for y, x in itertools.product(range(down), range(across))
        )


@dataclass(frozen=True)
class Gemma3Pictures(PictureProcessor):
    """`Gemma3ImageProcessor`: every view is `height` × `width` pixels and `tokens` tokens."""

    height: int
    width: int
    patch: int
    tokens: int
    method: int
    levels: PixelLevels
    scan: PanAndScan | None

    marker: ClassVar[str] = "<start_of_image>"
    image_token: ClassVar[str] = "<image_soft_token>"

    @classmethod
    def read(cls, settings: ProcessorSettings, processor: ProcessorSettings, config: ProcessorSettings) -> Self:
        settings.only("do_resize", True)
        vision = config.part("vision_config")
        patch = vision.whole("patch_size", 14, 1, 256)
        height, width = settings.sides("size", "height", "width") if "size" in settings else (224, 224)
        side = vision.whole("image_size", height)
        if height % patch or width % patch or (height, width) != (side, side):
            raise settings.wrong("size", f"is not the tower's {side} pixels in patches of {patch}")
        tokens = settings.whole("image_seq_length", 256)
        tokens = config.whole("mm_tokens_per_image", processor.whole("image_seq_length", tokens))
        if math.isqrt(tokens) ** 2 != tokens or (side // patch) % math.isqrt(tokens):
            raise settings.wrong(
                "image_seq_length",
                f"makes {tokens} tokens, and {side // patch} patches a side can't be averaged to those",
            )
        scan = PanAndScan(
            settings.whole("pan_and_scan_min_crop_size", 256),
            settings.whole("pan_and_scan_max_num_crops", 4, 1, 64),
            settings.number("pan_and_scan_min_ratio_to_activate", 1.2, 0.0, 1e6),
        )
        return cls(
            height, width, patch, tokens, settings.filter(BILINEAR), PixelLevels.read(settings, HALF, HALF),
            scan if settings.flag("do_pan_and_scan", False) else None,
        )  # fmt: skip

    @classmethod
    def from_mmproj(cls, clip: ProcessorSettings, tokens: tuple[int, int] | None) -> Self:
        side, patch = clip.whole("image_size", 896), clip.whole("patch_size", 14, 1, 256)
        kernel = clip.whole("projector.scale_factor", 4, 1, 64)
        keys = {"size": {"height": side, "width": side}, "image_seq_length": max(1, side // patch // kernel) ** 2}
        return cls._of_mmproj(clip, keys, {"vision_config": {"image_size": side, "patch_size": patch}})

    @property
    def patch_length(self) -> int:
        return 3 * self.patch**2

    def plan(self, width: int, height: int, *, field: str = "images") -> PicturePlan:
        crops = self.scan.crops(width, height) if self.scan is not None else ()
        view = PictureView(self.height, self.width, self.height // self.patch, self.width // self.patch, self.tokens)
        return PicturePlan(width, height, (view,) * (1 + len(crops)))

    def patches(self, picture: Picture) -> PicturePatches:
        plan = self.plan(picture.width, picture.height)
        views = [picture.pixels]
        if self.scan is not None:
            crops = self.scan.crops(picture.width, picture.height)
            views += [picture.pixels[top:bottom, left:right] for left, top, right, bottom in crops]
        codes = [
            patches_channels_first(
                resized(np.ascontiguousarray(view), self.height, self.width, self.method), self.patch
            )
            for view in views
        ]
        positions = positions_by_row(self.height // self.patch, self.width // self.patch)
        return PicturePatches(
            plan,
            joined(codes),
            self.levels.table(),
            patch_channels(self.patch, last=False),
            np.tile(positions, (len(views), 1)),
        )

    def expansion(self, plan: PicturePlan) -> tuple[str | TokenRun, ...]:
        image = (f"\n\n{self.marker}", TokenRun(self.image_token, self.tokens), "<end_of_image>\n\n")
        if len(plan.views) == 1:
            return image
        crops: list[str | TokenRun] = [*image]
        for _ in plan.views[2:]:
            crops += [" ", *image]
        return (
            "Here is the original image ", *image, " and here are some crops to help you see better ", *crops
        )  # fmt: skip
