"""Reads an image file's format, size and orientation from its header, without a decoder.

A stranger's file meets a decoder only after its size is known and within bounds. Decoders also spend time on what is
not a pixel: comments, profiles, colour tables, frames. So each walk here counts the parts of a file, and refuses one
that has more of them than any real file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_CONVERT = "Convert it to PNG or JPEG"
_AGAIN = "Save or download it again"
_STILL = "Pass the frame that is meant, as an image of its own"

_MOST_CHUNKS, _MOST_DATA_CHUNKS = 256, 1 << 17  # of a PNG: what is not pixels, and what is
_MOST_SEGMENTS, _MOST_METADATA = 1024, 1 << 24  # of a JPEG: their number and bytes; photographs have about 20, and 1 MB
_MOST_FILL = 1 << 16  # 0xFF before the markers of a JPEG, which are passed over one by one
_MOST_EXIF = 1 << 20
_MOST_SCANS = 64  # each scan of a progressive JPEG passes over all of its pixels; encoders write about 10
_MOST_BLOCKS, _MOST_COMMENT = 400_000, 1 << 16  # of a GIF: blocks of up to 255 bytes, and bytes outside of frames
_MOST_TAGS = 256  # of a TIFF's directory
# Pillow decodes these with libtiff, which prints what is wrong with a file on the process's standard error: lines of a
# stranger in the log of a server, or in a notebook's cell.
COMPRESSED_TIFF = "is a compressed TIFF", _CONVERT
_TIFF_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}  # bytes of each type
_WIDTH, _HEIGHT, _COMPRESSION, _ORIENTATION, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 259, 274, 322, 323

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


class HeaderProblem(Exception):
    """The file can't be an image that is read: `problem` is the reason, and `fix` the remedy."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


