"""Pictures: what a caller passes as an image, checked, decoded and turned upright into pixels with a digest.

`open_picture` tells an image's size from its header, before anything is decoded. `decode()` of what it returns
makes the `Picture`. Both raise `InvalidRequest`, in words of their own: no text of a library reaches a caller.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle._src.core.names import path_problem
from rekindle._src.core.plain_files import read_plain
from rekindle._src.images.formats.parts import SCANS, HeaderProblem, ImageHeader
from rekindle._src.images.formats.tiff import COMPRESSED
from rekindle._src.images.headers import bare_file, read_header
from rekindle.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # [h, w, 3]: red, green, blue

_SMALLER = "Pass a smaller one"
_KINDS = (
    "Pass a path, the bytes of a file, a data: URI, a PIL image, a NumPy array of [height, width] or "
    "[height, width, 3], a matplotlib figure, or a plot of pandas or seaborn"
)
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"})
_MODES_OF_16_BITS = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
STRIP = 1 << 20  # pixels that are converted at once, so that a large picture is not in memory three times
_WORK, _WORK_OF_A_BYTE = 32, 40  # nanoseconds that decoders took at most for a pixel, and for a byte of noise
_MOST_OF_PREFIX = 256  # characters of a data: URI before its comma


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """The most that is decoded: bytes, pixels and pixels along a side of each picture, and all pictures of a request.

    They are checked before decoding, which takes up to 12 bytes a pixel, and 18 for WebP; a `Picture` keeps 3. A pixel
    takes 32 ns of a Xeon's core at most, and 1.3 ns more for each scan of a JPEG: pixels that are passed over are
    bounded by 18 times `pixels`, and count as so many fewer in `total_pixels`. `side` bounds the filters of a resize,
    which have 48 bytes for each pixel of the longer side.
    """

    bytes: int = 1 << 26
    pixels: int = 1 << 26
    side: int = 65_535
    count: int = 64
    total_pixels: int = 1 << 28

    def check_size(self, width: int, height: int) -> None:
        """Raise `HeaderProblem` for a picture that is too large."""
        if width < 1 or height < 1:
            raise HeaderProblem(f"has no pixels: it is {width} × {height}", "Pass a picture of at least one pixel")
        if width * height > self.pixels or max(width, height) > self.side:
            raise HeaderProblem(
                f"has {width:,} × {height:,} pixels; at most {self.pixels:,} are read, and {self.side:,} along a side",
                _SMALLER,
            )

    def check_header(self, header: ImageHeader) -> None:
        """Raise `HeaderProblem` for a picture that is too large, or passed over too often."""
        self.check_size(header.width, header.height)
        if header.weight > self.pixels:
            parts = f"{header.passes:,} pixels in all of its scans or parts; at most {self.pixels * SCANS:,} are read"
            fix = "Save it as a plain PNG or as a JPEG that is not progressive"
            raise HeaderProblem(f"has {header.width:,} × {header.height:,} pixels, but {parts}", fix)

    def check_bytes(self, size: int) -> None:
        """Raise `HeaderProblem` for a file that is too large."""
        if size > self.bytes:
            raise HeaderProblem(f"has {size:,} bytes; at most {self.bytes:,} are read", _SMALLER)


DEFAULT_LIMITS = PictureLimits()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Picture:
    """A picture as models read it: upright, 8 bits of red, green and blue, and transparent parts on white.

    `digest` is the SHA-256 of mode, size, type and pixels, each with its length before it, so two pictures have the
    same digest only if they have the same pixels in the same shape. The file they came from does not matter.
    """

    pixels: Pixels
    digest: str

    @classmethod
    def of(cls, pixels: Pixels) -> Picture:
        """Return the picture of contiguous RGB pixels, which are read-only from here on."""
        height, width, channels = pixels.shape
        assert channels == 3, "red, green and blue"
        assert pixels.itemsize == 1, "of 8 bits"
        assert pixels.flags.c_contiguous, "its bytes are hashed as they lie"
        pixels.flags.writeable = False
        state = hashlib.sha256()
        for part in (b"rekindle.picture.1", b"RGB", f"{width}x{height}".encode(), pixels.dtype.str.encode()):
            state.update(len(part).to_bytes(8, "little") + part)
        state.update(pixels.nbytes.to_bytes(8, "little"))
        state.update(pixels.data)
        return cls(pixels, state.hexdigest())

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def weight(self) -> int:
        """Its pixels."""
        return self.width * self.height

    @property
    def work(self) -> int:
        """About how many nanoseconds its pixels take until they are patches."""
        return _WORK * self.weight

    @property
    def content(self) -> str:
        """A digest of what was passed."""
        return f"pixels {self.digest}"

    def decode(self) -> Picture:
        """Return this picture, which is decoded."""
        return self

    def encode(self) -> EncodedPicture:
        """Return it as a PNG, which has the same pixels."""
        stream = io.BytesIO()
        _pillow().fromarray(self.pixels).save(stream, "PNG", compress_level=1)
        return open_bytes(stream.getvalue())

    def __deepcopy__(self, memory: object) -> Picture:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Picture({self.width}×{self.height}, sha256={self.digest[:12]}…)"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EncodedPicture:
    """The bytes of an image file after its header was read: its upright size is known, its pixels are not decoded."""

    data: bytes
    header: ImageHeader
    limits: PictureLimits
    place: _Place

    @property
    def width(self) -> int:
        return self.header.upright[0]

    @property
    def height(self) -> int:
        return self.header.upright[1]

    @property
    def weight(self) -> int:
        """The pixels that it counts as, by its header."""
        return self.header.weight

    @property
    def work(self) -> int:
        """About how many nanoseconds it takes until it is patches, by its header and bytes."""
        return _WORK * self.header.width * self.header.height + self.header.passes + _WORK_OF_A_BYTE * len(self.data)

    @property
    def content(self) -> str:
        """A digest of what was passed."""
        return f"file {hashlib.sha256(self.data).hexdigest()}"

    def decode(self) -> Picture:
        """Return the picture; a JPEG of 4096 × 4096 takes 0.6 s. Raises `InvalidRequest` if the file is broken."""
        pillow, header = _pillow(), self.header
        broken = HeaderProblem(f"is a {header.format} that can't be decoded", "Save or download it again")
        with self.place:
            try:
                image = pillow.open(io.BytesIO(bare_file(self.data, header)), formats=[header.format])
                self.limits.check_size(*image.size)
                if header.format == "TIFF" and any(tile[0] != "raw" for tile in image.tile):  # as Pillow reads the tags
                    raise HeaderProblem(*COMPRESSED)
                size = header.width, header.height
                if image.size == size:
                    image.load()
                if image.size != size:
                    raise HeaderProblem(f"is a {header.format} with two different sizes", "Save or download it again")
                pixels = _rgb(image)
            except HeaderProblem:
                raise
            except Exception:  # decoders raise whatever a stranger's bytes lead them to
                raise broken from None
            return Picture.of(_upright(pixels, header.orientation))

    def encode(self) -> EncodedPicture:
        """Return this picture, which is encoded."""
        return self

    @property
    def uri(self) -> str:
        """The file as a `data:` URI in base64."""
        return f"data:image/{self.header.format.lower()};base64,{base64.b64encode(self.data).decode()}"

    def __repr__(self) -> str:
        return f"EncodedPicture({self.header.format}, {self.width}×{self.height}, {len(self.data):,} bytes)"


@dataclass(frozen=True, slots=True)
class _Place:
    """The argument of a picture, and its kind: `with place` names both in the errors of its block."""

    field: str
    shown: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, HeaderProblem):
            raise InvalidRequest(self.field, self.shown, error.problem, error.fix) from None


def open_picture(
    source: object, *, field: str = "images", limits: PictureLimits = DEFAULT_LIMITS
) -> EncodedPicture | Picture:
    """Return the picture in `source`, with its size. Files are not decoded yet; arrays are.

    `source` is a path, the bytes of a file, a `data:` URI, a PIL image, a NumPy array, a matplotlib figure, or what a
    plot of pandas returns. Files are PNG, JPEG, WebP, GIF, BMP or uncompressed TIFF; their EXIF orientation is applied,
    as it is to a PIL image. An animated file is refused, since the model would see its first frame alone; a PIL image
    is the frame that it stands at. 16 bits a channel are reduced to their upper 8. An array is [height, width], or that
    with 1, 3 or 4 channels last, of uint8, uint16, bool, or floats from 0 to 1; its layout is never guessed. No URL is
    fetched.

    A text from another machine is for `decode_uri`: here it might be the path of a file of this one.
    Raises `InvalidRequest`, which names `field`, such as `messages[0].content[1]`, and `MissingExtra` without Pillow.
    """
    if isinstance(source, EncodedPicture | Picture):
        return source
    if isinstance(source, str):
        if source[:5].lower() == "data:":
            return decode_uri(source, field=field, limits=limits)
        if "://" in source[:64]:
            place = _Place(field, source[:100])
            with place:
                raise HeaderProblem("is a URL, and nothing is fetched", "Pass the path or the bytes of an image file")
    if isinstance(source, str | Path):
        return _from_path(source, field, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return open_bytes(bytes(source), field=field, limits=limits)
    kind = type(source).__name__
    if _is_a("PIL.Image", "Image", source):
        image: Any = source
        place = _Place(field, f"PIL image of mode {image.mode}, {image.width}×{image.height}")
        with place:
            return _from_pil(image, limits)
    if isinstance(source, np.ndarray) and source.dtype != object:
        with _Place(field, f"array of {source.dtype}, {'×'.join(map(str, source.shape)) or 'no axes'}"):
            return Picture.of(_from_array(source, limits))
    figure = _figure(source)
    place = _Place(field, kind)
    with place:
        if figure is None:
            raise HeaderProblem("is no image", _KINDS)
        data = _drawn(figure, limits)
    return open_bytes(data, field=field, limits=limits).decode()


def open_pictures(
    sources: Iterable[object], *, field: str = "images", limits: PictureLimits = DEFAULT_LIMITS
) -> tuple[EncodedPicture | Picture, ...]:
    """Return the pictures of a request. Raises `InvalidRequest` for too many, or too many pixels in all of them."""
    pictures: list[EncodedPicture | Picture] = []
    pixels = 0
    for index, source in enumerate(sources):
        name = f"{field}[{index}]"
        place = _Place(name, type(source).__name__)
        with place:
            if index >= limits.count:
                raise HeaderProblem(f"is one too many: at most {limits.count} pictures are read", "Pass fewer")
        picture = open_picture(source, field=name, limits=limits)
        pixels += picture.weight
        with place:
            if pixels > limits.total_pixels:
                raise HeaderProblem(
                    f"makes {pixels:,} pixels in all; at most {limits.total_pixels:,} are read",
                    "Pass fewer or smaller ones",
                )
        pictures.append(picture)
    return tuple(pictures)


def open_bytes(data: bytes, *, field: str = "images", limits: PictureLimits = DEFAULT_LIMITS) -> EncodedPicture:
    """Return the picture of an image file's bytes, not decoded yet. Raises `InvalidRequest`."""
    place = _Place(field, f"{len(data):,} bytes")
    with place:
        limits.check_bytes(len(data))
        header = read_header(data)
        limits.check_header(header)
    return EncodedPicture(data, header, limits, place)


