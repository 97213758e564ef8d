"""Finds the processor of a checkpoint's pictures: by its image processor's type, or by an mmproj file's projector."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from rekindle._src.images.gemma3 import Gemma3Pictures
from rekindle._src.images.gemma4 import Gemma4Pictures, Gemma4UnifiedPictures
from rekindle._src.images.lfm2 import Lfm2Pictures
from rekindle._src.images.processor import PictureProcessor
from rekindle._src.images.qwen import QwenPictures
from rekindle._src.images.settings import ProcessorSettings
from rekindle._src.images.smolvlm import SmolvlmPictures
from rekindle.errors import InvalidRequest, UnsupportedModel

# Patches of a picture, and bytes of all of them. Qwen3-VL's largest pictures have 65,536 patches, 100 MB in all.
MOST_PATCHES, MOST_CODES = 1 << 20, 1 << 29
_SIZES = ((1, 1), (8192, 8192), (1, 200), (200, 1), (1, 65_535), (65_535, 1), (1024, 65_535), (65_535, 1024))

FAMILIES: Mapping[str, type[PictureProcessor]] = {
    "Qwen2VLImageProcessor": QwenPictures,
    "Gemma3ImageProcessor": Gemma3Pictures,
    "Gemma4ImageProcessor": Gemma4Pictures,
    "Gemma4UnifiedImageProcessor": Gemma4UnifiedPictures,
    "SmolVLMImageProcessor": SmolvlmPictures,
    "Idefics3ImageProcessor": SmolvlmPictures,
    "Lfm2VlImageProcessor": Lfm2Pictures,
}
PROJECTORS: Mapping[str, type[PictureProcessor]] = {
    "qwen3vl_merger": QwenPictures,
    "gemma3": Gemma3Pictures,
    "gemma4v": Gemma4Pictures,
    "gemma4uv": Gemma4UnifiedPictures,
    "idefics3": SmolvlmPictures,
    "lfm2": Lfm2Pictures,
}


def processor_of_files(preprocessor: object, processor: object = None, config: object = None) -> PictureProcessor:
    """Return the processor of a checkpoint's pictures, from the content of its JSON files.

    `preprocessor` is preprocessor_config.json, `processor` is processor_config.json, which in newer checkpoints has the
    other one inside, and `config` is config.json; None stands for a file that is not there. Raises `UnsupportedModel`.
    """
    outer = ProcessorSettings({} if processor is None else processor, "processor_config.json")
    inner = outer.part("image_processor")
    settings = inner if "image_processor_type" in inner or preprocessor is None else ProcessorSettings(preprocessor)
    name = settings.text("image_processor_type")
    family = FAMILIES.get(name.removesuffix("Fast").removesuffix("Pil"))
    if family is None:
        raise UnsupportedModel(
            f"image_processor_type={name!r} in {settings.where} is not implemented. Implemented: {', '.join(FAMILIES)}."
        )
    whole = ProcessorSettings({} if config is None else config, "config.json")
    return _bounded(family.read(settings, outer, whole), settings.where)


def processor_of_mmproj(metadata: Mapping[str, object], tokens: tuple[int, int] | None = None) -> PictureProcessor:
    """Return the processor of an mmproj file's pictures, from its metadata; keys begin with `clip.`.

    `tokens` are the least and the most tokens of a picture. They are not in the file, and engines differ in them:
    without them they are those of the family's files for transformers. Raises `UnsupportedModel`.
    """
    where = "the mmproj file"
    clip = ProcessorSettings(metadata, where)
    name = clip.text("clip.vision.projector_type") or clip.text("clip.projector_type")
    family = PROJECTORS.get(name)
    if family is None:
        raise UnsupportedModel(
            f"clip.projector_type={name!r} in {where} is not implemented. Implemented: {', '.join(PROJECTORS)}."
        )
    prefix = "clip.vision."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return _bounded(family.from_mmproj(ProcessorSettings(keys, where), tokens), where)


def _bounded(processor: PictureProcessor, where: str) -> PictureProcessor:
    """Return the processor. Raise `UnsupportedModel` if it could turn a picture into too many patches or codes.

    Each number of a file is within bounds, but some are multiplied: a small picture would take gigabytes.
    """
    for width, height in _SIZES:
        with contextlib.suppress(InvalidRequest):  # a size that the family can't read
            patches = processor.plan(width, height).patches
            if patches > MOST_PATCHES or patches * processor.patch_length > MOST_CODES:
                raise UnsupportedModel(
                    f"{where} makes {patches:,} patches, {patches * processor.patch_length:,} bytes, of a picture of "
                    f"{width} × {height}; at most {MOST_PATCHES:,} and {MOST_CODES:,} are computed. Check the file."
                )
    return processor
