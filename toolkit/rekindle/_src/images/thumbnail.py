"""Thumbnails: small PNG files of pictures as `data:` URIs, for a notebook's HTML."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.images.picture import EncodedPicture, Picture, open_picture
from rekindle.errors import InvalidRequest, MissingExtra

SIDE = 160  # pixels along the longer side, at most
MOST_BYTES = 24 << 10  # of a thumbnail in all colours; a larger one gets a palette of 256 colours, and 27 kB at most
MOST_DECODED = 1 << 24  # pixels of a file that is decoded for its thumbnail: a quarter of a second


class Thumbnail(NamedTuple):
    """A picture as it is shown; of one that can't be drawn, neither its size nor a thumbnail is known."""

    width: int = 0
    height: int = 0
    thumbnail: str = ""

    @classmethod
    def of(cls, source: object) -> Thumbnail:
        """Return the thumbnail of a picture in any form. No file is opened, so a path has none."""
        if isinstance(source, str | Path) and str(source)[:5].lower() != "data:":
            return cls()
        try:
            picture = open_picture(source)
        except (InvalidRequest, MissingExtra):
            return cls()
        return cls(picture.width, picture.height, thumbnail(picture))


def thumbnail(picture: EncodedPicture | Picture) -> str:
    """Return a thumbnail; empty for a broken file, or one too large to decode for it."""
    if isinstance(picture, EncodedPicture) and picture.weight > MOST_DECODED:
        return ""
    try:
        from PIL import Image

        small = Image.fromarray(picture.decode().pixels)
    except (ImportError, MissingExtra, InvalidRequest):
        return ""
    small.thumbnail((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    content = _png(small)
    if len(content) > MOST_BYTES:
        content = _png(small.quantize(256))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
