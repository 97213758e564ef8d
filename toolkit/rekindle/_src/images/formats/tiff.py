"""TIFF: directories of tags, which EXIF consists of, too.

A tag has a type, a count and values, which may lie anywhere in the file; tags may share them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from rekindle._src.images.formats.parts import AGAIN, CONVERT, STILL, HeaderProblem, ImageHeader, whole

STARTS = (b"II*\x00", b"MM\x00*")
MOST_EXIF = 1 << 20  # bytes
_MOST_TAGS = 256  # of a directory
_MOST_STRIPS = 1 << 16  # strips or tiles
_PASSES = 1 << 14  # pixels that take as long as a strip or tile, 4 to 18 µs
_MOST_PLANES = 8
# Pillow decodes these with libtiff, which prints what is wrong with a file on the process's standard error: lines of a
# stranger in the log of a server, or in a notebook's cell.
COMPRESSED = "is a compressed TIFF", CONVERT
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}  # bytes of each type
_WHOLE = (3, 4)  # types of whole numbers, of 2 and 4 bytes
_ORIENTATION = 274
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 256, 257, 258, 259, 262, 266
_STRIPS, _SAMPLES, _ROWS_PER_STRIP, _PLANAR, _COLOURS = 273, 277, 278, 284, 320
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 322, 323, 324, 338, 339
_ONE = (
    _WIDTH, _HEIGHT, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _SAMPLES, _ROWS_PER_STRIP, _PLANAR, _TILE_WIDTH,
    _TILE_HEIGHT,
)  # fmt: skip
# The tags that pixels depend on, and the most numbers that each may have.
_OF_PIXELS = {
    **dict.fromkeys(_ONE, 1), _BITS: _MOST_PLANES, _EXTRA_SAMPLES: _MOST_PLANES, _SAMPLE_FORMAT: _MOST_PLANES,
    _COLOURS: 3 << 8, _STRIPS: _MOST_STRIPS, _TILES: _MOST_STRIPS,
}  # fmt: skip


class _Tag(NamedTuple):
    kind: int  # of its values
    numbers: int  # of values
    at: int  # of its 12 bytes in the directory


class _Directory(NamedTuple):
    order: str
    tags: dict[int, _Tag]  # by number; of tags with the same number, the first
    end: int  # where the place of the next directory stands

    def number(self, data: bytes, tag: int, default: int) -> int:
        """Return the value of a tag that is one whole number."""
        one = self.tags.get(tag)
        if one is None or one.numbers != 1 or one.kind not in _WHOLE:
            return default
        return whole(data, one.at + 8, _SIZES[one.kind], self.order)


def read(data: bytes) -> ImageHeader:
    """Return the header of a TIFF."""
    directory, apart = _directory(data, "is a TIFF", CONVERT), 0
    for one in directory.tags.values():
        size = _SIZES.get(one.kind, 1) * one.numbers
        apart += size if size > 4 else 0
        if apart > len(data):
            raise HeaderProblem("is a TIFF whose tags are larger than the file", AGAIN)
    if any(data[directory.end : directory.end + 4]):
        raise HeaderProblem("is a TIFF of several pages", STILL)
    if _WIDTH not in directory.tags or _HEIGHT not in directory.tags:
        raise HeaderProblem("is a TIFF without its size", AGAIN)
    if _COMPRESSION in directory.tags and directory.number(data, _COMPRESSION, 0) != 1:
        raise HeaderProblem(*COMPRESSED)
    _check_numbers(data, directory)
    width, height = (directory.number(data, tag, 0) for tag in (_WIDTH, _HEIGHT))
    strips = _strips(data, directory, width, height)
    orientation = directory.number(data, _ORIENTATION, 1)
    return ImageHeader("TIFF", width, height, orientation if 1 <= orientation <= 8 else 1, strips * _PASSES)


def _check_numbers(data: bytes, directory: _Directory) -> None:
    for number, most in _OF_PIXELS.items():
        tag = directory.tags.get(number)
        if tag is None:
            continue
        if tag.kind not in _WHOLE:
            raise HeaderProblem(f"is a TIFF whose tag {number} has no whole numbers of 2 or 4 bytes", AGAIN)
        if not 1 <= tag.numbers <= most:
            raise HeaderProblem(
                f"is a TIFF of {tag.numbers:,} numbers in its tag {number}; it has 1 to {most:,}", CONVERT
            )
        size = _SIZES[tag.kind] * tag.numbers
        if size > 4 and whole(data, tag.at + 8, 4, directory.order) + size > len(data):
            raise HeaderProblem("ends within its header", AGAIN)  # Pillow warns of it on standard error


def _strips(data: bytes, directory: _Directory, width: int, height: int) -> int:
    """Return the number of strips or tiles; each is one call of a decoder.

    Raises `HeaderProblem` for more of them than the size of the picture makes.
    """
    if _STRIPS in directory.tags:
        tag, across, down = directory.tags[_STRIPS], width, directory.number(data, _ROWS_PER_STRIP, height)
    elif _TILES in directory.tags:
        tag = directory.tags[_TILES]
        across, down = (directory.number(data, side, 0) for side in (_TILE_WIDTH, _TILE_HEIGHT))
        if across > 2 * width + 512 or down > 2 * height + 512:  # a decoder allocates a tile whole
            raise HeaderProblem("is a TIFF whose tiles are larger than the picture", AGAIN)
    else:
        raise HeaderProblem("is a TIFF without strips or tiles", AGAIN)
    if width and height and min(across, down) < 1:
        raise HeaderProblem("is a TIFF with strips or tiles of no pixels", AGAIN)
    planes = directory.number(data, _SAMPLES, 1) if directory.number(data, _PLANAR, 1) == 2 else 1
    most = -(-width // max(across, 1)) * -(-height // max(down, 1)) * min(planes, _MOST_PLANES)
    if tag.numbers > most:
        raise HeaderProblem(f"is a TIFF of {tag.numbers:,} strips or tiles, and its size makes {most:,}", AGAIN)
    return tag.numbers


def bare(data: bytes) -> bytes:
    """Return the TIFF with a directory of the tags that decide its pixels, at its end. The pixels stay in place.

    The orientation is not among them: what is decoded are pixels as they are stored.
    """
    directory = _directory(data, "is a TIFF", CONVERT)
    tags = {number: tag for number, tag in directory.tags.items() if number in _OF_PIXELS}
    unused = {_TILES, _TILE_WIDTH, _TILE_HEIGHT} if _STRIPS in tags else {_ROWS_PER_STRIP}
    if directory.number(data, _PHOTOMETRIC, 0) != 3:
        unused.add(_COLOURS)
    entries = [data[tag.at : tag.at + 12] for number, tag in tags.items() if number not in unused]
    order: Literal["little", "big"] = "little" if directory.order == "little" else "big"
    pad = len(data) % 2
    place, count = (len(data) + pad).to_bytes(4, order), len(entries).to_bytes(2, order)
    return b"".join([data[:4], place, memoryview(data)[8:], bytes(pad), count, *entries, bytes(4)])


def exif_orientation(exif: bytes) -> int:
    """Return the orientation of EXIF data, from 1 to 8; 1 where it is cut off, since the picture need not be.

    Nothing but this number is read of them. Raises `HeaderProblem` for more tags than any camera writes.
    """
    if exif[:4] not in STARTS:
        return 1
    try:
        directory = _directory(exif, "has EXIF", "Save it without EXIF")
        orientation = directory.number(exif, _ORIENTATION, 1)
    except IndexError:
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def _directory(data: bytes, named: str, fix: str) -> _Directory:
    """Return the first directory. Raises `HeaderProblem` for one of too many tags."""
    order = "little" if data[:2] == b"II" else "big"
    start = whole(data, 4, 4, order)
    count = whole(data, start, 2, order)
    if count > _MOST_TAGS:
        raise HeaderProblem(f"{named} of {count:,} tags; at most {_MOST_TAGS} are read", fix)
    tags, end = dict[int, _Tag](), start + 2 + 12 * count
    for at in range(start + 2, end, 12):
        number, kind, values = (whole(data, at + step, size, order) for step, size in ((0, 2), (2, 2), (4, 4)))
        whole(data, at + 8, 4, order)  # it ends within the file
        tags.setdefault(number, _Tag(kind, values, at))
    return _Directory(order, tags, end)
