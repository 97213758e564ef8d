"""PNG: a signature, and chunks that have a length, a kind and a checksum."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle._src.images.formats.parts import AGAIN, STILL, FileChunk, HeaderProblem, ImageHeader, whole
from rekindle._src.images.formats.tiff import MOST_EXIF, exif_orientation

START = b"\x89PNG\r\n\x1a\n"
_MOST_CHUNKS, _MOST_DATA_CHUNKS = 256, 1 << 17  # chunks that are not pixels, and chunks of pixels
_PASSES = 1 << 12  # pixels that take as long as a chunk of pixels, 5 µs
_OF_PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})


def read(data: bytes) -> ImageHeader:
    """Return the header of a PNG."""
    if data[12:16] != b"IHDR":
        raise HeaderProblem("is a PNG without its first chunk", AGAIN)
    width, height = whole(data, 16, 4, "big"), whole(data, 20, 4, "big")
    orientation, passes = 1, 0
    for chunk in _chunks(data):
        if chunk.kind == b"acTL":
            raise HeaderProblem("is an animated PNG", STILL)
        if chunk.kind == b"IHDR" and chunk.at != len(START):
            raise HeaderProblem("is a PNG with two headers", AGAIN)
        if chunk.kind == b"IDAT":
            passes += _PASSES
        if chunk.kind == b"eXIf":
            start = chunk.at + 8
            orientation = exif_orientation(data[start : start + min(chunk.size, MOST_EXIF)])
    return ImageHeader("PNG", width, height, orientation, passes)


def bare(data: bytes) -> bytes:
    """Return a PNG without texts, profiles, EXIF and other chunks that no pixel depends on."""
    view = memoryview(data)
    kept = (view[one.at : one.at + 12 + one.size] for one in _chunks(data) if one.kind in _OF_PIXELS)
    return b"".join([START, *kept])


def _chunks(data: bytes) -> Iterator[FileChunk]:
    at, pixels, others = len(START), 0, 0
    while at + 8 <= len(data):
        chunk = FileChunk(data[at + 4 : at + 8], at, whole(data, at, 4, "big"))
        pixels, others = pixels + (chunk.kind == b"IDAT"), others + (chunk.kind != b"IDAT")
        if pixels > _MOST_DATA_CHUNKS or others > _MOST_CHUNKS:
            raise HeaderProblem(f"is a PNG of more than {_MOST_CHUNKS} chunks that are not pixels", AGAIN)
        yield chunk
        if chunk.kind == b"IEND":
            return
        at += 12 + chunk.size
