"""Image files that tests make: ordinary ones of each format, hostile ones by hand, and mutations of both."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'


def noise(width: int, height: int, channels: int = 3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an array that no encoder shortens."""
    return np.random.default_rng(width * height).integers(0, 256, (height, width, channels), np.uint8)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """Return an image as a file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def with_orientation(image: Image.Image, format: str, orientation: int) -> bytes:
    """Return an image as a file whose EXIF says how it is to be turned."""
    if format == "TIFF":
        return encoded(image, format, tiffinfo={274: orientation})
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(image, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, bits: int = 8, kind: int = 0, rows: bytes | None = None) -> bytes:
    """Return a grey PNG that says it has this size, whatever its pixels are; `chunks` come before them."""
    rows = bytes(64) if rows is None else rows
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def plain_tiff(
    pixels: np.ndarray[Any, np.dtype[np.uint8]],
    *,
    order: str = "<",
    rows: int = 0,
    tile: tuple[int, int] = (0, 0),
    planes: bool = False,
    more: tuple[tuple[int, int, bytes], ...] = (),
    strips: tuple[int, bytes] | None = None,
) -> bytes:
    """Return pixels [h, w, channels] as a TIFF in strips of `rows` rows or tiles of [h, w], by planes if it says so.

    `more` are further tags: number, type, and bytes that stand in the file. They take the place of those with the
    same number, and `strips`, a type and bytes, that of the list of their places.
    """
    height, width, channels = pixels.shape
    down, across = tile if tile[0] else (rows or height, width)
    parts = []
    for layer in np.moveaxis(pixels, 2, 0)[..., None] if planes else [pixels]:
        for top in range(0, height, down):
            for left in range(0, width, across):
                part = layer[top : top + down, left : left + across]
                if tile[0]:  # all tiles are whole
                    part = np.pad(part, ((0, down - part.shape[0]), (0, across - part.shape[1]), (0, 0)))
                parts.append(part.tobytes())
    offsets = 8 + np.cumsum([0, *map(len, parts[:-1])])
    sizes = {3: "H", 4: "I"}
    tags: list[tuple[int, int, list[int]]] = [
        (256, 4, [width]), (257, 4, [height]), (258, 3, [8] * channels), (259, 3, [1]),
        (262, 3, [2 if channels >= 3 else 1]), (277, 3, [channels]), (284, 3, [2 if planes else 1]),
        *([(322, 3, [across]), (323, 3, [down]), (324, 4, [*offsets])] if tile[0] else [(273, 4, [*offsets])]),
        *([] if tile[0] else [(278, 4, [down])]), *([(338, 3, [2])] if channels in (2, 4) else []),
    ]  # fmt: skip
    values = [(tag, kind, struct.pack(f"{order}{len(own)}{sizes[kind]}", *own)) for tag, kind, own in tags]
    body, entries = b"".join(parts), []
    changed = {tag: (tag, kind, own) for tag, kind, own in [*values, *more]}
    if strips is not None:
        places = 324 if tile[0] else 273
        changed[places] = (places, *strips)
    for tag, kind, own in sorted(changed.values()):
        count = len(own) // {3: 2, 4: 4}.get(kind, 1)
        place = own.ljust(4, b"\0") if len(own) <= 4 else struct.pack(f"{order}I", 8 + len(body))
        body += own if len(own) > 4 else b""
        entries.append(struct.pack(f"{order}HHI", tag, kind, count) + place)
    directory = struct.pack(f"{order}H", len(entries)) + b"".join(entries) + bytes(4)
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + struct.pack(f"{order}I", 8 + len(body)) + body + directory


def tiff(*tags: tuple[int, int, int, int], rest: bytes = b"", following: int = 0) -> bytes:
    """Return a TIFF of these tags: number, type, count, value."""
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\x00" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", following) + rest


def sharing_tags(count: int, size: int, *tags: tuple[int, int, int, int]) -> bytes:
    """Return a directory with `count` more tags that all are the same `size` bytes, each of which a decoder copies."""
    place = 8 + 2 + 12 * (len(tags) + count) + 4
    return tiff(*tags, *[(50_000 + tag, 7, size, place) for tag in range(count)], rest=bytes(size))


def segment(marker: int, content: bytes) -> bytes:
    """Return a segment of a JPEG."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def jpeg_with(*segments: bytes, jpeg: bytes | None = None) -> bytes:
    """Return a JPEG that has these segments first."""
    jpeg = encoded(Image.fromarray(noise(9, 7)), "JPEG") if jpeg is None else jpeg
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def jpeg_of_scans(side: int, *, index: int, times: int) -> bytes:
    """Return a progressive JPEG of a plain colour with one of its scans so many times more."""
    image = Image.new("RGB", (side, side), (60, 80, 100))
    data = encoded(image, "JPEG", progressive=True, subsampling=0)
    starts = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    ends = [data.rfind(b"\xff\xc4", at, after) for at, after in zip(starts, [*starts[1:], None], strict=True)]
    one = data[starts[index] : ends[index] if ends[index] > 0 else (starts[index + 1 :] or [len(data) - 2])[0]]
    return data[:-2] + one * times + data[-2:]


