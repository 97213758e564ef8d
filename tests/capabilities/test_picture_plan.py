"""Numbers of pictures are in two files of a checkpoint, which have to mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.picture_models import CASES
from rekindle._src.capabilities.pictures.reading import misfit
from rekindle._src.images.registry import processor_of_files
from rekindle._src.models.vision.registry import vision_config

TYPES = {name: name.removesuffix("-both-ways").replace("-", "_").replace(".", "_") for name in CASES}


def found(name: str, **keys: Any) -> str | None:
    """Return why a small model's encoder can't read the output of a processor whose file has other keys."""
    case = CASES[name]
    processor = processor_of_files({**case.preprocessor, **keys}, case.processor, case.config)
    config = vision_config({"model_type": TYPES[name], **case.config})
    assert config is not None
    return misfit(processor, config)


@pytest.mark.parametrize("name", CASES)
def test_the_files_of_small_models_fit(name: str) -> None:
    assert found(name) is None


@pytest.mark.parametrize(
    ("name", "keys", "problem"),
    [
        ("qwen3-vl", {"patch_size": 14}, r"patches are \[\d+, 1176\], expected \[\d+, 1536\]"),
        ("qwen3-vl", {"temporal_patch_size": 1}, r"patches are .* 768\], expected"),
        ("qwen3-vl", {"merge_size": 4}, r"patches stand for 16 tokens, and become 64"),
        ("qwen3-vl", {"merge_size": 1}, "patches stand for"),
        ("gemma4", {"pooling_kernel_size": 2}, "are not whole tokens of 3 × 3"),
        ("gemma4", {"patch_size": 8}, "patches are"),
        ("gemma4-unified", {"pooling_kernel_size": 2}, "patches are"),
        ("lfm2-vl", {"downsample_factor": 4}, "patches stand for"),
        ("lfm2-vl", {"encoder_patch_size": 32, "downsample_factor": 1}, "patches are|whole tokens|stand for"),
    ],
)
def test_what_does_not_fit_is_told_before_a_picture_comes(name: str, keys: dict[str, Any], problem: str) -> None:
    """Each request with a picture failed with a ValueError in the encoder's thread."""
    with pytest.raises(AssertionError, match=problem):
        assert found(name, **keys) is None, found(name, **keys)