def decode_uri(uri: str, *, field: str = "images", limits: PictureLimits = DEFAULT_LIMITS) -> EncodedPicture:
    """Return the picture of a `data:` URI in base64, not decoded yet. Raises `InvalidRequest`.

    The file says what it is; the type in the URI has only to be one of an image.
    """
    with _Place(field, uri[:60] + ("…" if len(uri) > 60 else "")):
        prefix, comma, _ = uri[:_MOST_OF_PREFIX].partition(",")
        kind, *options = prefix[5:].lower().split(";")
        if not comma or prefix[:5].lower() != "data:" or options[-1:] != ["base64"] or kind.split("/")[0] != "image":
            raise HeaderProblem("is no image in base64", "Write data:image/png;base64, and the file's bytes in base64")
        characters = len(uri) - len(prefix) - 1
        if characters > limits.bytes // 3 * 4 + limits.bytes // 16 + 1024:  # with line breaks
            raise HeaderProblem(
                f"has {characters:,} characters of base64; at most {limits.bytes:,} bytes are read", _SMALLER
            )
        try:
            text = uri[len(prefix) + 1 :].encode("ascii").translate(None, b"\r\n\t ")
            data = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            raise HeaderProblem("is not valid base64", "Encode the file's bytes by base64.b64encode") from None
    return open_bytes(data, field=field, limits=limits)