def webp_with(*parts: tuple[bytes, bytes], flags: int = 0) -> bytes:
    """Return a lossless WebP with these chunks after its pixels."""
    pixels = encoded(Image.fromarray(noise(9, 7)), "WEBP", lossless=True)[12:]
    canvas = bytes([flags, 0, 0, 0]) + (9 - 1).to_bytes(3, "little") + (7 - 1).to_bytes(3, "little")
    others = [kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for kind, data in parts]
    body = b"WEBPVP8X" + struct.pack("<I", len(canvas)) + canvas + pixels + b"".join(others)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _second_compression(data: bytes) -> bytes:
    """Return the TIFF with two numbers for its compression, of which Pillow takes the first."""
    entry = struct.pack("<HHI", 259, 3, 1)
    assert data.count(entry) == 1
    return data.replace(entry, struct.pack("<HHI", 259, 3, 2))


@cache
def ordinary() -> dict[str, bytes]:
    """Return files that are read, of each format and its kinds."""
    colour, grey = Image.fromarray(noise(37, 23)), Image.fromarray(noise(37, 23, 1)[:, :, 0])
    clear = Image.fromarray(noise(37, 23, 4))
    palette = colour.quantize(16)
    deep = Image.fromarray(np.arange(37 * 23, dtype=np.uint16).reshape(23, 37) * 70)
    return {
        "png": encoded(colour, "PNG"), "png grey": encoded(grey, "PNG"), "png alpha": encoded(clear, "PNG"),
        "png palette": encoded(palette, "PNG"), "png clear palette": encoded(palette, "PNG", transparency=3),
        "png clear colour": encoded(colour, "PNG", transparency=(1, 2, 3)), "png 16 bits": encoded(deep, "PNG"),
        "png 1 bit": encoded(grey.convert("1"), "PNG"), "png grey alpha": encoded(clear.convert("LA"), "PNG"),
        "jpeg": encoded(colour, "JPEG"), "jpeg grey": encoded(grey, "JPEG"),
        "jpeg progressive": encoded(colour, "JPEG", progressive=True),
        "jpeg cmyk": encoded(colour.convert("CMYK"), "JPEG"), "jpeg turned": with_orientation(colour, "JPEG", 6),
        "jpeg of two pictures": encoded(colour, "MPO", save_all=True, append_images=[grey.convert("RGB")]),
        "webp": encoded(colour, "WEBP"), "webp lossless": encoded(clear, "WEBP", lossless=True),
        "webp turned": with_orientation(colour, "WEBP", 8),
        "gif": encoded(palette, "GIF"), "gif clear": encoded(palette, "GIF", transparency=2),
        "gif comment": encoded(palette, "GIF", comment=b"x" * 500),
        "bmp": encoded(colour, "BMP"), "bmp palette": encoded(palette, "BMP"),
        "tiff": encoded(colour, "TIFF"), "tiff alpha": encoded(clear, "TIFF"), "tiff 16 bits": encoded(deep, "TIFF"),
        "tiff cmyk": encoded(colour.convert("CMYK"), "TIFF"), "tiff palette": encoded(palette, "TIFF"),
    }  # fmt: skip