class ImageHeader(NamedTuple):
    """The format of an image file, its stored size in pixels, and its EXIF orientation, from 1 to 8."""

    format: str
    width: int
    height: int
    orientation: int = 1

    @property
    def upright(self) -> tuple[int, int]:
        """Return width and height once the picture is turned upright."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def read_header(data: bytes) -> ImageHeader:
    """Return the header of an image file. Raises `HeaderProblem` for what is none, is animated, or is not read here."""
    try:
        header = _reader(data)(data)
    except IndexError:  # of one byte beyond the end
        raise HeaderProblem("ends within its header", _AGAIN) from None
    if header.width < 1 or header.height < 1:
        raise HeaderProblem(f"has no pixels: it is {header.width} × {header.height}", _AGAIN)
    return header


def _reader(data: bytes) -> Callable[[bytes], ImageHeader]:
    if not data:
        raise HeaderProblem("is empty", "Pass a file that has a picture")
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _gif
    if data[:2] == b"BM":
        return _bmp
    if data[:4] in (b"II*\x00", b"MM\x00*"):
        return _tiff
    raise HeaderProblem(f"is {_name(data)}; {', '.join(FORMATS)} are read", _CONVERT)


def _name(data: bytes) -> str:
    """Return what a file is that is refused."""
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


def _whole(data: bytes, at: int, size: int, order: str = "little") -> int:
    """Return the whole number of `size` bytes at a place. Raises `IndexError` beyond the end."""
    if at < 0 or at + size > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + size], "big" if order == "big" else "little")


def _png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise HeaderProblem("is a PNG without its first chunk", _AGAIN)
    width, height = _whole(data, 16, 4, "big"), _whole(data, 20, 4, "big")
    orientation, at, pixels, others = 1, 8, 0, 0
    while at + 8 <= len(data):
        kind, start, size = data[at + 4 : at + 8], at + 8, _whole(data, at, 4, "big")
        pixels, others = pixels + (kind == b"IDAT"), others + (kind != b"IDAT")
        if pixels > _MOST_DATA_CHUNKS or others > _MOST_CHUNKS:
            raise HeaderProblem(f"is a PNG of more than {_MOST_CHUNKS} chunks that are not pixels", _AGAIN)
        if kind == b"acTL":
            raise HeaderProblem("is an animated PNG", _STILL)
        if kind == b"IHDR" and at != 8:
            raise HeaderProblem("is a PNG with two headers", _AGAIN)
        if kind == b"eXIf":
            orientation = _exif_orientation(data[start : start + min(size, _MOST_EXIF)])
        if kind == b"IEND":
            break
        at = start + size + 4
    return ImageHeader("PNG", width, height, orientation)


def _jpeg(data: bytes) -> ImageHeader:
    size, orientation, at, exif, metadata, fill = None, 1, 2, 0, 0, 0
    for _ in range(_MOST_SEGMENTS):
        if data[at] != 0xFF:
            raise HeaderProblem("is a JPEG with something else between its segments", _AGAIN)
        while data[at] == 0xFF:
            at, fill = at + 1, fill + 1
            if fill > _MOST_FILL:
                raise HeaderProblem(f"is a JPEG with more than {_MOST_FILL:,} bytes between its segments", _AGAIN)
        marker = data[at]
        at += 1
        if marker in (0x01, *range(0xD0, 0xD8)):  # these have no length
            continue
        length = _whole(data, at, 2, "big")
        if length < 2:
            raise HeaderProblem("is a JPEG with a segment of no length", _AGAIN)
        if marker == 0xDA:  # what follows are the pixels
            break
        metadata += length
        if metadata > _MOST_METADATA:
            raise HeaderProblem(f"is a JPEG with more than {_MOST_METADATA:,} bytes before its pixels", _AGAIN)
        if marker in range(0xC0, 0xD0) and marker not in (0xC4, 0xC8, 0xCC):
            if size is not None:
                raise HeaderProblem("is a JPEG with two headers", _AGAIN)
            size = _whole(data, at + 5, 2, "big"), _whole(data, at + 3, 2, "big")
        if marker == 0xE1 and data[at + 2 : at + 8] == b"Exif\x00\x00":
            exif += length
            if exif > _MOST_EXIF:
                raise HeaderProblem(f"is a JPEG with more than {_MOST_EXIF:,} bytes of EXIF", _AGAIN)
            if exif == length:
                orientation = _exif_orientation(data[at + 8 : at + length])
        at += length
    else:
        raise HeaderProblem(f"is a JPEG of more than {_MOST_SEGMENTS:,} segments", _AGAIN)
    if size is None:
        raise HeaderProblem("is a JPEG without its size", _AGAIN)
    scans = data.count(b"\xff\xda")
    if scans > _MOST_SCANS:
        raise HeaderProblem(f"is a JPEG of {scans:,} scans; at most {_MOST_SCANS} are read", _CONVERT)
    return ImageHeader("JPEG", *size, orientation)


def _webp(data: bytes) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8X":
        if _whole(data, 20, 1) & 2:
            raise HeaderProblem("is an animated WebP", _STILL)
        return ImageHeader(
            "WEBP", 1 + _whole(data, 24, 3), 1 + _whole(data, 27, 3), _exif_orientation(_webp_exif(data))
        )
    if kind == b"VP8L" and _whole(data, 20, 1) == 0x2F:
        bits = _whole(data, 21, 4)
        return ImageHeader("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return ImageHeader("WEBP", _whole(data, 26, 2) & 0x3FFF, _whole(data, 28, 2) & 0x3FFF)
    raise HeaderProblem("is a WebP with a broken header", _AGAIN)


def _webp_exif(data: bytes) -> bytes:
    at = 12
    for _ in range(_MOST_CHUNKS):
        if at + 8 > len(data):
            return b""
        size = _whole(data, at + 4, 4)
        if data[at : at + 4] == b"EXIF":
            return data[at + 8 : at + 8 + min(size, _MOST_EXIF)].removeprefix(b"Exif\x00\x00")
        at += 8 + size + size % 2
    raise HeaderProblem(f"is a WebP of more than {_MOST_CHUNKS} chunks", _AGAIN)


def _gif(data: bytes) -> ImageHeader:
    width, height, flags = _whole(data, 6, 2), _whole(data, 8, 2), _whole(data, 10, 1)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    frames = blocks = others = 0  # blocks, and bytes outside of frames
    long = HeaderProblem(f"is a GIF of more than {_MOST_BLOCKS:,} blocks, or with a long comment", _CONVERT)
    while at < len(data) and data[at] != 0x3B:
        if others > _MOST_COMMENT:
            raise long
        kind, at = data[at], at + 1
        if kind == 0x2C:
            frames += 1
            if frames > 1:
                raise HeaderProblem("is an animated GIF", _STILL)
            width = max(width, _whole(data, at, 2) + _whole(data, at + 4, 2))
            height = max(height, _whole(data, at + 2, 2) + _whole(data, at + 6, 2))
            flags = data[at + 8]
            at += 10 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
        elif kind == 0x21:
            at += 1
        else:
            others += 1
            continue
        while at < len(data) and data[at]:
            others += data[at] if kind == 0x21 else 0
            at, blocks = at + 1 + data[at], blocks + 1
            if blocks > _MOST_BLOCKS or others > _MOST_COMMENT:
                raise long
        at += 1
    if not frames:
        raise HeaderProblem("is a GIF without a frame", _AGAIN)
    return ImageHeader("GIF", width, height)


def _bmp(data: bytes) -> ImageHeader:
    size = _whole(data, 14, 4)
    if size == 12:
        return ImageHeader("BMP", _whole(data, 18, 2), _whole(data, 20, 2))
    if size not in (40, 52, 56, 64, 108, 124):
        raise HeaderProblem("is a BMP with a broken header", _AGAIN)
    width, height = _whole(data, 18, 4), _whole(data, 22, 4)
    height = (1 << 32) - height if height >= 1 << 31 else height  # negative where rows are stored from the top
    if _whole(data, 30, 4) not in (0, 3):
        raise HeaderProblem("is a compressed BMP", _CONVERT)
    return ImageHeader("BMP", width, height)


def _tiff(data: bytes) -> ImageHeader:
    tags, end = _tiff_tags(data)
    if any(data[end : end + 4]):
        raise HeaderProblem("is a TIFF of several pages", _STILL)
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise HeaderProblem("is a TIFF without its size", _AGAIN)
    if tags.get(_COMPRESSION, 1) != 1:
        raise HeaderProblem(*COMPRESSED_TIFF)
    width, height = tags[_WIDTH], tags[_HEIGHT]
    # A decoder allocates a tile whole.
    if tags.get(_TILE_WIDTH, 1) > 2 * width + 512 or tags.get(_TILE_HEIGHT, 1) > 2 * height + 512:
        raise HeaderProblem("is a TIFF whose tiles are larger than the picture", _AGAIN)
    orientation = tags.get(_ORIENTATION, 1)
    return ImageHeader("TIFF", width, height, orientation if 1 <= orientation <= 8 else 1)


def _tiff_tags(data: bytes) -> tuple[dict[int, int], int]:
    """Return the first directory's tags that are one whole number, and where the place of the next directory is."""
    order = "little" if data[:2] == b"II" else "big"
    at = _whole(data, 4, 4, order)
    count = _whole(data, at, 2, order)
    if count > _MOST_TAGS:
        raise HeaderProblem(f"is a TIFF of {count:,} tags; at most {_MOST_TAGS} are read", _CONVERT)
    tags, apart = {}, 0
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, number = (_whole(data, entry + step, size, order) for step, size in ((0, 2), (2, 2), (4, 4)))
        size = _TIFF_SIZES.get(kind, 1) * number
        apart += size if size > 4 else 0
        if apart > len(data):  # tags may share bytes, and a decoder copies each of them
            raise HeaderProblem("is a TIFF whose tags are larger than the file", _AGAIN)
        if number == 1 and kind in (3, 4):
            tags[tag] = _whole(data, entry + 8, _TIFF_SIZES[kind], order)
    return tags, at + 2 + 12 * count


def _exif_orientation(exif: bytes) -> int:
    """Return the orientation of EXIF data, from 1 to 8; 1 where it is broken, since the picture need not be."""
    if exif[:4] not in (b"II*\x00", b"MM\x00*"):
        return 1
    try:
        orientation = _tiff_tags(exif)[0].get(_ORIENTATION, 1)
    except (IndexError, HeaderProblem):
        return 1
    return orientation if 1 <= orientation <= 8 else 1
