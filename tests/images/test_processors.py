"""Patches, positions and texts of pictures equal those of transformers' processors on Pillow, to the last bit."""

from __future__ import annotations

import math
import re
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from helpers.thorough import by_default
from images.cases import (
    CASES,
    EXTREME,
    MORE_SIZES,
    SIZES,
    TORCHVISION,
    Files,
    digest,
    digest_of_text,
    golden,
    picture,
)
from rekindle._src.images import (
    Picture,
    PicturePlan,
    TokenRun,
    processor_of_files,
    processor_of_mmproj,
    text_of,
)
from rekindle._src.images.registry import FAMILIES, PROJECTORS
from rekindle.errors import InvalidRequest, UnsupportedModel

ALL = {**CASES, **TORCHVISION}
# From 13 on, Pillow resizes columns before rows where that is less work, which rounds otherwise. transformers computes
# with the same Pillow: thorough cases compare with it on any, golden files with that of the newer ones.
AS_GOLDEN = int(version("pillow").partition(".")[0]) >= 13
LARGE = {"qwen3-vl", "gemma3", "gemma4", "smolvlm2"}  # of which each picture takes tenths of a second


@pytest.mark.parametrize(
    ("name", "sizes"),
    by_default(
        [
            *((name, SIZES[:1] if name in LARGE else SIZES) for name in CASES),
            *((name, SIZES[1:]) for name in CASES if name in LARGE),
        ],
        len(CASES),
    ),
)
def test_patches_equal_what_transformers_computed(name: str, sizes: tuple[tuple[int, int], ...]) -> None:
    processor = CASES[name].open()
    for width, height in sizes:
        patches = processor.patches(picture(width, height))
        text = text_of(processor.expansion(patches.plan))
        expected = golden()[name][f"{width}x{height}"]
        if AS_GOLDEN:
            assert digest(patches.floats(), text) == expected, (width, height)
        else:
            assert expected.endswith(digest_of_text(text, patches.plan.patches)), (width, height)


@pytest.mark.parametrize("name", TORCHVISION)
def test_texts_of_families_on_torchvision_equal_transformers(name: str) -> None:
    processor = TORCHVISION[name].open()
    for width, height in SIZES:
        plan = processor.plan(width, height)
        text = digest_of_text(text_of(processor.expansion(plan)), plan.patches)
        assert text == golden()[name][f"{width}x{height}"], (width, height)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_patches_equal_those_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    from images.oracle import reference

    processor = CASES[name].open()
    for size in (*SIZES, *MORE_SIZES, *EXTREME):
        source = picture(*size)
        try:
            patches = processor.patches(source)
        except InvalidRequest:
            with pytest.raises(ValueError, match="aspect ratio"):
                reference(CASES[name], source)
            continue
        expected = reference(CASES[name], source)
        np.testing.assert_array_equal(patches.floats(), expected.values, err_msg=str(size))
        assert text_of(processor.expansion(patches.plan)) == expected.text, size
        if expected.positions is not None:
            np.testing.assert_array_equal(patches.positions, expected.positions)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TORCHVISION)
def test_bytes_differ_by_one_at_most_from_torchvision(name: str) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    from images.oracle import reference

    processor = TORCHVISION[name].open()
    for size in (*SIZES, *MORE_SIZES):
        patches, expected = processor.patches(picture(*size)), reference(TORCHVISION[name], picture(*size))
        step = float(patches.levels[0, 1] - patches.levels[0, 0])
        assert np.abs(patches.floats() - expected.values).max() <= 1.001 * step, size
        assert text_of(processor.expansion(patches.plan)) == expected.text, size
        np.testing.assert_array_equal(patches.positions, expected.positions)


@pytest.mark.parametrize("name", ALL)
def test_a_plan_is_arithmetic_and_says_what_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = ALL[name].open()
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "PIL", None)  # importing Pillow would raise
        plans = {size: processor.plan(*size) for size in (*SIZES, *MORE_SIZES)}
    for size, plan in plans.items():
        parts = processor.expansion(plan)
        runs = [part.times for part in parts if isinstance(part, TokenRun) and part.token == processor.image_token]
        assert runs == [view.tokens for view in plan.views], size
        assert plan.tokens == text_of(processor.expansion(plan)).count(processor.image_token) == sum(runs)
        assert (plan.width, plan.height) == size
    for size in SIZES[1:8:3]:
        patches = processor.patches(picture(*size))
        assert patches.plan == plans[size]
        assert len(patches.codes) == len(patches.positions) == plans[size].patches
        assert patches.codes.shape[1] == len(patches.channels)