@cache
def hostile() -> dict[str, bytes]:
    """Return files that are refused, each for a reason of its own."""
    colour, palette = Image.fromarray(noise(9, 7)), Image.fromarray(noise(9, 7)).quantize(8)
    frames = [Image.fromarray(noise(9, 7)), Image.fromarray(255 - noise(9, 7))]
    gif = encoded(palette, "GIF")
    jpeg = encoded(colour, "JPEG", progressive=True)
    text = zlib.compress(bytes(1 << 26))
    webp = encoded(colour, "WEBP", lossless=True)
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\x10\x00\x00\x00" + (16382).to_bytes(3, "little") * 2
    bmp = bytearray(encoded(palette, "BMP"))
    struct.pack_into("<I", bmp, 30, 1)
    size = ((256, 4, 1, 9), (257, 4, 1, 7))
    return {
        "empty": b"", "one byte": b"\x89", "text": b"hello", "svg": SVG, "svg, xml": b'<?xml version="1.0"?>' + SVG,
        "web page": b"<!DOCTYPE html><html></html>", "pdf": b"%PDF-1.7\n", "postscript": b"%!PS-Adobe\n",
        "heic": b"\x00\x00\x00\x18ftypheic", "avif": b"\x00\x00\x00\x18ftypavif", "mp4": b"\x00\x00\x00\x18ftypisom",
        "icon": encoded(colour.resize((16, 16)), "ICO"), "ppm": encoded(colour, "PPM"), "gzip": b"\x1f\x8b\x08",
        "jpeg 2000": b"\x00\x00\x00\x0cjP  \r\n\x87\n", "bigtiff": b"II+\x00" + bytes(64), "psd": b"8BPS" + bytes(64),
        "png of 4 billion pixels": png(1 << 16, 1 << 16), "png of 2**62 pixels": png((1 << 31) - 1, (1 << 31) - 1),
        "png without pixels": png(0, 5), "png, one long line": png(1 << 26, 1), "png, broken size": png(9, 7)[:20],
        "png, two headers": png(1, 1, chunk(b"IHDR", struct.pack(">IIBBBBB", 1 << 14, 1 << 14, 8, 0, 0, 0, 0))),
        "png, no header first": b"\x89PNG\r\n\x1a\n" + chunk(b"tEXt", b"a\0b"),
        "png, no pixels follow": png(9, 7)[:33], "png, wrong sum": png(9, 7).replace(b"IDAT", b"IDAS"),
        "png, 300 chunks": png(9, 7, *[chunk(b"tEXt", b"a\0b")] * 300),
        "png, text of 64 MB": png(9, 7, chunk(b"zTXt", b"a\0\0" + text)),
        "png, profile of 64 MB": png(9, 7, chunk(b"iCCP", b"a\0\0" + text)),
        "png, short of rows": png(2000, 2000, rows=bytes(10)), "png, odd kind": png(9, 7, kind=5),
        "png, animated": encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "gif, animated": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "webp, animated": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True),
        "tiff, pages": encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]),
        "gif of 4 billion pixels": gif[:6] + b"\xff\xff\xff\xff" + gif[10:], "gif without a frame": gif[:13] + b";",
        "gif, wide frame": gif[:gif.index(b",\0\0\0\0") + 5] + b"\xff\xff\xff\xff" + gif[gif.index(b",\0\0\0\0") + 9:],
        "gif, long comment": gif[:-1] + b"!\xfe" + (b"\xff" + bytes(255)) * 300 + b"\0" + b";",
        "gif, padding": gif[:-1] + b"z" * 70_000 + b";",
        "gif, empty blocks": gif[:-1] + b"!\xfe" + b"\x01a" * 70_000 + b"\0;",
        "jpeg, filled": jpeg[:2] + b"\xff" * (1 << 17) + jpeg[2:],
        "jpeg of 4 billion pixels": jpeg.replace(struct.pack(">HH", 7, 9), b"\xff\xff\xff\xff", 1),
        "jpeg, scans": jpeg[:-2] + jpeg[jpeg.index(b"\xff\xda") : -2] * 40 + b"\xff\xd9",
        "jpeg, segments": b"\xff\xd8" + b"\xff\xfe\x00\x02" * 5000 + jpeg[2:],
        "jpeg, endless": b"\xff\xd8" + b"\xff" * 5000, "jpeg, short segment": b"\xff\xd8\xff\xe0\x00\x00",
        "jpeg, 17 MB before its pixels": b"\xff\xd8" + (b"\xff\xfe\xff\xff" + bytes(65533)) * 270 + jpeg[2:],
        "jpeg, EXIF": b"\xff\xd8" + (b"\xff\xe1\xff\xffExif\0\0" + bytes(65527)) * 40 + jpeg[2:],
        "jpeg, EXIF of 2,000 tags": jpeg_with(segment(0xE1, b"Exif\0\0" + sharing_tags(2000, 40_000))),
        "png, EXIF of 300 tags": png(9, 7, chunk(b"eXIf", sharing_tags(300, 40_000))),
        "webp, EXIF of 300 tags": webp_with((b"EXIF", sharing_tags(300, 40_000)), flags=8),
        "jpeg, 70 kB of tables": jpeg_with(*[segment(0xDB, bytes(65))] * 1000),
        "jpeg without a size": b"\xff\xd8\xff\xda\x00\x02", "jpeg, noise between": b"\xff\xd8\xff\xe0\x00\x04abzz",
        "webp of 16k × 16k": b"RIFF" + struct.pack("<I", len(webp) + 18) + b"WEBP" + canvas + webp[12:],
        "webp, cut": webp[:25], "webp, other": b"RIFF\0\0\0\0WEBPxxxx" + bytes(20),
        "bmp, compressed": bytes(bmp),
        "bmp of 2**62 pixels": bytes(bmp[:18]) + b"\xff\xff\xff\x7f\x01\x00\x00\x80" + bytes(bmp[26:]),
        "bmp, cut": bytes(bmp[:20]), "bmp, odd header": bytes(bmp[:14]) + b"\x10" + bytes(bmp[15:]),
        "tiff without a size": tiff((258, 3, 1, 8)), "tiff, far away": b"II*\x00\xf0\xff\xff\xff",
        "tiff, tiles": tiff(*size, (322, 4, 1, 1 << 30), (323, 4, 1, 1 << 30), (324, 4, 1, 8)),
        "tiff, 5,000 strips of two pixels": plain_tiff(noise(1, 2), rows=1, strips=(1, bytes(5000))),
        "tiff, strips in bytes": plain_tiff(noise(2, 1), strips=(1, b"\x08")),
        "tiff, a strip too many": plain_tiff(noise(9, 7), rows=1, strips=(4, bytes(4 * 8))),
        "tiff, a tile too many": plain_tiff(noise(9, 7), tile=(4, 5), strips=(4, bytes(4 * 5))),
        "tiff, strips of no rows": plain_tiff(noise(9, 7), more=((278, 4, bytes(4)),)),
        "tiff, 70,000 strips": plain_tiff(noise(1, 70_000, 1), strips=(4, bytes(280_000))),
        "tiff, long palette": plain_tiff(noise(9, 7, 1), more=((320, 3, bytes(1540)),)),
        "tiff, overlapping tags": tiff(*size, *[(700 + tag, 1, 900, 8) for tag in range(100)], rest=bytes(1000)),
        "tiff, 60,000 tags": b"II*\x00" + struct.pack("<IH", 8, 60_000) + bytes(12 * 60_000 + 4),
        "tiff, odd compression": tiff(*size, (259, 3, 1, 34925)),
        "tiff, lzw": encoded(colour, "TIFF", compression="tiff_lzw"),
        "tiff, packbits": encoded(palette, "TIFF", compression="packbits"),
        "tiff, lzw as the first of two": _second_compression(encoded(colour, "TIFF", compression="tiff_lzw")),
        "tiff of 2**62 pixels": tiff((256, 4, 1, 1 << 31), (257, 4, 1, 1 << 31)),
        "tiff, endless pages": tiff(*size, following=8),
        "tiff, 32 bits": encoded(Image.fromarray(np.ones((7, 9), np.float32)), "TIFF"),
        "zip": b"PK\x03\x04" + bytes(30),
    }  # fmt: skip


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 20)):
        data[chance.randrange(len(data))] = chance.randrange(256)


def _flip_early(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 6)):
        data[chance.randrange(min(64, len(data)))] = chance.choice((0, 1, 127, 128, 255))


def _large(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(min(len(data), 80))
    data[at : at + 4] = chance.choice(
        (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x01\x00\x00", b"\xff\xff\xff\x7f")
    )


def _repeat(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    part = data[start : start + chance.randint(1, 60)]
    data[start:start] = part * chance.randint(1, 300)


def _lose(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.randint(1, 40)]


def _blank(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    data[start : start + 200] = bytes(len(data[start : start + 200]))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _cut, _flip, _flip_early, _large, _repeat, _lose, _blank,
)  # fmt: skip


def mutations(count: int, seed: int = 59) -> Iterator[tuple[str, bytes]]:
    """Yield broken files: the same ones for the same seed."""
    chance = random.Random(seed)
    names = sorted(ordinary())
    for number in range(count):
        name = names[number % len(names)]
        data = bytearray(ordinary()[name])
        changes = [chance.choice(MUTATIONS) for _ in range(chance.choice((1, 1, 2, 3)))]
        for change in changes:
            if data:
                change(data, chance)
        yield f"{number} {name} {' '.join(change.__name__ for change in changes)}", bytes(data)
