"""What callers pass as an image becomes the right pixels, or is refused with a reason."""

from __future__ import annotations

import base64
import io
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from images.files import chunk, encoded, noise, ordinary, plain_tiff, png, with_orientation
from rekindle._src.images import (
    EncodedPicture,
    Picture,
    PictureLimits,
    open_bytes,
    open_picture,
    open_pictures,
    thumbnail,
)
from rekindle._src.images.headers import read_header
from rekindle.errors import InvalidRequest, MissingExtra


def read(source: object, **options: Any) -> Picture:
    return open_picture(source, **options).decode()


def as_transformers_reads(image: Image.Image) -> np.ndarray[Any, Any]:
    """Return the pixels that transformers' processors make of an image: `convert_to_rgb` of its image_transforms."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.array(image.convert("RGB"))


@pytest.mark.parametrize("name", [name for name in ordinary() if "16 bits" not in name])
def test_files_become_the_pixels_that_transformers_reads(name: str, tmp_path: Path) -> None:
    data = ordinary()[name]
    expected = as_transformers_reads(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    path = tmp_path / "picture.any"
    path.write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, bytearray(data), memoryview(data), path, str(path), uri):
        picture = read(source)
        np.testing.assert_array_equal(picture.pixels, expected)
        assert picture == read(data) and picture.digest == read(data).digest
    opened = open_picture(data)
    assert isinstance(opened, EncodedPicture)
    assert (opened.width, opened.height) == (expected.shape[1], expected.shape[0]), "before it is decoded"
    np.testing.assert_array_equal(read(Image.open(io.BytesIO(data))).pixels, expected)


@pytest.mark.parametrize("name", ["png 16 bits", "tiff 16 bits"])
def test_of_16_bits_the_upper_8_are_kept(name: str) -> None:
    """Transformers, by Pillow, keeps values up to 255 and makes white of all others."""
    levels = np.arange(37 * 23, dtype=np.uint16).reshape(23, 37) * 70
    expected = np.repeat((levels >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(read(ordinary()[name]).pixels, expected)
    np.testing.assert_array_equal(read(levels).pixels, expected)
    np.testing.assert_array_equal(read(Image.open(io.BytesIO(ordinary()[name]))).pixels, expected)
    assert read(levels) == read(ordinary()[name])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_exif_turns_a_picture_upright(format: str, orientation: int) -> None:
    image = Image.fromarray(noise(16, 8))
    data = with_orientation(image, format, orientation)
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert (expected.shape == (16, 8, 3)) == (orientation >= 5)
    opened = open_picture(data)
    assert (opened.width, opened.height) == (expected.shape[1], expected.shape[0]), "known from the header"
    np.testing.assert_array_equal(opened.decode().pixels, expected)
    np.testing.assert_array_equal(read(Image.open(io.BytesIO(data))).pixels, expected)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")  # Pillow's
def test_broken_exif_does_not_cost_the_picture() -> None:
    """Cameras write EXIF with the end of its directory missing, and tools put a PNG's after its pixels."""
    data = encoded(Image.fromarray(noise(9, 7)), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert read(data).width == 9
    image = Image.fromarray(noise(9, 7))
    exif = b"Exif\x00\x00" + b"MM\x00*" + struct.pack(">IHHHIHH", 8, 1, 274, 3, 1, 6, 0)
    assert read(encoded(image, "JPEG", exif=exif)).width == 7
    data = with_orientation(image, "PNG", 6)
    at = data.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(data[at : at + 4], "big")
    late = data[:at] + data[end:-12] + data[at:end] + data[-12:]
    assert read(late) == read(data)
    assert np.array_equal(read(late).pixels, np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(late)))))


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1), (1, 1, 1), (1, 1, 3), (1, 1, 4), (3, 5), (5, 3), (3, 5, 3), (3, 1, 3), (1, 7, 3), (3, 7, 1), (4, 4, 4),
        (1, 7),
    ],
)  # fmt: skip
def test_an_array_has_its_channels_last_whatever_its_shape(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    pixels = read(array).pixels
    assert pixels.shape == (*shape[:2], 3)
    if len(shape) == 2 or shape[2] == 1:
        np.testing.assert_array_equal(pixels, np.repeat(array.reshape(*shape[:2], 1), 3, axis=2))
    elif shape[2] == 3:
        np.testing.assert_array_equal(pixels, array)
    else:
        np.testing.assert_array_equal(pixels, as_transformers_reads(Image.fromarray(array)))


def test_types_of_arrays() -> None:
    bytes_ = noise(6, 4)
    for array in (
        bytes_ / 255,
        (bytes_ / 255).astype(np.float32),
        bytes_.astype(np.uint16) << 8,
        bytes_[:, ::-1][:, ::-1],
    ):
        np.testing.assert_array_equal(read(array).pixels, bytes_)
    assert read(np.array([[0, 0.001, 0.5, 0.999, 1]])).pixels[0, :, 0].tolist() == [0, 0, 128, 255, 255], "rounded"
    np.testing.assert_array_equal(read(np.eye(3, dtype=bool)).pixels[:, :, 1], np.eye(3) * 255)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((3, 224, 224), np.uint8), r"channels seem to be the first axis: pass np.moveaxis\(array, 0, -1\)"),
        (np.zeros((1, 50, 50), np.uint8), "np.moveaxis"),
        (np.zeros((1, 5, 5, 3), np.uint8), "one picture at a time"),
        (np.zeros((5, 5, 2), np.uint8), "1, 3 or 4 channels"),
        (np.zeros(5, np.uint8), "is no array of"),
        (np.zeros((), np.uint8), "array of uint8, no axes"),
        (np.zeros((0, 5, 3), np.uint8), "has no pixels: it is 5 × 0"),
        (np.full((2, 2), 255.0), "has floats from 255 to 255, and pixels in floats are from 0 to 1"),
        (np.full((2, 2), np.nan), "floats from nan to nan"),
        (np.full((2, 2), -0.1), "floats from -0.1"),
        (np.zeros((2, 2), np.int64), r"type int64, .* Pass array.astype\(np.uint8\)"),
        (np.zeros((2, 2), np.complex64), "type complex64"),
        (np.broadcast_to(np.uint8(0), (100_000, 5, 3)), "has 5 × 100,000 pixels; at most .* and 65,535 along a side"),
        (np.broadcast_to(np.uint8(0), (60_000, 60_000)), "60,000 × 60,000 pixels"),
        (np.array([None]), "is no image"),
        (np.array(["a"]), "is no array"),
    ],
)
def test_other_arrays_are_refused_with_the_fix(array: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read(array)


def test_an_array_that_changes_later_leaves_the_picture_alone() -> None:
    array = noise(5, 4)
    picture = read(array)
    before = picture.pixels.copy()
    array[:] = 0
    np.testing.assert_array_equal(picture.pixels, before)
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[0] = 1


def test_digests_differ_wherever_pixels_or_shapes_do() -> None:
    """Engines have mixed up pictures whose bytes, or whose first bytes, are equal (SGLang #25462, LMCache #3301)."""
    row = np.arange(36, dtype=np.uint8)
    shapes = [(1, 12, 3), (12, 1, 3), (2, 6, 3), (6, 2, 3), (3, 4, 3), (4, 3, 3)]
    pictures = {read(row.reshape(shape)) for shape in shapes}
    last = row.copy()
    last[-1] ^= 1
    pictures.add(read(last.reshape(3, 4, 3)))
    pictures.add(read(row.reshape(6, 6)))
    assert len({picture.digest for picture in pictures}) == len(pictures) == 8
    assert len(read(row.reshape(3, 4, 3)).digest) == 64, "all of SHA-256"
    colour, lossless = Image.fromarray(noise(20, 10)), {"WEBP": {"lossless": True}}
    files = [encoded(colour, format, **lossless.get(format, {})) for format in ("PNG", "BMP", "TIFF", "WEBP")]
    assert {read(data) for data in files} == {read(np.array(colour))}, "the file does not matter"


def test_modes_of_pil_images() -> None:
    colour = Image.fromarray(noise(8, 6))
    for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"):
        image = colour.convert("P").convert("PA") if mode == "PA" else colour.convert(mode)
        np.testing.assert_array_equal(read(image).pixels, as_transformers_reads(image))
    for mode in ("F", "I"):
        with pytest.raises(
            InvalidRequest, match=f"images='PIL image of mode {mode}, 8×6': has pixels of mode '{mode}'"
        ):
            read(colour.convert(mode))
    animated = encoded(colour, "GIF", save_all=True, append_images=[Image.fromarray(255 - noise(8, 6))])
    image = Image.open(io.BytesIO(animated))
    image.seek(1)
    np.testing.assert_array_equal(read(image).pixels, as_transformers_reads(image))


def test_large_pictures_are_converted_in_strips() -> None:
    from rekindle._src.images import picture as module

    image = Image.fromarray(noise(50, 41, 4))
    expected = read(image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STRIP", 333)
        assert read(image) == expected


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("/nowhere/at/all.png", "images='/nowhere/at/all.png': is no file. Pass the path of an image file"),
        ("https://example.com/a.png", "is a URL, and nothing is fetched"),
        ("HTTP://127.0.0.1/a.png", "is a URL"),
        ("file:///etc/passwd", "is a URL"),
        ("/", "can't be read: not a regular file"),
        ("a\0b", "has control characters"),
        ("A" * 100_000, r"is longer than .* data:image/png;base64"),
        ("data:image/png;base64", "is no image in base64"),
        ("data:text/html;base64,aGk=", "is no image in base64"),
        ("data:image/svg+xml,<svg/>", "is no image in base64"),
        ("data:image/png;base64,!!!!", "is not valid base64"),
        ("data:image/png;base64,é", "is not valid base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=", "is SVG; PNG, JPEG, WEBP, GIF, BMP, TIFF are read"),
        (None, "images='NoneType': is no image. Pass a path"),
        (5, "is no image"),
        ({"url": "x"}, "images='dict': is no image"),
    ],
)  # fmt: skip
def test_other_sources_are_refused_with_the_fix(source: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as error:
        read(source)
    assert error.value.__cause__ is None


def test_a_fifo_is_no_picture(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        read(tmp_path / "pipe")


def test_bounds_are_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.fromarray(noise(40, 30)), "PNG")
    monkeypatch.setattr(Image, "open", None)  # nothing below reaches a decoder
    limits = PictureLimits(pixels=1199)
    with pytest.raises(InvalidRequest, match="has 40 × 30 pixels; at most 1,199 are read"):
        open_bytes(data, limits=limits)
    with pytest.raises(
        InvalidRequest, match=rf"images\[3\]='{len(data):,} bytes': has {len(data):,} bytes; at most 100"
    ):
        open_picture(data, field="images[3]", limits=PictureLimits(bytes=100))
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    with pytest.raises(InvalidRequest, match=r"characters of base64; at most 1,000 bytes"):
        open_picture(uri, limits=PictureLimits(bytes=1000))
    with pytest.raises(InvalidRequest, match="along a side"):
        open_picture(data, limits=PictureLimits(side=39))
    many = [data] * 5
    with pytest.raises(InvalidRequest, match=r"images\[4\]='bytes': is one too many: at most 4 pictures"):
        open_pictures(many, limits=PictureLimits(count=4))
    with pytest.raises(InvalidRequest, match=r"images\[2\]='bytes': makes 3,600 pixels in all; at most 3,000"):
        open_pictures(many, limits=PictureLimits(total_pixels=3000))
    assert [picture.width for picture in open_pictures(many)] == [40] * 5


def sized(data: bytes, width: int, height: int, scans: int | None = None) -> bytes:
    """Return a JPEG that says it has this size, and so many scans: as many more of its last one."""
    at = next(at for kind in (b"\xff\xc0", b"\xff\xc2") if (at := data.find(kind)) >= 0) + 5
    data = data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]
    if scans is not None:
        last = data[data.rindex(b"\xff\xda") : -2]
        data = data[:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]
    return data