def test_positions_say_which_part_of_the_picture_a_patch_is() -> None:
    """A picture whose pixels are their own places: the first value of each patch is at its position."""
    processor = CASES["qwen2-vl, few pixels"].open()
    side = 84  # whole blocks within the bounds of pixels: nothing is resized
    places = np.indices((side, side)).astype(np.uint8)
    pixels = np.stack([places[0], places[1], np.zeros((side, side), np.uint8)], axis=-1)
    patches = processor.patches(Picture.of(np.ascontiguousarray(pixels)))
    firsts = np.stack([patches.codes[:, patches.channels == channel][:, 0] for channel in (0, 1)], axis=-1)
    np.testing.assert_array_equal(firsts, patches.positions * 14)
    assert patches.positions[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]], "in the order of the merger's blocks"


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 65535), (40000, 199)])
def test_a_ratio_that_the_model_can_not_read_is_refused_by_its_size_alone(width: int, height: int) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"images\[2\]='{width}×{height}': one side is more than 200 times"
    ) as error:
        CASES["qwen3-vl"].open().plan(width, height, field="images[2]")
    assert error.value.field == "images[2]"


@pytest.mark.parametrize("name", ALL)
def test_no_picture_becomes_much(name: str) -> None:
    """Extreme sizes make neither more patches nor more tokens than the settings allow."""
    processor = ALL[name].open()
    for width in (1, 7, 333, 8192, 65535):
        for height in (1, 5, 1024, 8192):
            try:
                plan = processor.plan(width, height)
            except InvalidRequest:
                assert max(width, height) / min(width, height) > 200
                continue
            assert 0 < plan.tokens <= 17_000
            assert all(view.height * view.width <= 1 << 25 for view in plan.views)


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    (
        "qwen3-vl",
        {"size": {"shortest_edge": 1, "longest_edge": 1 << 40}},
        "longest_edge=1099511627776 in size in prepro",
    ),
    ("qwen3-vl", {"size": {"shortest_edge": 10_000, "longest_edge": 5000}}, "at least 10,000 pixels and at most 5,000"),
    ("qwen3-vl", {"size": {"height": 5, "width": 5}}, "no object of shortest_edge and longest_edge"),
    ("qwen3-vl", {"size": [5, 5]}, "no object with keys"),
    ("qwen3-vl", {"patch_size": 0}, "patch_size=0 in preprocessor_config.json is no whole number from 1 to 256"),
    ("qwen3-vl", {"patch_size": 16.0}, "patch_size=16.0"),
    ("qwen3-vl", {"patch_size": True}, "patch_size=True"),
    ("qwen3-vl", {"merge_size": -2}, "merge_size=-2"),
    ("qwen3-vl", {"temporal_patch_size": 10**9}, "temporal_patch_size"),
    ("qwen3-vl", {"image_mean": [0.5, 0.5]}, "image_mean=list in .* is not three numbers"),
    ("qwen3-vl", {"image_mean": "abc"}, "is not three numbers"),
    ("qwen3-vl", {"image_std": [0.5, 0.0, 0.5]}, "image_std=list in .* is no number from 1e-06 to 1000"),
    ("qwen3-vl", {"image_std": [math.nan, 1, 1]}, "is no number"),
    ("qwen3-vl", {"image_mean": [10**400, 1, 1]}, "is no number"),
    ("qwen3-vl", {"rescale_factor": math.inf}, "rescale_factor=inf"),
    ("qwen3-vl", {"resample": 17}, "resample=17"),
    ("qwen3-vl", {"do_resize": False}, "do_resize=False in .* is not implemented. Implemented: True"),
    ("qwen3-vl", {"do_rescale": "yes"}, "do_rescale='yes' in .* is neither true nor false"),
    ("gemma3", {"size": {"height": 896, "width": 448}}, "is not the tower's 896 pixels in patches of 14"),
    ("gemma3, pan and scan", {"image_seq_length": 5}, "makes 5 tokens"),
    ("gemma3, pan and scan", {"pan_and_scan_max_num_crops": 10**6}, "pan_and_scan_max_num_crops"),
    ("gemma4", {"max_soft_tokens": 281}, "is none of 70, 140, 280, 560, 1120"),
    ("smolvlm2", {"size": {"longest_edge": 4096}, "max_image_size": {"longest_edge": 16}}, "more than 32 tiles"),
    ("smolvlm2", {"max_image_size": {"longest_edge": 500}}, "no whole patches of 16"),
    ("smolvlm2", {"size": {"longest_edge": 10**12}}, "longest_edge=1000000000000"),
    ("lfm2-vl", {"max_tiles": 10**9}, "max_tiles=1000000000"),
    ("lfm2-vl", {"min_tiles": 11}, "min_tiles=11 in .* is more than the 10 of max_tiles"),
    ("lfm2-vl", {"tile_size": 500}, "no whole tokens of 32"),
    ("lfm2-vl", {"min_image_tokens": 999}, "is more than the 256"),
    # Each number is within its bounds, and a picture of one pixel would take 2 to 56 GB.
    (
        "gemma4",
        {"patch_size": 256, "pooling_kernel_size": 16, "max_soft_tokens": 1120},
        "of a picture of 1 × 1; at most",
    ),
    ("gemma4 unified", {"patch_size": 256, "pooling_kernel_size": 16}, "of a picture of 1 × 1; at most"),
    ("lfm2-vl", {"tile_size": 4096, "max_tiles": 32}, "patches, 1,623,192,576 bytes, of a picture of 1 × 65535"),
    (
        "qwen3-vl",
        {"patch_size": 1, "merge_size": 1, "size": {"shortest_edge": 1, "longest_edge": 1 << 26}},
        "67,108,864 patches",
    ),
]


