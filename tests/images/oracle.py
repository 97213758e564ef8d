"""Transformers' processors of the cases, with their outputs in the layout of `PicturePatches`."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from images.cases import Files
from rekindle._src.images import Picture


class Reference(NamedTuple):
    """What transformers computes of a picture: patches of all views, their (row, column), and the image's text."""

    values: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any] | None
    text: str


MODULES = {
    "Qwen2VLImageProcessor": ("qwen2_vl", "qwen3_vl", "Qwen3VLProcessor"),
    "Gemma3ImageProcessor": ("gemma3", "gemma3", "Gemma3Processor"),
    "Gemma4ImageProcessor": ("gemma4", "gemma4", "Gemma4Processor"),
    "Gemma4UnifiedImageProcessor": ("gemma4_unified", "gemma4_unified", "Gemma4UnifiedProcessor"),
    "SmolVLMImageProcessor": ("smolvlm", "smolvlm", "SmolVLMProcessor"),
    "Idefics3ImageProcessor": ("idefics3", "idefics3", "Idefics3Processor"),
    "Lfm2VlImageProcessor": ("lfm2_vl", "lfm2_vl", "Lfm2VlProcessor"),
}
TOKENS = {
    "Qwen2VLImageProcessor": {"image_token": "<|image_pad|>"},
    "Gemma3ImageProcessor": {},
    "Gemma4ImageProcessor": {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    "Gemma4UnifiedImageProcessor": {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    "SmolVLMImageProcessor": {
        "fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "global_image_token": "<global-img>",
    },
    "Idefics3ImageProcessor": {
        "fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "global_image_tag": "<global-img>",
    },
    "Lfm2VlImageProcessor": {
        "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
}  # fmt: skip


def processor_of(files: Files) -> Any:
    """Return transformers' image processor of these files: the one on Pillow, or on torchvision where it is alone."""
    module, name = MODULES[files.family][0], files.family
    pillow = name not in ("Lfm2VlImageProcessor", "Gemma4UnifiedImageProcessor")
    kind = "image_processing_pil" if pillow else "image_processing"
    loaded = importlib.import_module(f"transformers.models.{module}.{kind}_{module}")
    keys = {key: value for key, value in files.preprocessor.items() if not key.endswith(("_type", "_class", "_length"))}
    return getattr(loaded, f"{name}Pil" if pillow else name)(**keys)


def reference(files: Files, picture: Picture) -> Reference:
    """Return what transformers computes of the same decoded pixels."""
    from PIL import Image

    processor, family = processor_of(files), files.family
    splits = {"return_row_col_info": True} if family[:4] in ("Smol", "Idef", "Lfm2") else {}
    image = Image.fromarray(picture.pixels)
    tensors = "pt" if processor.backend == "torchvision" else "np"
    outputs = processor([image], return_tensors=tensors, **splits)
    values = np.asarray(outputs["pixel_values"])
    positions = None
    if family == "Qwen2VLImageProcessor":
        positions = None
    elif family.startswith("Gemma4"):
        count = int(np.asarray(outputs["num_soft_tokens_per_image"])[0])
        count *= 1 if "Unified" in family else processor.pooling_kernel_size**2
        places = np.asarray(outputs["image_position_ids"])[0]
        assert (places[count:] == -1).all() and not values[0, count:].any(), "padding"
        values, positions = values[0, :count], places[:count, ::-1]
    elif family.startswith("Lfm2"):
        mask = np.asarray(outputs["pixel_attention_mask"]).astype(bool)
        values = values[mask]
        shapes = np.asarray(outputs["spatial_shapes"])
        positions = np.concatenate([np.stack(np.indices(shape), -1).reshape(-1, 2) for shape in shapes])
    else:
        if not family.startswith("Gemma3"):
            assert np.asarray(outputs["pixel_attention_mask"]).all(), "tiles have no padding"
            values = values[0]
        patch = files.config["vision_config"]["patch_size"]
        views, _, height, width = values.shape
        grid = values.reshape(views, 3, height // patch, patch, width // patch, patch)
        values = grid.transpose(0, 2, 4, 1, 3, 5).reshape(-1, 3 * patch * patch)
    return Reference(values.astype(np.float32, copy=False), positions, _text(files, processor, outputs))


def _text(files: Files, processor: Any, outputs: Any) -> str:
    """Return what transformers writes in the place of an image, from the function of its processor alone."""
    _, module, name = MODULES[files.family]
    whole = getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), name)
    own: Any = SimpleNamespace(image_processor=processor, **TOKENS[files.family])
    own.image_seq_len = files.processor.get("image_seq_len")
    if module == "gemma3":
        tokens = files.preprocessor["image_seq_length"]
        own.full_image_sequence = f"\n\n<start_of_image>{'<image_soft_token>' * tokens}<end_of_image>\n\n"
    for method in (
        "_get_image_num_tokens",
        "_build_image_tokens",
        "_compute_tokens_per_tile",
        "_compute_tokens_for_image",
    ):
        if hasattr(whole, method):
            setattr(own, method, getattr(whole, method).__get__(own))
    return str(whole.replace_image_token(own, outputs, 0, use_image_special_tokens=True))
