"""Reads an image file's format, size and orientation from its header, without a decoder, and takes out the rest.

A stranger's file meets a decoder only after its size is known and within bounds. Decoders also spend time and memory
on what is not a pixel: EXIF, comments, profiles, frames. So each format counts the parts of a file, refuses one that
has more of them than any real file, and gives its decoder the parts alone that pixels depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rekindle._src.images.formats import bmp, gif, jpeg, png, tiff, webp
from rekindle._src.images.formats.parts import AGAIN, CONVERT, HeaderProblem, ImageHeader


class Format(NamedTuple):
    """A format that is read: how its files begin, and functions of a whole file."""

    begins: Callable[[bytes], bool]
    read: Callable[[bytes], ImageHeader]
    bare: Callable[[bytes], bytes]


FORMATS = {
    "PNG": Format(lambda data: data.startswith(png.START), png.read, png.bare),
    "JPEG": Format(lambda data: data.startswith(jpeg.START), jpeg.read, jpeg.bare),
    "WEBP": Format(lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP", webp.read, webp.bare),
    "GIF": Format(lambda data: data.startswith(gif.STARTS), gif.read, gif.bare),
    "BMP": Format(lambda data: data.startswith(bmp.START), bmp.read, bmp.bare),
    "TIFF": Format(lambda data: data.startswith(tiff.STARTS), tiff.read, tiff.bare),
}

# Formats that are refused, by how their files begin.
_REFUSED = (
    (b"%PDF", "a PDF"), (b"%!PS", "PostScript"), (b"\xc5\xd0\xd3\xc6", "PostScript"), (b"8BPS", "a Photoshop file"),
    (b"\x00\x00\x01\x00", "an icon"), (b"\x00\x00\x02\x00", "a cursor"), (b"\x76\x2f\x31\x01", "OpenEXR"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"), (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"), (b"II+\x00", "BigTIFF"), (b"MM\x00+", "BigTIFF"), (b"qoif", "QOI"),
    (b"\x1f\x8b", "a gzip archive"), (b"PK\x03\x04", "a zip archive"), (b"DDS ", "a DDS texture"),
    *((b"P%d" % number, "a PNM file") for number in range(1, 8)),
)  # fmt: skip
_BRANDS = ((b"avif", "AVIF"), (b"avis", "AVIF"), (b"hei", "HEIC"), (b"hev", "HEIC"), (b"mif1", "HEIC"))


def read_header(data: bytes) -> ImageHeader:
    """Return the header of an image file. Raises `HeaderProblem` for other, animated and unsupported files."""
    if not data:
        raise HeaderProblem("is empty", "Pass a file that has a picture")
    format = next((one for one in FORMATS.values() if one.begins(data)), None)
    if format is None:
        raise HeaderProblem(f"is {_name(data)}; {', '.join(FORMATS)} are read", CONVERT)
    try:
        header = format.read(data)
    except IndexError:  # of one byte beyond the end
        raise HeaderProblem("ends within its header", AGAIN) from None
    if header.width < 1 or header.height < 1:
        raise HeaderProblem(f"has no pixels: it is {header.width} × {header.height}", AGAIN)
    return header


def bare_file(data: bytes, header: ImageHeader) -> bytes:
    """Return an image file for its decoder, without metadata: decoders spend unbounded time and memory on it."""
    return FORMATS[header.format].bare(data)


def _name(data: bytes) -> str:
    """Describe a refused file."""
    for start, name in _REFUSED:
        if data.startswith(start):
            return name
    if data[4:8] == b"ftyp":
        return next((name for brand, name in _BRANDS if data[8:12].startswith(brand)), "a video or another container")
    text = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in text or text.startswith(b"<?xml"):
        return "SVG"
    if text.startswith((b"<!doctype html", b"<html")):
        return "a web page"
    return "no image file"
