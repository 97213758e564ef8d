"""BMP: a header, a palette and rows."""

from __future__ import annotations

from rekindle._src.images.formats.parts import AGAIN, CONVERT, HeaderProblem, ImageHeader, whole

START = b"BM"


def read(data: bytes) -> ImageHeader:
    """Return the header of a BMP."""
    size = whole(data, 14, 4)
    if size == 12:
        return ImageHeader("BMP", whole(data, 18, 2), whole(data, 20, 2))
    if size not in (40, 52, 56, 64, 108, 124):
        raise HeaderProblem("is a BMP with a broken header", AGAIN)
    width, height = whole(data, 18, 4), whole(data, 22, 4)
    height = (1 << 32) - height if height >= 1 << 31 else height  # negative where rows are stored from the top
    if whole(data, 30, 4) not in (0, 3):
        raise HeaderProblem("is a compressed BMP", CONVERT)
    return ImageHeader("BMP", width, height)


def bare(data: bytes) -> bytes:
    """Return the BMP as it is: its decoder reads nothing but header, palette and pixels."""
    return data
