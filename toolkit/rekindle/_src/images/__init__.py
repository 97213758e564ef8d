"""Pictures on the host: files and arrays become pixels, and pixels become the patches and tokens of each model family.

It needs Pillow, which the extra `images` installs, and imports it where a picture is decoded.
"""

from rekindle._src.images.picture import (
    EncodedPicture,
    Picture,
    PictureLimits,
    decode_uri,
    open_bytes,
    open_picture,
    open_pictures,
)
from rekindle._src.images.processor import (
    PicturePatches,
    PicturePlan,
    PictureProcessor,
    PictureView,
    TokenRun,
    text_of,
)
from rekindle._src.images.registry import processor_of_files, processor_of_mmproj

__all__ = [
    "EncodedPicture",
    "Picture",
    "PictureLimits",
    "PicturePatches",
    "PicturePlan",
    "PictureProcessor",
    "PictureView",
    "TokenRun",
    "decode_uri",
    "open_bytes",
    "open_picture",
    "open_pictures",
    "processor_of_files",
    "processor_of_mmproj",
    "text_of",
]