def test_scans_times_pixels_are_bounded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """33 megapixels in 63 scans, 200 kB, kept a decoder busy for five seconds; either alone is a small part of that."""
    plain = encoded(Image.fromarray(noise(40, 30)), "JPEG", progressive=True)
    cmyk = encoded(Image.fromarray(noise(40, 30, 4), "CMYK"), "JPEG", progressive=True)
    assert plain.count(b"\xff\xda") == 10 and cmyk.count(b"\xff\xda") == 18
    assert read_header(plain).passes == 10 * 64 * 32, "in whole blocks"
    assert read_header(sized(plain, 1, 65_535)).passes == 10 * 32 * 65_536
    for data, size in ((plain, (8192, 8192)), (cmyk, (8192, 8192)), (plain, (11_000, 6000))):
        opened = open_picture(sized(data, *size))
        assert opened.weight == size[0] * size[1], "what encoders write of the largest pictures counts as its pixels"
    slow = sized(plain, 8192, 4096, 63)
    problem = "has 8,192 × 4,096 pixels, but 2,113,929,216 pixels in all of its scans or parts; at most 1,207,959,552"
    with pytest.raises(InvalidRequest, match=problem):
        open_picture(slow)
    half = sized(plain, 4096, 4096, 63)
    assert open_picture(half).weight == 4096 * 4096 * 63 // 18
    with pytest.raises(InvalidRequest, match=r"images\[2\]='bytes': makes 176,160,768 pixels in all"):
        open_pictures([half] * 3, limits=PictureLimits(total_pixels=5 << 25))
    small = open_picture(sized(plain, 40, 30, 60))
    assert small.decode().width == 40, "a small one may have them"
    monkeypatch.setattr(thumbnail, "MOST_DECODED", 40 * 30)
    assert thumbnail.thumbnail(open_picture(plain)) != "" == thumbnail.thumbnail(small), "not decoded to be shown"


