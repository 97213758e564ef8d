"""Names that all formats share: the header of an image file, and the error for a file that can't be read."""

from __future__ import annotations

from typing import NamedTuple

CONVERT = "Convert it to PNG or JPEG"
AGAIN = "Save or download it again"
STILL = "Pass the frame that is meant, as an image of its own"


class HeaderProblem(Exception):
    """The file can't be an image that is read: `problem` is the reason, and `fix` the remedy."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


SCANS = 18  # that the largest picture may have, as encoders write for CMYK; for other pictures they write 10


class ImageHeader(NamedTuple):
    """The format of an image file, its stored size in pixels, and its EXIF orientation, from 1 to 8."""

    format: str
    width: int
    height: int
    orientation: int = 1
    passes: int = 0  # pixels that its scans pass over; other parts count as the pixels that take the same time

    @property
    def weight(self) -> int:
        """The pixels that bound a decoder's time: the decoded ones, or an 18th of the skipped ones."""
        return max(self.width * self.height, self.passes // SCANS)

    @property
    def upright(self) -> tuple[int, int]:
        """Return width and height once the picture is turned upright."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


class FileChunk(NamedTuple):
    """A part of a file that says its kind and its size; its content begins 8 bytes after `at`."""

    kind: bytes
    at: int
    size: int  # of its content


def whole(data: bytes, at: int, size: int, order: str = "little") -> int:
    """Return the whole number of `size` bytes at a place. Raises `IndexError` beyond the end."""
    if at < 0 or at + size > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + size], "big" if order == "big" else "little")
