"""Bounds on pictures and on what reads them."""

from __future__ import annotations

from project.bounds.records import MACHINE, OURS, PACE, SHOWN, SMALL, Bound, Other

PIXELS = Other("pixels of a picture: decoding takes up to 7 bytes each, 16 for WebP; see PictureLimits")
HEADER = Other("what a decoder would read and is no pixel: counted in the header, before a decoder is called")

BOUNDS: list[Bound] = []

OTHERS: dict[str, dict[str, Other]] = {
    "images/formats/gif.py": {"_MOST_BLOCKS": HEADER, "_MOST_COMMENT": HEADER},
    "images/formats/jpeg.py": {
        "_MOST_SEGMENTS": HEADER, "_MOST_METADATA": HEADER, "_MOST_TABLES": HEADER, "_MOST_FILL": HEADER,
        "_MOST_SCANS": Other("passes over all pixels of a JPEG"),
    },
    "images/formats/png.py": {"_MOST_CHUNKS": HEADER, "_MOST_DATA_CHUNKS": HEADER},
    "images/formats/tiff.py": {
        "MOST_EXIF": HEADER, "_MOST_TAGS": HEADER, "_MOST_STRIPS": HEADER, "_MOST_PLANES": HEADER,
    },
    "images/formats/webp.py": {"_MOST_CHUNKS": HEADER},
    "images/picture.py": {"_MOST_OF_PREFIX": SMALL, "DEFAULT_LIMITS": PIXELS},
    "images/qwen.py": {"_MOST_RATIO": PIXELS},
    "images/registry.py": {"MOST_PATCHES": MACHINE, "MOST_CODES": MACHINE},
    "images/settings.py": {"MOST_SIDE": PIXELS, "MOST_PIXELS": PIXELS},
    "images/smolvlm.py": {"_MOST_TILES": MACHINE},
    "images/thumbnail.py": {"MOST_BYTES": SHOWN, "MOST_DECODED": PIXELS},
    "models/vision/config.py": {
        "MAX_SIZE": MACHINE, "MAX_POSITIONS": MACHINE, "MAX_SIDE": MACHINE, "MAX_PATCH": MACHINE,
    },
    "notebook/attachments.py": {"MOST_FILE": PIXELS, "MOST_OF_CHAT": OURS, "MOST_SHOWN": SHOWN},
    "notebook/transcripts.py": {"MOST": PACE},
}  # fmt: skip