@pytest.mark.parametrize("kind", [0xC3, 0xC5, 0xC9, 0xCA, 0xCB, 0xCF])
def test_rare_kinds_of_jpeg_are_refused(kind: int) -> None:
    """A likely decision takes less than a bit in arithmetic coding, so the bytes of a file do not bound its time."""
    data = encoded(Image.fromarray(noise(40, 30)), "JPEG").replace(b"\xff\xc0", bytes([0xFF, kind]))
    with pytest.raises(InvalidRequest, match="is a JPEG of a rare kind, lossless or with arithmetic coding"):
        open_picture(data)


def test_strips_and_chunks_count_as_the_pixels_that_take_as_long() -> None:
    header = read_header(plain_tiff(noise(3, 1000, 1), rows=1))
    assert (header.passes, header.weight) == (1000 << 14, (1000 << 14) // 18)
    rows = [chunk(b"IDAT", b"")] * 500
    assert read_header(png(9, 7, *rows)).passes == 501 << 12


def test_a_path_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # of zeros, on no disk
    with pytest.raises(InvalidRequest, match="can't be read: 1,099,511,627,776 bytes, and at most 67,108,864 are read"):
        read(path)


def test_a_figure_is_drawn_by_its_own_canvas() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure(figsize=(2, 1), dpi=50)
    axes = figure.subplots(1, 2)
    axes[0].plot([1, 2])
    for part in axes:
        part.set_axis_off()  # no letters: fonts take a second
    figure.set_facecolor("red")
    picture = read(figure)
    assert (picture.width, picture.height, figure.dpi) == (100, 50, 50)
    assert picture.pixels[0, 0].tolist() == [255, 0, 0]
    assert picture.pixels[:, :, 0].min() < 100, "the line"
    assert read(axes[0]) == read(axes) == picture
    with pytest.raises(InvalidRequest, match="has 500,000 × 50 pixels"):
        read(figures.Figure(figsize=(10_000, 1), dpi=50))
    other = figures.Figure().subplots()
    with pytest.raises(InvalidRequest, match="is no image"):
        read(np.array([axes[0], other]))


def test_a_plot_of_pandas_is_its_figure() -> None:
    pandas = pytest.importorskip("pandas")
    figures = pytest.importorskip("matplotlib.figure")
    table = pandas.DataFrame({"a": [1, 3, 2], "b": [2, 1, 4]})
    figure = figures.Figure(figsize=(2, 2), dpi=40)
    axes = figure.subplots(2, 1)
    plots = table.plot(ax=axes, subplots=True, legend=False)
    for part in axes:
        part.set_axis_off()
    assert read(plots) == read(figure) == read(axes[1])
    with pytest.raises(InvalidRequest, match="images='DataFrame': is no image"):
        read(table)


def test_reading_neither_imports_pillow_early_nor_pyplot() -> None:
    code = (
        "import sys, rekindle._src.images as images, numpy as np\n"
        "assert not {'PIL', 'matplotlib', 'jax', 'pandas'} & set(sys.modules), 'light'\n"
        "images.open_picture(np.zeros((3, 4), np.uint8)).decode()\n"
        "assert 'PIL' not in sys.modules\n"
        "sys.modules['PIL'] = None\n"
        "try: images.open_picture(np.zeros((3, 4, 4), np.uint8))\n"
        "except images.picture.MissingExtra as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout == "pillow is not installed; run: pip install 'rekindle[images]'\n"
    assert MissingExtra("pillow", "images").extra == "images"


def test_headers_are_read_alike_by_pillow() -> None:
    for name, data in ordinary().items():
        header, image = read_header(data), Image.open(io.BytesIO(data))
        assert header.format == str(image.format).replace("MPO", "JPEG"), name
        stored = header.upright if header.format == "TIFF" else (header.width, header.height)
        assert stored == image.size, name
    assert repr(open_picture(ordinary()["bmp"])) == "EncodedPicture(BMP, 37×23, 2,630 bytes)"
    assert repr(read(ordinary()["bmp"])).startswith("Picture(37×23, sha256=")