def _from_path(source: str | Path, field: str, limits: PictureLimits) -> EncodedPicture:
    text = str(source)
    place = _Place(field, text[:200])
    with place:
        problem = path_problem(text[:10_000])
        if problem is not None:
            raise HeaderProblem(problem, "Pass a path, or a file in base64 as data:image/png;base64,…")
        path = Path(text).expanduser()
        try:
            data = read_plain(path, limits.bytes)
        except FileNotFoundError:
            raise HeaderProblem("is no file", "Pass the path of an image file") from None
        except OSError as error:
            reason = error.strerror or "it can't be read"
            raise HeaderProblem(f"can't be read: {reason.lower()}", "Pass the path of an image file") from None
        header = read_header(data)
        limits.check_header(header)
    return EncodedPicture(data, header, limits, place)


def _pillow() -> ModuleType:
    """Return Pillow's `Image` module. Raises `MissingExtra`."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("pillow", "images") from None
    logger = logging.getLogger("PIL")
    if not logger.handlers:  # without one, logging writes what Pillow says of a stranger's file to stderr
        logger.addHandler(logging.NullHandler())
    return Image


def _is_a(module: str, name: str, source: object) -> bool:
    """True if an object is of a class of a package that may not be installed: it is not imported for this."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(source, kind)


def _from_pil(image: Image, limits: PictureLimits) -> Picture:
    limits.check_size(*image.size)
    try:
        image.load()
        orientation = image.getexif().get(274, 1)
        pixels = _rgb(image)
    except HeaderProblem:
        raise
    except Exception:
        raise HeaderProblem("can't be decoded", "Open it again, or pass its path") from None
    return Picture.of(_upright(pixels, orientation if orientation in range(1, 9) else 1))


