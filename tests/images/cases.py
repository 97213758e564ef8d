"""Pictures, and processors' files as published checkpoints have them, which tests of images share."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rekindle._src.images import Picture, PictureProcessor, processor_of_files

HALF = [0.5, 0.5, 0.5]
GOLDEN = Path(__file__).parent / "golden.json"


class Files(NamedTuple):
    """The content of preprocessor_config.json, processor_config.json and config.json."""

    preprocessor: dict[str, Any]
    processor: dict[str, Any]
    config: dict[str, Any]

    @property
    def family(self) -> str:
        return str(self.preprocessor["image_processor_type"]).removesuffix("Fast")

    def open(self) -> PictureProcessor:
        return processor_of_files(self.preprocessor, self.processor, self.config)


CASES = {
    "qwen3-vl": Files(
        {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": HALF, "image_std": HALF,
            "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        {},
        {},
    ),
    "qwen2-vl, few pixels": Files(
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 20000, "resample": 3},
        {},
        {},
    ),
    "gemma3": Files(
        {
            "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}, "resample": 2,
            "image_mean": HALF, "image_std": HALF, "rescale_factor": 0.00392156862745098, "image_seq_length": 256,
            "do_convert_rgb": None, "do_pan_and_scan": None, "do_normalize": True, "do_rescale": True,
            "do_resize": True, "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
            "pan_and_scan_min_ratio_to_activate": None, "processor_class": "Gemma3Processor",
        },
        {"image_seq_length": 256, "processor_class": "Gemma3Processor"},
        {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256},
    ),
    "gemma3, pan and scan": Files(
        {
            "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56},
            "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2, "image_seq_length": 4,
        },
        {},
        {"vision_config": {"image_size": 56, "patch_size": 14}},
    ),
    "gemma4": Files(
        {
            "image_processor_type": "Gemma4ImageProcessor", "do_normalize": False, "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0], "patch_size": 16, "max_soft_tokens": 280, "pooling_kernel_size": 3,
            "resample": 3,
        },
        {},
        {},
    ),
    "gemma4, 70 tokens": Files(
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "do_normalize": True}, {}, {}
    ),
    "smolvlm2": Files(
        {
            "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 2048}, "resample": 1,
            "max_image_size": {"longest_edge": 512}, "image_mean": HALF, "image_std": HALF, "do_image_splitting": True,
            "rescale_factor": 0.00392156862745098, "do_pad": True, "do_convert_rgb": True,
        },
        {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
        {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
    ),
    "idefics3, small tiles": Files(
        {
            "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 140},
            "max_image_size": {"longest_edge": 56}, "resample": 1,
            "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4],
        },
        {"image_seq_len": 4},
        {"vision_config": {"patch_size": 14}, "scale_factor": 2},
    ),
    "smolvlm2, one view": Files(
        {
            "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 128},
            "max_image_size": {"longest_edge": 64}, "do_image_splitting": False,
        },
        {"image_seq_len": 4},
        {"vision_config": {"patch_size": 16}, "scale_factor": 2},
    ),
}  # fmt: skip
# Families whose processor in transformers needs torchvision.
TORCHVISION = {
    "gemma4 unified": Files({"image_processor_type": "Gemma4UnifiedImageProcessor", "max_soft_tokens": 280}, {}, {}),
    "lfm2-vl": Files(
        {
            "image_processor_type": "Lfm2VlImageProcessorFast", "do_image_splitting": True, "downsample_factor": 2,
            "encoder_patch_size": 16, "image_mean": HALF, "image_std": HALF, "max_image_tokens": 256,
            "max_num_patches": 1024, "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64,
            "min_tiles": 2, "resample": 2, "rescale_factor": 0.00392156862745098, "size": {"height": 512, "width": 512},
            "tile_size": 512, "use_thumbnail": True,
        },
        {},
        {},
    ),
}  # fmt: skip

# Width and height: those that other engines took for channels, odd ones, extreme ratios, and ordinary ones.
SIZES = (
    (1, 1), (1, 3), (3, 1), (3, 3), (1, 40), (40, 1), (3, 100), (100, 3), (2, 2), (4, 5), (17, 31), (56, 56), (64, 48),
    (99, 101), (200, 1), (1, 200), (300, 57), (57, 300), (320, 240), (511, 513), (641, 479),
)  # fmt: skip
MORE_SIZES = (
    (1023, 767),
    (1920, 1080),
    (1080, 1921),
    (2048, 2048),
    (700, 5),
    (5, 999),
    (2600, 300),
    (896, 896),
    (3, 599),
)
EXTREME = ((201, 1), (1, 1000), (5000, 2), (1, 65535))


def picture(width: int, height: int) -> Picture:
    """Return a picture with fine and coarse structure."""
    x, y = np.arange(width, dtype=np.int64)[None, :], np.arange(height, dtype=np.int64)[:, None]
    red, green, blue = (x * x * 3 + y * 5 + x * y) % 256, (x * 255 // width + y) % 256, (y * y + 7 * x) % 251
    return Picture.of(np.ascontiguousarray(np.stack([red, green, blue], axis=-1).astype(np.uint8)))


def digest(values: np.ndarray[Any, Any], text: str) -> str:
    """Return a digest of patches in float32 and of an image's text."""
    assert values.dtype == np.float32
    return hashlib.sha256(np.ascontiguousarray(values)).hexdigest()[:24] + digest_of_text(text, len(values))


def digest_of_text(text: str, patches: int) -> str:
    """Return a digest of an image's text and of its number of patches."""
    return hashlib.sha256(f"{patches} {text}".encode()).hexdigest()[:16]


@cache
def golden() -> dict[str, dict[str, str]]:
    """Return the digests of what transformers' processors computed, by case and size: see make_golden.py."""
    return json.loads(GOLDEN.read_text())
