"""Decoders get pixels alone: no EXIF, profile, comment or list of further pictures, whose cost has no bound."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from images.files import chunk, encoded, jpeg_with, noise, ordinary, plain_tiff, png, segment, sharing_tags, webp_with
from rekindle._src.images import open_picture
from rekindle._src.images.headers import bare_file, read_header
from rekindle._src.images.picture import Picture
from rekindle.errors import InvalidRequest

SECRET = b"this is metadata"
TURNED = (274, 3, 1, 6)  # orientation 6
EXIF = b"Exif\0\0" + sharing_tags(1, len(SECRET), TURNED)[: -len(SECRET)] + SECRET
PROFILE = b"ICC_PROFILE\0\x01\x01" + SECRET
XMP = b"http://ns.adobe.com/xap/1.0/\0" + SECRET
# Tags that share their bytes, as many as are let through to the walker; Pillow 11 and 12 copy each of them.
SHARED = sharing_tags(250, 60_000, TURNED)
ROWS = b"".join(b"\0" + row.tobytes() for row in noise(9, 7, 1))  # of a grey PNG
MPF = b"MPF\0" + sharing_tags(400, 60_000, (0xB001, 4, 1, 2))


def bare(data: bytes) -> bytes:
    return bare_file(data, read_header(data))


def with_metadata() -> dict[str, tuple[bytes, bytes]]:
    """Return files of each format with `SECRET` in all metadata that the format has, and the same files without."""
    colour, palette = Image.fromarray(noise(9, 7)), Image.fromarray(noise(9, 7)).quantize(8)
    jpeg, gif = encoded(colour, "JPEG"), encoded(palette, "GIF", transparency=2)
    segments = [
        segment(0xE1, EXIF), segment(0xE1, XMP), segment(0xE2, PROFILE), segment(0xE2, b"MPF\0" + SECRET),
        segment(0xED, b"Photoshop 3.0\0" + SECRET), segment(0xFE, SECRET), segment(0xE0, b"JFXX\0" + SECRET),
        segment(0xEB, SECRET), segment(0xF0, segment(0xE1, EXIF)),
    ]  # fmt: skip
    chunks = [
        chunk(b"eXIf", EXIF[6:]), chunk(b"iCCP", b"a\0\0" + zlib.compress(SECRET)), chunk(b"tEXt", b"a\0" + SECRET),
        chunk(b"zTXt", b"a\0\0" + zlib.compress(SECRET)), chunk(b"iTXt", b"a\0\0\0\0\0" + SECRET),
        chunk(b"pHYs", SECRET), chunk(b"prVt", SECRET), chunk(b"gAMA", SECRET),
    ]  # fmt: skip
    parts = ((b"ICCP", SECRET), (b"EXIF", EXIF[6:]), (b"XMP ", SECRET), (b"ANY ", SECRET))
    blocks = b"!\xfe\x10" + SECRET + b"\0" + b"!\xff\x0bXMP DataXMP\x10" + SECRET + b"\0"
    at = gif.index(b"!\xf9")
    return {
        "jpeg": (jpeg_with(*segments, jpeg=jpeg), jpeg),
        "jpeg, its JFIF has a thumbnail": (jpeg_with(_jfif(SECRET * 3), jpeg=jpeg[:2] + jpeg[20:]), jpeg),
        "png": (png(9, 7, *chunks, rows=ROWS), png(9, 7, rows=ROWS)),
        "webp": (webp_with(*parts, flags=0x2C), webp_with()),
        "gif": (gif[:at] + blocks + gif[at:-1] + blocks + b";", gif),
    }  # fmt: skip


def _jfif(thumbnail: bytes) -> bytes:
    return segment(0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\x10\x01" + thumbnail)


@pytest.mark.parametrize("name", with_metadata())
def test_no_decoder_is_given_metadata(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, plain = with_metadata()[name]
    assert zlib.decompress(zlib.compress(SECRET)) == SECRET in data
    seen: list[bytes] = []
    original = Image.open

    def opened(file: io.BytesIO, **options: Any) -> Image.Image:
        seen.append(file.getvalue())
        return original(file, **options)

    monkeypatch.setattr(Image, "open", opened)
    picture = open_picture(data).decode()
    assert len(seen) == 1
    assert SECRET not in seen[0] and zlib.compress(SECRET) not in seen[0]
    assert len(seen[0]) <= len(plain)
    assert not {"exif", "icc_profile", "xmp", "comment", "mp", "photoshop"} & set(original(io.BytesIO(seen[0])).info)
    expected = np.array(ImageOps.exif_transpose(original(io.BytesIO(plain))).convert("RGB"))
    turned = read_header(data).orientation
    assert turned == (1 if "JFIF" in name or name == "gif" else 6), "read before it is taken out"
    if name != "gif":  # its transparent parts are on white
        np.testing.assert_array_equal(picture.pixels, np.rot90(expected, 3) if turned == 6 else expected)
    assert open_picture(plain).decode().pixels.sum() == picture.pixels.sum()


@pytest.mark.parametrize("name", ordinary())
def test_pixels_are_those_of_the_file_with_metadata(name: str) -> None:
    """Modes, palettes and transparent colours too: the decoder sees all of them."""
    data = ordinary()[name]
    whole, without = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(bare(data)))
    assert without.format == str(whole.format).replace("MPO", "JPEG")
    assert without.info.get("transparency") == whole.info.get("transparency")
    if whole.format != "TIFF":
        assert (without.mode, without.size) == (whole.mode, whole.size)
    assert without.getpalette() == whole.getpalette()
    np.testing.assert_array_equal(np.array(without), np.array(whole))
    assert whole.format == "TIFF" or bare(bare(data)) == bare(data)


def _adobe(transform: int) -> bytes:
    return segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "YCbCr"])
def test_a_jpeg_keeps_its_space_of_colours(mode: str) -> None:
    """JFIF and Adobe say what its components are, and so does the absence of both."""
    image = Image.fromarray(noise(9, 7)).convert(mode)
    data = encoded(image, "JPEG", comment=b"any", quality=95)
    at = data.index(b"\xff\xdb")
    shapes = [b"", _jfif(b""), *(_adobe(transform) for transform in range(3)), _jfif(b"") + _adobe(0)]
    kept = set()
    for shape in shapes:
        one = data[:2] + segment(0xE1, EXIF.replace(struct.pack("<I", 6), struct.pack("<I", 1), 1)) + shape + data[at:]
        expected = np.array(Image.open(io.BytesIO(one)).convert("RGB"))
        np.testing.assert_array_equal(open_picture(one).decode().pixels, expected)
        kept.add(expected.tobytes())
    assert mode == "L" or len(kept) > 1, "they make a difference"


def decoded(data: bytes) -> tuple[Picture, int]:
    """Return a decoded picture, and the most bytes that decoding it took."""
    tracemalloc.start()
    try:
        return open_picture(data).decode(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("jpeg, EXIF", jpeg_with(segment(0xE1, b"Exif\0\0" + SHARED))),
        ("jpeg, MPF", jpeg_with(segment(0xE1, b"Exif\0\0" + sharing_tags(1, 9, TURNED)), segment(0xE2, MPF))),
        ("jpeg, both", jpeg_with(segment(0xE2, MPF), segment(0xE1, b"Exif\0\0" + SHARED))),
        ("png, EXIF", png(9, 7, chunk(b"eXIf", SHARED), rows=ROWS)),
        ("webp, EXIF", webp_with((b"EXIF", SHARED), flags=8)),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("short_turns")
def test_tags_that_share_their_bytes_cost_nothing(name: str, data: bytes) -> None:
    """A file of 0.9 MB took 6.9 GB and 23 s, one of 66 kB with a list of further pictures 654 MB and 12 s."""
    open_picture(data).decode()  # imports
    picture, peak = decoded(data)
    assert (picture.width, picture.height) == (7, 9), "turned upright"
    assert peak < 1 << 20, f"{name} took {peak:,} bytes"


def test_a_refusal_of_exif_refuses_the_picture() -> None:
    """It was taken for no orientation, and the decoder read the EXIF that had been refused."""

    def files(count: int) -> list[bytes]:
        exif = sharing_tags(count - 1, 9, TURNED)
        return [
            jpeg_with(segment(0xE1, b"Exif\0\0" + exif)), webp_with((b"EXIF", exif), flags=8),
            png(9, 7, chunk(b"eXIf", exif)),
        ]  # fmt: skip

    assert [read_header(data).orientation for data in files(256)] == [6, 6, 6]
    for data in files(257):
        with pytest.raises(InvalidRequest, match=r"has EXIF of 257 tags; at most 256 are read\. Save it without EXIF"):
            open_picture(data)


LAYOUTS = {
    "a strip": {}, "strips": {"rows": 2}, "strips of a row": {"rows": 1}, "tiles": {"tile": (16, 16)},
    "tiles that do not fit": {"tile": (5, 4)}, "planes": {"planes": True},
    "planes in strips": {"planes": True, "rows": 3}, "planes in tiles": {"planes": True, "tile": (4, 5)},
}  # fmt: skip


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    ("layout", "channels"),
    [(name, channels) for name in LAYOUTS for channels in ((1, 3) if "planes" in name else (1, 3, 4))],
)
def test_a_tiff_is_read_in_all_of_its_layouts(layout: str, channels: int, order: str) -> None:
    pixels = noise(9, 7, channels)
    data = plain_tiff(pixels, order=order, **LAYOUTS[layout])
    image = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(np.array(image).reshape(pixels.shape), pixels)
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(bare(data)))).reshape(pixels.shape), pixels)
    picture = open_picture(data).decode()
    if channels != 4:
        np.testing.assert_array_equal(picture.pixels, np.broadcast_to(pixels, (7, 9, 3)))


def test_a_tiffs_decoder_sees_the_tags_of_pixels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow also follows the directories of EXIF and GPS when it has decoded a TIFF, and reads all that they name."""
    shared = sharing_tags(250, 60_000)
    tags = (
        (270, 2, SECRET), (274, 3, b"\6\0"), (700, 1, SECRET), (34377, 1, SECRET), (34675, 7, SECRET),
        (320, 3, bytes(6)), (34665, 4, struct.pack("<I", 8)), (34853, 4, struct.pack("<I", 8)),
        (279, 4, struct.pack("<I", 63)),
    )  # fmt: skip
    data = plain_tiff(noise(9, 7, 1), more=(*tags, (50_000, 7, shared)))
    at = data.index(shared) + int.from_bytes(shared[4:8], "little")
    for tag in (34665, 34853):
        data = data.replace(struct.pack("<HHII", tag, 4, 1, 8), struct.pack("<HHII", tag, 4, 1, at))
    image = Image.open(io.BytesIO(bare(data)))
    assert set(image.tag_v2) <= {256, 257, 258, 259, 262, 273, 277, 278, 284}
    assert (image.size, image.getexif().get_ifd(34665)) == ((9, 7), {})
    assert read_header(data).orientation == 6
    picture, peak = decoded(data)
    assert peak < 1 << 20, f"{peak:,} bytes"
    np.testing.assert_array_equal(picture.pixels[:, :, 0], np.rot90(noise(9, 7, 1)[:, :, 0], 3))


@pytest.mark.usefixtures("short_turns")
def test_a_tiff_makes_no_more_calls_of_a_decoder_than_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 7.6 MB, all of them places of strips of two pixels, took 92 s and 1.85 GB."""
    calls: list[Any] = []
    original = Image._getdecoder

    def counted(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(Image, "_getdecoder", counted)
    assert open_picture(plain_tiff(noise(9, 7), rows=1)).decode().height == 7
    assert len(calls) == 7
    for kind, places in ((1, bytes([8]) * 5000), (3, b"\x08\0" * 5000), (4, b"\x08\0\0\0" * 5000)):
        with pytest.raises(InvalidRequest, match=r"tag 273 has no whole|5,000 strips"):
            open_picture(plain_tiff(noise(1, 2), rows=1, strips=(kind, places)))
    assert len(calls) == 7, "none of them reached it"
