"""JPEG: segments that have a marker and a length, and scans of pixels after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rekindle._src.images.formats.parts import AGAIN, CONVERT, HeaderProblem, ImageHeader, whole
from rekindle._src.images.formats.tiff import MOST_EXIF, exif_orientation

START = b"\xff\xd8\xff"
_MOST_SEGMENTS, _MOST_METADATA = 1024, 1 << 24  # their number and bytes; photographs have about 20, and 1 MB
_MOST_TABLES = 1 << 16  # bytes of frames and tables before the pixels, which a decoder reads; encoders write 1,000
_MOST_FILL = 1 << 16  # 0xFF before markers, which are passed over one by one
_MOST_SCANS = 64  # encoders write about 10
_BLOCK = 32  # pixels along each side of a block of four by four samples, the largest; a decoder completes blocks
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers of no length
_APP0, _EXIF, _ADOBE, _SCAN = 0xE0, 0xE1, 0xEE, 0xDA
_TABLES = frozenset({0xC4, 0xDB, 0xDD})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Scans of these take 1.3 ns a pixel and 9 ns a byte, at most. A likely decision takes less than a bit in arithmetic
# coding, so bytes would not bound it, and browsers do not read it.
_HUFFMAN = (0xC0, 0xC1, 0xC2)


class _Segment(NamedTuple):
    marker: int
    start: int  # of its content
    stop: int


def read(data: bytes) -> ImageHeader:
    """Return the header of a JPEG."""
    size, orientation, exif, tables, scans = None, 1, 0, 0, 0
    for marker, start, stop in _segments(data):
        if marker in _FRAMES:
            if size is not None:
                raise HeaderProblem("is a JPEG with two headers", AGAIN)
            if marker not in _HUFFMAN:
                raise HeaderProblem("is a JPEG of a rare kind, lossless or with arithmetic coding", CONVERT)
            size = whole(data, start + 3, 2, "big"), whole(data, start + 1, 2, "big")
        if marker in _TABLES or marker in _FRAMES:
            tables += stop - start
            if tables > _MOST_TABLES:
                raise HeaderProblem(f"is a JPEG with more than {_MOST_TABLES:,} bytes of tables", AGAIN)
        if marker == _EXIF and data[start : start + 6] == b"Exif\x00\x00":
            first = not exif
            exif += stop - start + 2
            if exif > MOST_EXIF:
                raise HeaderProblem(f"is a JPEG with more than {MOST_EXIF:,} bytes of EXIF", AGAIN)
            if first:
                orientation = exif_orientation(data[start + 6 : stop])
        if marker == _SCAN:
            scans = data.count(b"\xff\xda", start - 4)
    if size is None:
        raise HeaderProblem("is a JPEG without its size", AGAIN)
    if scans > _MOST_SCANS:
        raise HeaderProblem(f"is a JPEG of {scans:,} scans; at most {_MOST_SCANS} are read", CONVERT)
    blocks = -(-size[0] // _BLOCK) * -(-size[1] // _BLOCK)
    return ImageHeader("JPEG", *size, orientation, passes=scans * blocks * _BLOCK * _BLOCK)


def bare(data: bytes) -> bytes:
    """Return a JPEG without metadata. Of its segments JFIF and Adobe stay, since they name the space of colours."""
    view, parts = memoryview(data), list[memoryview | bytes]([START[:2]])
    for marker, start, stop in _segments(data):
        if marker == _SCAN:
            parts.append(view[start - 4 :])
        elif marker in _TABLES or marker in _FRAMES:
            parts.append(view[start - 4 : stop])
        elif marker == _APP0 and stop - start >= 14 and data[start : start + 5] == b"JFIF\x00":
            parts.append(b"\xff\xe0\x00\x10" + data[start : start + 12] + b"\x00\x00")  # without its thumbnail
        elif marker == _ADOBE and stop - start >= 12 and data[start : start + 5] == b"Adobe":
            parts.append(b"\xff\xee\x00\x0e" + data[start : start + 12])
    return b"".join(parts)


def _segments(data: bytes) -> Iterator[_Segment]:
    """Yield the segments up to the header of the first scan, and that last."""
    at, metadata, fill = 2, 0, 0
    for _ in range(_MOST_SEGMENTS):
        if data[at] != 0xFF:
            raise HeaderProblem("is a JPEG with something else between its segments", AGAIN)
        while data[at] == 0xFF:
            at, fill = at + 1, fill + 1
            if fill > _MOST_FILL:
                raise HeaderProblem(f"is a JPEG with more than {_MOST_FILL:,} bytes between its segments", AGAIN)
        marker = data[at]
        at += 1
        if marker in _ALONE:
            continue
        length = whole(data, at, 2, "big")
        if length < 2:
            raise HeaderProblem("is a JPEG with a segment of no length", AGAIN)
        if marker != _SCAN:
            metadata += length
            if metadata > _MOST_METADATA:
                raise HeaderProblem(f"is a JPEG with more than {_MOST_METADATA:,} bytes before its pixels", AGAIN)
        yield _Segment(marker, at + 2, at + length)
        if marker == _SCAN:
            return
        at += length
    raise HeaderProblem(f"is a JPEG of more than {_MOST_SEGMENTS:,} segments", AGAIN)
