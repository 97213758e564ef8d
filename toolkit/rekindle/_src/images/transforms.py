"""The arithmetic that all image processors share: resizing, cutting into patches, and levels of pixels as floats.

Pixels stay bytes until they are patches. What transformers computes for each pixel, a product in float64, a cast, then
a difference and a quotient in float32, depends on nothing but the byte and its channel, so a table of 256 entries a
channel has all of its results, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rekindle._src.images.picture import Pixels
from rekindle._src.images.settings import ProcessorSettings
from rekindle.errors import MissingExtra

BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # Pillow's numbers
Codes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def resized(pixels: Pixels, height: int, width: int, method: int) -> Pixels:
    """Return the pixels at another size, as Pillow resizes them; as they are if they have it. Raises `MissingExtra`."""
    if pixels.shape[:2] == (height, width):
        return pixels
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("pillow", "images") from None
    return np.asarray(Image.fromarray(pixels).resize((width, height), resample=Image.Resampling(method)))


@dataclass(frozen=True, slots=True)
class PixelLevels:
    """How bytes become floats: a factor, then a mean and a standard deviation of each channel.

    `fused` is the arithmetic of processors that need torchvision: mean and deviation are divided by the factor first.
    """

    factor: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None
    fused: bool = False

    @classmethod
    def read(
        cls,
        settings: ProcessorSettings,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        *,
        normalize: bool = True,
        fused: bool = False,
    ) -> PixelLevels:
        """Return the levels that a file asks for."""
        scales, normalizes = settings.flag("do_rescale", True), settings.flag("do_normalize", normalize)
        factor = settings.number("rescale_factor", 1 / 255, 1e-9, 1e3)
        mean = settings.channels("image_mean", mean, -1000.0)
        std = settings.channels("image_std", std, 1e-6)
        return cls(factor if scales else None, mean if normalizes else None, std if normalizes else None, fused)

    def table(self) -> Floats:
        """Return the floats of all bytes, [3, 256]."""
        values = np.tile(np.arange(256, dtype=np.uint8), (3, 1))
        factor = self.factor
        if self.mean is None or self.std is None:
            if factor is None:
                return values.astype(np.float32)
            if self.fused:
                return values.astype(np.float32) * np.float32(factor)
            return (values.astype(np.float64) * factor).astype(np.float32)
        mean, std = (np.array(channels, np.float32)[:, None] for channels in (self.mean, self.std))
        if self.fused and factor is not None:
            mean, std, factor = mean * np.float32(1 / factor), std * np.float32(1 / factor), None
        levels = (
            values.astype(np.float32) if factor is None else (values.astype(np.float64) * factor).astype(np.float32)
        )
        return (levels - mean) / std


def patches_channels_first(pixels: Pixels, patch: int) -> Codes:
    """Return patches row by row, [patches, C × patch × patch]: the order of a convolution's weights."""
    height, width, _ = pixels.shape
    grid = pixels.reshape(height // patch, patch, width // patch, patch, 3)
    return grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3 * patch * patch)


def patches_channels_last(pixels: Pixels, patch: int) -> Codes:
    """Return patches row by row, [patches, patch × patch × C]."""
    height, width, _ = pixels.shape
    grid = pixels.reshape(height // patch, patch, width // patch, patch, 3)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, patch * patch * 3)


def positions_by_row(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the row and the column of each patch, row by row, [patches, 2]."""
    return np.moveaxis(np.indices((rows, columns), dtype=np.int32), 0, -1).reshape(-1, 2)
