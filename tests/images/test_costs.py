"""Each bound of pictures is fed the dearest unit that it counts, a few times: what a full bound takes is a promise.

Processor time is taken, so other processes matter little; figures are of a Xeon, and the promises are twice as much.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image, ImageFile

from images.files import chunk, encoded, jpeg_of_scans, jpeg_with, noise, plain_tiff, segment
from images.test_metadata import MPF, SHARED
from rekindle._src.images import PictureLimits, open_picture
from rekindle._src.images.formats.parts import SCANS

pytestmark = pytest.mark.clock
LIMITS = PictureLimits()
SIDE = 2048


class Cost(NamedTuple):
    """What a file takes with more units than another has: seconds, and bytes that Python allocates."""

    seconds: float
    nbytes: int


def cost(data: bytes) -> Cost:
    def seconds() -> float:
        begun = os.times()
        open_picture(data).decode()
        ended = os.times()
        return ended.user + ended.system - begun.user - begun.system

    least = min(seconds() for _ in range(3))
    tracemalloc.start()
    try:
        open_picture(data).decode()
        return Cost(least, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def flat(mode: str = "RGB", **options: Any) -> bytes:
    return encoded(Image.new(mode, (SIDE, SIDE), tuple(range(60, 60 + 20 * len(mode), 20))), **options)


def noisy(format: str, **options: Any) -> bytes:
    return encoded(Image.fromarray(noise(1024, 1024, 4 if format == "WEBP" else 3)), format, **options)


def chunks(count: int) -> bytes:
    rows = zlib.compress(bytes(10 * 11), 0)
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 10, 10, 8, 0, 0, 0, 0))
    return head + chunk(b"IDAT", rows) + chunk(b"IDAT", b"") * count + chunk(b"IEND", b"")


PER_PIXEL = {
    "jpeg": lambda: flat(format="JPEG", progressive=True, subsampling=0),
    "jpeg cmyk": lambda: flat("CMYK", format="JPEG", progressive=True),
    "png": lambda: flat("RGBA", format="PNG"),
    "webp": lambda: flat("RGBA", format="WEBP", lossless=True, method=0),
    "gif": lambda: encoded(Image.new("RGB", (SIDE, SIDE)).quantize(2), "GIF", transparency=0),
    "bmp": lambda: flat(format="BMP"),
    "tiff": lambda: plain_tiff(noise(SIDE, SIDE, 4)),
}


@pytest.mark.parametrize("name", PER_PIXEL)
def test_a_pixel_takes_at_most_64_ns(name: str) -> None:
    seconds, nbytes = cost(PER_PIXEL[name]())
    print(f"{name}: {seconds / SIDE**2 * 1e9:.1f} ns, {nbytes / SIDE**2:.1f} bytes of Python's")
    assert seconds * LIMITS.pixels / SIDE**2 < 4.3, "2 ** 26 pixels take 2.1 s"


@pytest.mark.parametrize("index", [0, 5, 6, 9])
def test_a_pass_takes_at_most_3_ns(index: int) -> None:
    more, less = (cost(jpeg_of_scans(SIDE, index=index, times=times)) for times in (50, 0))
    seconds = (more.seconds - less.seconds) / (50 * SIDE**2)
    print(f"scan {index}: {seconds * 1e9:.2f} ns")
    assert seconds * SCANS * LIMITS.pixels < 3.6, "2 ** 26 pixels in 18 scans take 1.6 s"


@pytest.mark.parametrize(
    ("format", "options"), [("JPEG", {"quality": 95, "subsampling": 0}), ("PNG", {}), ("WEBP", {"quality": 100}),
                            ("WEBP", {"lossless": True, "method": 0})],
)  # fmt: skip
def test_a_byte_takes_at_most_80_ns(format: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 24)
    data = noisy(format, **options)
    seconds = cost(data).seconds - cost(encoded(Image.new("RGB", (1024, 1024)), format, **options)).seconds
    print(f"{format} {options}: {seconds / len(data) * 1e9:.1f} ns")
    assert seconds * LIMITS.bytes / len(data) < 5.4, "2 ** 26 bytes of noise take 2.7 s"


@pytest.mark.parametrize(
    ("name", "made", "least", "most", "bound"),
    [
        ("strips", lambda count: plain_tiff(noise(1, count, 1), rows=1), 10, 20_010, 1 << 16),
        ("chunks", chunks, 10, 20_010, 1 << 17),
        ("tables", lambda count: jpeg_with(*[segment(0xDB, bytes([0] + [1] * 64))] * count), 10, 900, 1024),
    ],
)  # fmt: skip
def test_parts_take_what_their_passes_say(
    name: str, made: Callable[[int], bytes], least: int, most: int, bound: int
) -> None:
    one, other = cost(made(least)), cost(made(most))
    seconds, nbytes = (other.seconds - one.seconds) / (most - least), (other.nbytes - one.nbytes) / (most - least)
    print(f"{name}: {seconds * 1e6:.1f} µs, {nbytes:.0f} bytes each")
    assert seconds * bound < 2.4 and nbytes * bound < 64 << 20, "65,536 strips take 1.2 s and 15 MiB"


@pytest.mark.parametrize("marker", [0xE1, 0xE2])
def test_metadata_takes_nothing(marker: int) -> None:
    content = b"Exif\0\0" + SHARED if marker == 0xE1 else MPF
    seconds, nbytes = cost(jpeg_with(segment(marker, content)))
    print(f"segment {marker:x}: {seconds:.3f} s, {nbytes:,} bytes")
    assert seconds < 0.5 and nbytes < 1 << 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's largest size")
@pytest.mark.parametrize(("name", "most"), [("jpeg", 12.5), ("jpeg cmyk", 12.5), ("png", 12.5), ("webp", 18.5)])
def test_a_pixel_takes_at_most_18_bytes_of_a_process(name: str, most: float) -> None:
    """For WebP, and 12 for the others; and 16 MiB for the strips in which colours are converted."""
    code = (
        "import io, sys; from PIL import Image; from rekindle._src.images import open_picture\n"
        "def largest(): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "stream = io.BytesIO(); Image.new('RGB', (8, 8)).save(stream, sys.argv[1]); data = sys.stdin.buffer.read()\n"
        "open_picture(stream.getvalue()).decode()\n"
        "open('/proc/self/clear_refs', 'w').write('5'); before = largest()\n"
        "open_picture(data).decode()\n"
        "print((largest() - before) * 1024)\n"
    )
    command = [sys.executable, "-c", code, name.split()[0]]
    done = subprocess.run(command, input=PER_PIXEL[name](), capture_output=True, check=True, timeout=300)
    nbytes = int(done.stdout)
    print(f"{name}: {nbytes / SIDE**2:.1f} bytes a pixel")
    assert 3 * SIDE**2 < nbytes < most * SIDE**2 + (16 << 20)