def _rgb(image: Image) -> Pixels:
    """Return a decoded image's pixels. Raises `HeaderProblem` for kinds of pixels that are no colours.

    These are the conversions of transformers' processors, which put transparent parts on white too. Of 16 bits they
    keep values up to 255 and make white of all others; here the upper 8 bits are kept.
    """
    mode, (width, height) = image.mode, image.size
    if mode in _MODES_OF_16_BITS:
        levels = np.asarray(image)
        return np.repeat((levels.astype(np.uint16) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    if mode not in _MODES:
        raise HeaderProblem(
            f"has pixels of mode {mode[:8]!r}, which are no colours of 8 or 16 bits",
            "Scale them to 0…255, or pass a float array of 0…1",
        )
    pillow = _pillow()
    alpha = "A" in image.getbands() or image.info.get("transparency") is not None
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, STRIP // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        strip = image.crop((0, top, width, bottom))
        if alpha:
            strip = strip.convert("RGBA")
            white = pillow.new("RGBA", strip.size, (255, 255, 255, 255))
            strip = pillow.alpha_composite(white, strip)
        pixels[top:bottom] = np.asarray(strip.convert("RGB"))
    return pixels


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return the pixels as EXIF's orientation says that they are to be shown."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)  # 5 and 7 are mirrored in a diagonal, 6 and 8 are turned
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _from_array(array: np.ndarray[Any, Any], limits: PictureLimits) -> Pixels:
    """Return the pixels of an array. The last of three axes is the channels."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        raise HeaderProblem(
            "is no array of [height, width], or of [height, width, channels] with 1, 3 or 4 channels",
            "Its channels seem to be the first axis: pass np.moveaxis(array, 0, -1)"
            if first
            else "Pass one picture at a time, with its channels as the last axis",
        )
    limits.check_size(int(array.shape[1]), int(array.shape[0]))
    levels = _levels(array[:, :, None] if array.ndim == 2 else array)
    if levels.shape[2] == 4:
        return _rgb(_pillow().fromarray(levels))
    return np.ascontiguousarray(np.broadcast_to(levels, (*levels.shape[:2], 3)))


def _levels(array: np.ndarray[Any, Any]) -> Pixels:
    """Return values of any accepted type as 8 bits."""
    if array.dtype == np.uint8:
        return np.array(array, order="C")  # the caller may change it later
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype == np.uint16:
        return (array >> 8).astype(np.uint8)
    if np.issubdtype(array.dtype, np.floating):
        least, most = float(array.min()), float(array.max())
        if not (least >= 0 and most <= 1):  # NaN is refused too
            raise HeaderProblem(
                f"has floats from {least:.4g} to {most:.4g}, and pixels in floats are from 0 to 1",
                "Divide them by their largest value, or pass (array).astype(np.uint8) if they are 0…255",
            )
        return np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    raise HeaderProblem(
        f"has the type {array.dtype}, and pixels are uint8, uint16, bool or floats", "Pass array.astype(np.uint8)"
    )


def _figure_of(artist: Any) -> Any:
    """Return the figure of an artist, which may lie in a subfigure."""
    try:
        return artist.get_figure(root=True)
    except TypeError:  # matplotlib 3.9 has no such argument, and its parts of figures name the whole
        return artist.get_figure().figure


def _all_artists(parts: list[Any]) -> bool:
    return all(_is_a("matplotlib.artist", "Artist", part) for part in parts)


def _figure(source: object) -> Any:
    """Return the matplotlib figure of a figure, axes, pandas' array of axes, or a grid of seaborn."""
    artists: list[Any] = list(source.flat[:256]) if isinstance(source, np.ndarray) else [source]
    if not _all_artists(artists):
        artists = [getattr(source, "figure", None)]  # a grid's
    if not _all_artists(artists):
        return None
    figures = {id(figure): figure for figure in (_figure_of(artist) for artist in artists)}
    return next(iter(figures.values())) if len(figures) == 1 else None


def _drawn(figure: Any, limits: PictureLimits) -> bytes:
    """Return a figure as a PNG that its own canvas draws; pyplot is not involved, and the figure stays as it is."""
    width, height = (round(float(side) * float(figure.dpi)) for side in figure.get_size_inches())
    limits.check_size(width, height)
    file = io.BytesIO()
    try:
        figure.savefig(file, format="png", dpi=figure.dpi)
    except Exception:
        raise HeaderProblem("can't be drawn", "Call its savefig() to see the reason") from None
    return file.getvalue()
