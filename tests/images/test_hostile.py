"""Hostile files are refused with a typed error that says nothing of libraries, in little time and memory."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from images.files import hostile, mutations
from rekindle._src.images import Picture, PictureLimits, open_picture
from rekindle._src.images.formats.parts import HeaderProblem
from rekindle._src.images.headers import read_header
from rekindle.errors import InvalidRequest

LIMITS = PictureLimits(pixels=1 << 20)
TESTS = Path(__file__).parents[1]
# Pillow warns of what it repairs; a session leaves that to the filters of its process.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::RuntimeWarning:PIL")
LEAKS = re.compile(r"0x[0-9a-f]{4,}|PIL|Error|object at|Traceback|decoder|buffer|libtiff|struct", re.IGNORECASE)


def outcome(data: bytes) -> str:
    """Return "read", or the reason why a file is refused; any other error is a defect."""
    try:
        result: Picture | InvalidRequest = open_picture(data, limits=LIMITS).decode()
    except InvalidRequest as error:
        result = error
    if isinstance(result, Picture):
        assert result.pixels.size <= 3 * LIMITS.pixels
        return "read"
    assert result.field == "images"
    assert result.__cause__ is None
    assert not LEAKS.search(str(result)), result
    assert len(str(result)) < 400
    return result.problem


@pytest.mark.parametrize("name", hostile())
def test_hostile_files_are_refused(name: str) -> None:
    data = hostile()[name]
    assert outcome(data) != "read"
    if len(data) > 100_000:  # tracing takes its time
        return
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            open_picture(uri, limits=LIMITS).decode()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, f"{peak:,} bytes"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("svg", "is SVG"),
        ("svg, xml", "is SVG"),
        ("heic", "is HEIC"),
        ("web page", "is a web page"),
        ("png, 300 chunks", "more than 256 chunks"),
        ("png, two headers", "two headers"),
        ("png, animated", "is an animated PNG"),
        ("gif, animated", "is an animated GIF"),
        ("gif, long comment", "long comment"),
        ("gif, empty blocks", "long comment"),
        ("gif, padding", "long comment"),
        ("webp, animated", "is an animated WebP"),
        ("jpeg, scans", r"of \d+ scans; at most 64"),
        ("jpeg, segments", "more than 1,024 segments"),
        ("jpeg, 17 MB before its pixels", "more than 16,777,216 bytes before its pixels"),
        ("jpeg, filled", "more than 65,536 bytes between its segments"),
        ("jpeg, EXIF", "more than 1,048,576 bytes of EXIF"),
        ("jpeg, EXIF of 2,000 tags", "has EXIF of 2,000 tags; at most 256 are read"),
        ("png, EXIF of 300 tags", "has EXIF of 300 tags"),
        ("webp, EXIF of 300 tags", "has EXIF of 300 tags"),
        ("jpeg, 70 kB of tables", "more than 65,536 bytes of tables"),
        ("bmp, compressed", "is a compressed BMP"),
        ("tiff, pages", "of several pages"),
        ("tiff, endless pages", "of several pages"),
        ("tiff, tiles", "tiles are larger than the picture"),
        ("tiff, 5,000 strips of two pixels", "whose tag 273 has no whole numbers of 2 or 4 bytes"),
        ("tiff, strips in bytes", "whose tag 273 has no whole numbers"),
        ("tiff, a strip too many", "of 8 strips or tiles, and its size makes 7"),
        ("tiff, a tile too many", "of 5 strips or tiles, and its size makes 4"),
        ("tiff, strips of no rows", "with strips or tiles of no pixels"),
        ("tiff, 70,000 strips", "of 70,000 numbers in its tag 273; it has 1 to 65,536"),
        ("tiff, long palette", "of 770 numbers in its tag 320; it has 1 to 768"),
        ("tiff, overlapping tags", "tags are larger than the file"),
        ("tiff, 60,000 tags", "of 60,000 tags; at most 256"),
        ("tiff, odd compression", "is a compressed TIFF"),
        ("tiff, lzw", "is a compressed TIFF"),
    ],
)
def test_what_costs_a_decoder_time_is_refused_by_the_header(name: str, problem: str) -> None:
    with pytest.raises(HeaderProblem, match=problem):
        read_header(hostile()[name])


def run(count: int) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for _, data in mutations(count):
        problem = re.sub(r"[\d,]+", "N", outcome(data))
        reasons[problem] = reasons.get(problem, 0) + 1
    return reasons


def test_some_broken_files_are_refused_or_read(capfd: pytest.CaptureFixture[str]) -> None:
    reasons = run(60)
    assert capfd.readouterr() == ("", ""), "a decoder printed"
    assert sum(reasons.values()) == 60
    assert 0 < reasons["read"] < 40


def test_a_compressed_tiff_does_not_reach_its_library(capfd: pytest.CaptureFixture[str]) -> None:
    """Broken ones make libtiff print to the descriptor of stderr, whatever Python does with its own."""
    for name in ("tiff, lzw", "tiff, packbits", "tiff, lzw as the first of two"):
        data = hostile()[name]
        for broken in (data, data[:8] + b"\xff" * 40 + data[48:]):  # the first strip
            assert outcome(broken) == "is a compressed TIFF", name
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_500_broken_files_take_little_time_and_memory() -> None:
    """In a process of its own, whose largest size is that of these files alone."""
    code = (
        "import resource, time, warnings; warnings.simplefilter('ignore')\n"
        "from images import test_hostile as t\n"
        "from images.files import hostile, mutations\n"
        "t.run(5); hostile(); list(mutations(500))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF)\n"
        "began = time.process_time()\n"
        "reasons = t.run(500)\n"
        "for data in hostile().values(): t.outcome(data)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(after.ru_maxrss - before.ru_maxrss, time.process_time() - began, reasons)\n"
    )
    paths = [str(TESTS), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500,
        env={"PYTHONPATH": ":".join(path for path in paths if path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    kilobytes, seconds, _ = result.stdout.split(" ", 2)
    assert int(kilobytes) < 200_000, "pictures of at most 1 Mi pixels"
    assert float(seconds) < 60, "a hang, not a measurement"
    assert result.stderr == "", "a decoder printed"
