"""TIFF: directories of tags, which EXIF consists of, too."""

from __future__ import annotations

from rekindle._src.images.formats.parts import AGAIN, CONVERT, STILL, HeaderProblem, ImageHeader, whole

STARTS = (b"II*\x00", b"MM\x00*")
MOST_EXIF = 1 << 20  # bytes
_MOST_TAGS = 256  # of a directory
# Pillow decodes these with libtiff, which prints what is wrong with a file on the process's standard error: lines of a
# stranger in the log of a server, or in a notebook's cell.
COMPRESSED = "is a compressed TIFF", CONVERT
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}  # bytes of each type
_WHOLE = (3, 4)  # types of whole numbers, of 2 and 4 bytes
_WIDTH, _HEIGHT, _COMPRESSION, _ORIENTATION, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 259, 274, 322, 323


def read(data: bytes) -> ImageHeader:
    """Return the header of a TIFF."""
    tags, end = _tags(data)
    if any(data[end : end + 4]):
        raise HeaderProblem("is a TIFF of several pages", STILL)
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise HeaderProblem("is a TIFF without its size", AGAIN)
    if tags.get(_COMPRESSION, 1) != 1:
        raise HeaderProblem(*COMPRESSED)
    width, height = tags[_WIDTH], tags[_HEIGHT]
    # A decoder allocates a tile whole.
    if tags.get(_TILE_WIDTH, 1) > 2 * width + 512 or tags.get(_TILE_HEIGHT, 1) > 2 * height + 512:
        raise HeaderProblem("is a TIFF whose tiles are larger than the picture", AGAIN)
    orientation = tags.get(_ORIENTATION, 1)
    return ImageHeader("TIFF", width, height, orientation if 1 <= orientation <= 8 else 1)


def bare(data: bytes) -> bytes:
    """Return the TIFF as it is."""
    return data


def exif_orientation(exif: bytes) -> int:
    """Return the orientation of EXIF data, from 1 to 8; 1 where it is cut off, since the picture need not be.

    Nothing but this number is read of them. Raises `HeaderProblem` for more tags than any camera writes.
    """
    if exif[:4] not in STARTS:
        return 1
    try:
        order, at, count = _directory(exif)
        if count > _MOST_TAGS:
            raise HeaderProblem(f"has EXIF of {count:,} tags; at most {_MOST_TAGS} are read", "Save it without EXIF")
        orientation = 1
        for entry in range(at, at + 12 * count, 12):
            tag, kind, number = _entry(exif, entry, order)
            if tag == _ORIENTATION and number == 1 and kind in _WHOLE:
                orientation = whole(exif, entry + 8, _SIZES[kind], order)
    except IndexError:
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def _tags(data: bytes) -> tuple[dict[int, int], int]:
    """Return the first directory's tags that are one whole number, and where the place of the next directory is."""
    order, at, count = _directory(data)
    if count > _MOST_TAGS:
        raise HeaderProblem(f"is a TIFF of {count:,} tags; at most {_MOST_TAGS} are read", CONVERT)
    tags, apart, end = {}, 0, at + 12 * count
    for entry in range(at, end, 12):
        tag, kind, number = _entry(data, entry, order)
        size = _SIZES.get(kind, 1) * number
        apart += size if size > 4 else 0
        if apart > len(data):  # tags may share bytes, and a decoder copies each of them
            raise HeaderProblem("is a TIFF whose tags are larger than the file", AGAIN)
        if number == 1 and kind in _WHOLE:
            tags[tag] = whole(data, entry + 8, _SIZES[kind], order)
    return tags, end


def _directory(data: bytes) -> tuple[str, int, int]:
    """Return the order of bytes, the place of the first directory's first tag, and the number of its tags."""
    order = "little" if data[:2] == b"II" else "big"
    at = whole(data, 4, 4, order)
    return order, at + 2, whole(data, at, 2, order)


def _entry(data: bytes, at: int, order: str) -> tuple[int, int, int]:
    """Return the number, the type and the count of a tag."""
    return whole(data, at, 2, order), whole(data, at + 2, 2, order), whole(data, at + 4, 4, order)