@pytest.mark.parametrize(("name", "keys", "problem"), BROKEN)
def test_numbers_of_a_file_are_checked_before_they_are_used(name: str, keys: dict[str, Any], problem: str) -> None:
    files = ALL[name]
    with pytest.raises(UnsupportedModel, match=problem):
        Files({**files.preprocessor, **keys}, files.processor, files.config).open()


def test_a_tile_has_whole_tokens() -> None:
    """Opening such a model ended with a division by zero."""
    files = ALL["smolvlm2"]
    for scale in (64, 3):
        with pytest.raises(UnsupportedModel, match=f"scale_factor={scale} in config.json does not divide the 32 patch"):
            Files(files.preprocessor, {}, {**files.config, "scale_factor": scale}).open()


def test_processors_are_found_in_either_file_and_unknown_ones_are_named() -> None:
    inner = CASES["gemma4"].preprocessor
    assert processor_of_files(None, {"image_processor": inner, "processor_class": "x"}) == CASES["gemma4"].open()
    assert processor_of_files({**inner, "image_processor_type": "Gemma4ImageProcessorPil"}) == CASES["gemma4"].open()
    with pytest.raises(UnsupportedModel, match=r"image_processor_type='ViltImageProcessor' in preproc.*Qwen2VLImage"):
        processor_of_files({"image_processor_type": "ViltImageProcessor"})
    for junk in ({}, [], "x", {"image_processor_type": 5}):
        with pytest.raises(UnsupportedModel):
            processor_of_files(junk)


MMPROJ: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3vl_merger": (
        {"patch_size": 16, "spatial_merge_size": 2, "image_size": 768, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "qwen3-vl",
    ),
    "gemma3": ({"image_size": 896, "patch_size": 14, "projector.scale_factor": 4}, "gemma3"),
    "gemma4v": (
        {"patch_size": 16, "projector.scale_factor": 3, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}, "gemma4",
    ),
    "gemma4uv": ({"image_mean": [0.0] * 3, "image_std": [1.0] * 3}, "gemma4 unified"),
    "idefics3": (
        {"image_size": 512, "patch_size": 16, "projector.scale_factor": 4, "preproc_image_size": 2048}, "smolvlm2",
    ),
    "lfm2": ({"patch_size": 16, "image_size": 256, "projector.scale_factor": 2}, "lfm2-vl"),
}  # fmt: skip


@pytest.mark.parametrize("projector", MMPROJ)
def test_an_mmproj_file_builds_the_processor_of_the_checkpoints_files(projector: str) -> None:
    keys, name = MMPROJ[projector]
    metadata = {f"clip.vision.{key}": value for key, value in keys.items()}
    arrays = {key: np.array(value) if isinstance(value, list) else np.uint32(value) for key, value in metadata.items()}
    assert set(MMPROJ) == set(PROJECTORS)
    assert processor_of_mmproj({"clip.projector_type": projector, **metadata}) == ALL[name].open()
    assert processor_of_mmproj({"clip.vision.projector_type": projector, **arrays}) == ALL[name].open()
    with pytest.raises(UnsupportedModel, match=r"patch_size=0 in the mmproj file|image_size=0"):
        processor_of_mmproj(
            {"clip.projector_type": projector, "clip.vision.patch_size": 0, "clip.vision.image_size": 0}
        )


def test_engines_differ_in_the_tokens_of_a_picture() -> None:
    keys = {"clip.projector_type": "qwen3vl_merger", "clip.vision.patch_size": 16}
    assert processor_of_mmproj(keys).plan(8, 8).tokens == 64
    assert processor_of_mmproj(keys, tokens=(8, 4096)).plan(8, 8).tokens == 9
    assert processor_of_mmproj(keys, tokens=(8, 4096)).plan(4096, 4096).tokens == 4096
    with pytest.raises(
        UnsupportedModel, match=r"internvl.*in the mmproj file is not implemented. Implemented: qwen3vl"
    ):
        processor_of_mmproj({"clip.projector_type": "internvl"})


def test_expansions_are_short_however_many_tokens_they_have() -> None:
    processor = CASES["qwen3-vl"].open()
    plan = processor.plan(4096, 4096)
    assert processor.expansion(plan) == (TokenRun("<|image_pad|>", 16384),)
    assert processor.before + processor.marker + processor.after == "<|vision_start|><|image_pad|><|vision_end|>"
    crops = CASES["gemma3, pan and scan"].open()
    text = text_of(crops.expansion(crops.plan(200, 50)))
    assert re.fullmatch(
        r"Here is the original image \n\n<start.*help you see better \n\n<start_of.*\n\n \n\n<.*", text, re.S
    )


def test_every_family_has_a_case() -> None:
    assert {files.family for files in ALL.values()} == set(FAMILIES)
    assert isinstance(CASES["gemma3"].open().plan(5, 5), PicturePlan)
