"""WebP: chunks in a RIFF file; a file that is more than one chunk of pixels begins with VP8X."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle._src.images.formats.parts import AGAIN, STILL, FileChunk, HeaderProblem, ImageHeader, whole
from rekindle._src.images.formats.tiff import MOST_EXIF, exif_orientation

_MOST_CHUNKS = 256
_ANIMATED, _ALPHA = 0x02, 0x10  # flags of VP8X
_PIXELS = (b"VP8 ", b"VP8L")


def read(data: bytes) -> ImageHeader:
    """Return the header of a WebP."""
    kind = data[12:16]
    if kind == b"VP8X":
        if whole(data, 20, 1) & _ANIMATED:
            raise HeaderProblem("is an animated WebP", STILL)
        exif = next((one for one in _chunks(data) if one.kind == b"EXIF"), None)
        orientation = 1
        if exif is not None:
            content = data[exif.at + 8 : exif.at + 8 + min(exif.size, MOST_EXIF)]
            orientation = exif_orientation(content.removeprefix(b"Exif\x00\x00"))
        return ImageHeader("WEBP", 1 + whole(data, 24, 3), 1 + whole(data, 27, 3), orientation)
    if kind == b"VP8L" and whole(data, 20, 1) == 0x2F:
        bits = whole(data, 21, 4)
        return ImageHeader("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return ImageHeader("WEBP", whole(data, 26, 2) & 0x3FFF, whole(data, 28, 2) & 0x3FFF)
    raise HeaderProblem("is a WebP with a broken header", AGAIN)


def bare(data: bytes) -> bytes:
    """Return a WebP without profile, EXIF, XMP and unknown chunks."""
    view, parts = memoryview(data), list[memoryview | bytes]()
    for kind, at, size in _chunks(data):
        if kind == b"VP8X":
            parts = [b"VP8X\x0a\x00\x00\x00" + bytes([data[20] & _ALPHA, 0, 0, 0]) + data[24:30]]
        elif kind == b"ALPH" or kind in _PIXELS:
            content = view[at : at + 8 + size]
            parts += [content, bytes(len(content) % 2)]
            if kind in _PIXELS:
                break
    body = b"".join([b"WEBP", *parts])
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def _chunks(data: bytes) -> Iterator[FileChunk]:
    at = 12
    for _ in range(_MOST_CHUNKS):
        if at + 8 > len(data):
            return
        chunk = FileChunk(data[at : at + 4], at, whole(data, at + 4, 4))
        yield chunk
        at += 8 + chunk.size + chunk.size % 2
    raise HeaderProblem(f"is a WebP of more than {_MOST_CHUNKS} chunks", AGAIN)
