"""GIF: a palette, extensions and a frame, which are chains of blocks of up to 255 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rekindle._src.images.formats.parts import AGAIN, CONVERT, STILL, HeaderProblem, ImageHeader, whole

STARTS = (b"GIF87a", b"GIF89a")
_MOST_BLOCKS, _MOST_COMMENT = 400_000, 1 << 16  # blocks, and bytes outside of frames
_EXTENSION, _FRAME, _END = 0x21, 0x2C, 0x3B
_TRANSPARENCY = 0xF9  # the extension that names the transparent colour


class _Part(NamedTuple):
    kind: int
    start: int
    stop: int


def read(data: bytes) -> ImageHeader:
    """Return the header of a GIF."""
    width, height, frames = whole(data, 6, 2), whole(data, 8, 2), 0
    for kind, start, _ in _parts(data):
        if kind == _FRAME:
            frames += 1
            if frames > 1:
                raise HeaderProblem("is an animated GIF", STILL)
            width = max(width, whole(data, start + 1, 2) + whole(data, start + 5, 2))
            height = max(height, whole(data, start + 3, 2) + whole(data, start + 7, 2))
    if not frames:
        raise HeaderProblem("is a GIF without a frame", AGAIN)
    return ImageHeader("GIF", width, height)


def bare(data: bytes) -> bytes:
    """Return a GIF without comments and extensions of applications."""
    parts = [data[: _after_head(data)]]
    for kind, start, stop in _parts(data):
        if kind == _FRAME or data[start + 1] == _TRANSPARENCY:
            parts.append(data[start:stop])
        if kind == _FRAME:
            parts.append(b";" if stop <= len(data) else b"")  # a frame that was cut off stays so
            break
    return b"".join(parts)


def _after_head(data: bytes) -> int:
    flags = whole(data, 10, 1)
    return 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)


def _parts(data: bytes) -> Iterator[_Part]:
    """Yield the extensions and frames."""
    at, blocks, others = _after_head(data), 0, 0  # blocks, and bytes outside of frames
    long = HeaderProblem(f"is a GIF of more than {_MOST_BLOCKS:,} blocks, or with a long comment", CONVERT)
    while at < len(data) and data[at] != _END:
        if others > _MOST_COMMENT:
            raise long
        start, kind = at, data[at]
        if kind == _FRAME:
            flags = data[at + 9]
            at += 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
        elif kind == _EXTENSION:
            at += 2
        else:
            at, others = at + 1, others + 1
            continue
        while at < len(data) and data[at]:
            others += data[at] if kind == _EXTENSION else 0
            at, blocks = at + 1 + data[at], blocks + 1
            if blocks > _MOST_BLOCKS or others > _MOST_COMMENT:
                raise long
        at += 1
        yield _Part(kind, start, at)
