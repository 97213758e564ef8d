"""Small encoders of pictures: a config of each family, its weights as a checkpoint has them, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.vision.config import VisionConfig
from rekindle._src.models.vision.inputs import ImagePatches, PatchBatch, PatchGrid
from rekindle._src.models.vision.registry import tower_manifest, vision_config
from rekindle._src.models.vision.tower import AbstractTower, abstract_tower, encoder_of, pack_images
from rekindle._src.models.vision.weights import load_tower, tower_tensors

QWEN = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 24, "patch_size": 4,
    "num_position_embeddings": 36, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 24,
}  # fmt: skip
GEMMA4 = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64, "pooling_kernel_size": 3,
}  # fmt: skip
TEXT = {"hidden_size": 24}
MODELS: dict[str, dict[str, Any]] = {  # config.json of whole models, as far as encoders read it
    "qwen3_vl": {"model_type": "qwen3_vl", "vision_config": {**QWEN, "deepstack_visual_indexes": [0, 2]}},
    "qwen3_5": {"model_type": "qwen3_5", "vision_config": QWEN},
    "gemma4": {"model_type": "gemma4", "vision_config": GEMMA4},
    "gemma4-clipped": {
        "model_type": "gemma4", "vision_config": {**GEMMA4, "use_clipped_linears": True, "standardize": True},
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified",
        "vision_config": {
            "patch_size": 2, "pooling_kernel_size": 3, "mm_embed_dim": 32, "mm_posemb_size": 24, "output_proj_dims": 32,
        },
    },
    "smolvlm": {"model_type": "smolvlm", "scale_factor": 2, "vision_config": SIGLIP},
    "idefics3": {"model_type": "idefics3", "scale_factor": 3, "vision_config": SIGLIP},
    "gemma3": {"model_type": "gemma3", "mm_tokens_per_image": 9, "vision_config": SIGLIP},
    "lfm2_vl": {
        "model_type": "lfm2_vl", "projector_hidden_size": 40,
        "vision_config": {key: value for key, value in SIGLIP.items() if key != "image_size"} | {"num_patches": 36},
    },
    "lfm2_vl-plain": {
        "model_type": "lfm2_vl", "projector_hidden_size": 40, "projector_use_layernorm": False,
        "projector_bias": False, "downsample_factor": 3,
        "vision_config": {key: value for key, value in SIGLIP.items() if key != "image_size"} | {"num_patches": 36},
    },
}  # fmt: skip
for _model in MODELS.values():
    _model["text_config"] = TEXT
# What names begin with in published checkpoints, where a manifest's names are not these with "model." in front.
PUBLISHED = {
    "gemma3": {"vision_tower.": "vision_tower.vision_model.", "multi_modal_projector.": "multi_modal_projector."},
    "lfm2_vl": {"vision_tower.": "model.vision_tower.vision_model."},
}


def config_of(name: str) -> VisionConfig:
    config = vision_config(MODELS[name])
    assert config is not None
    return config


def published_name(config: VisionConfig, name: str) -> str:
    """The name of a manifest's tensor in a checkpoint as it is published."""
    for own, theirs in PUBLISHED.get(config.model_type, {}).items():
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return f"model.{name}"


def random_tensors(config: VisionConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """A random checkpoint of an encoder under its published names, kernels of convolutions as matrices."""
    tower, rng, state = abstract_tower(config), np.random.default_rng(seed), {}
    sources = tower_manifest(config).sources
    for path, leaf in zip(tower.graph.paths, tower.shapes, strict=True):
        for part in sources[path].parts(leaf.shape):
            state[published_name(config, part.name)] = random_tensor(part.name, part.shape, rng)
    return state


def random_tensor(name: str, shape: Sequence[int], rng: np.random.Generator) -> NDArray[np.float32]:
    values = rng.standard_normal(shape).astype(np.float32)
    last = name.rpartition(".")[2]
    if last in ("input_min", "output_min"):
        return -1.5 + 0.2 * values
    if last in ("input_max", "output_max"):
        return 1.5 + 0.2 * values
    if (("norm" in name or "ln" in name) and last == "weight") or last == "std_scale":
        return 1.0 + 0.2 * values
    return values * np.float32(0.2 if len(shape) < 2 else 0.3)


def random_picture(config: VisionConfig, rows: int, columns: int, seed: int = 0) -> ImagePatches:
    """Patches of a picture, of numbers as processors make them."""
    shape = (rows * columns, config.patch_length)
    return ImagePatches(np.random.default_rng(seed).uniform(0, 1, shape).astype(np.float32), PatchGrid(rows, columns))


class SmallEncoder:
    """An encoder with weights, and its output for pictures in a bucket."""

    def __init__(self, config: VisionConfig, state: dict[str, NDArray[Any]], dtype: str = "float32") -> None:
        self.config = config
        self.tower: AbstractTower = abstract_tower(config, dtype)
        self.encode = encoder_of(self.tower.graph)
        self.leaves = load_tower(self.tower, tower_tensors(config, state, "a checkpoint"))

    def batch(self, pictures: Sequence[ImagePatches], bucket: int | None = None) -> PatchBatch:
        total = sum(picture.grid.patches for picture in pictures)
        return pack_images(pictures, self.config).cut(0, bucket or total)

    def __call__(
        self, pictures: Sequence[ImagePatches], bucket: int | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens [T, X] of the pictures, and levels [L, T, X], without padding."""
        encoded = self.encode(self.leaves, self.batch(pictures, bucket))
        count = sum(picture.grid.patches for picture in pictures) // self.config.patches_of_token
        return np.asarray(encoded.tokens)[:count], np.asarray(encoded.levels)[:, :count]
