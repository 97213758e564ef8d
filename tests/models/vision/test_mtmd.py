"""Encoders in GGUF files, against llama.cpp's own (mtmd): the same rows in the same order, from the same file.

llama.cpp has to be built, which takes some minutes; $REKINDLE_MTMD names the program that it makes of helpers/mtmd.cpp:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-*.tar.gz
    cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -DLLAMA_CURL=OFF && cmake --build build --target mtmd
    g++ -std=gnu++17 -Itools/mtmd -Iinclude -Iggml/include -Isrc …/tests/helpers/mtmd.cpp -o mtmd \\
        -Lbuild/bin -lmtmd -lllama -lggml -lggml-base -lggml-cpu -Wl,-rpath,$PWD/build/bin
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.towers import MODELS, config_of, random_tensors
from models.vision.test_mmproj import converted
from rekindle._src.models.vision.inputs import ImagePatches, PatchGrid
from rekindle._src.models.vision.mmproj import read_mmproj
from rekindle._src.models.vision.tower import abstract_tower, encoder_of, pack_images
from rekindle._src.models.vision.weights import read_tower

pytestmark = pytest.mark.slow
NORM = {"clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3, "clip.use_gelu": True}
SIZES = {
    "qwen3_vl": (24, 40), "qwen3_5": (40, 24), "smolvlm": None, "idefics3": None, "gemma3": None, "gemma4": (24, 36),
    "gemma4-clipped": (36, 12), "lfm2_vl": (24, 40),
}  # fmt: skip
BY_PIXEL = ("gemma4", "lfm2_vl")  # whose patches have the channels of a pixel together


def patches_of(pixels: NDArray[np.float32], size: int, merge: int, *, by_pixel: bool = False) -> ImagePatches:
    """Cut normed pixels into patches, channel by channel; with `merge`, in Qwen's order and with two equal frames."""
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    order = (0, 2, 1, 3, 4) if by_pixel else (0, 2, 4, 1, 3)
    cut = pixels.reshape(rows, size, columns, size, 3).transpose(order)
    if merge:
        cut = np.repeat(cut[:, :, :, None], 2, axis=3)
        cut = cut.reshape(rows // merge, merge, columns // merge, merge, -1).transpose(0, 2, 1, 3, 4)
    return ImagePatches(np.ascontiguousarray(cut.reshape(rows * columns, -1)), PatchGrid(rows, columns))


@pytest.mark.parametrize("name", SIZES)
def test_llama_cpp_computes_the_same_rows(name: str, tmp_path: Path) -> None:
    """Up to rounding: llama.cpp keeps patches and tables of GELU in 16 bits."""
    program = os.environ.get("REKINDLE_MTMD")
    if not program:
        pytest.skip("$REKINDLE_MTMD names no program")
    vision: dict[str, Any] = MODELS[name]["vision_config"]
    height, width = SIZES[name] or (vision["image_size"],) * 2
    model = str(MODELS[name]["model_type"])
    lowest = 0 if model == "gemma4" else -1  # its encoder norms them
    pixels = np.random.default_rng(0).uniform(lowest, 1, (height, width, 3)).astype(np.float32)
    path = converted(name, random_tensors(config_of(name)), tmp_path / "mmproj.gguf", **NORM)
    stored = read_mmproj(path)
    tower = abstract_tower(stored.config)
    merge = 2 if model.startswith("qwen") else 0
    image = patches_of(pixels, vision["patch_size"], merge, by_pixel=model in BY_PIXEL)
    batch = pack_images([image], stored.config).cut(0, image.grid.patches)
    tokens, levels = encoder_of(tower.graph)(read_tower(tower, stored), batch)
    ours = np.concatenate([tokens, *levels], axis=1)
    command = [program, str(path), str(width), str(height), "2"]
    done = subprocess.run(command, input=pixels.tobytes(), capture_output=True, timeout=300, check=True)
    theirs = np.frombuffer(done.stdout, np.float32).reshape(ours.shape)
    np.testing.assert_allclose(ours, theirs, atol=2e-3 * np.abs(theirs).max())
