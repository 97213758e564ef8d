"""Gemma 3: SigLIP for square pictures of one size; a token is the average of the patches of a square."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from rekindle._src.models.loading.manifest import Manifest, one
from rekindle._src.models.nn.linear import Linear, RMSNorm
from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.config import MAX_POSITIONS, VisionConfig, VisionKeys
from rekindle._src.models.vision.family import GgufModel, MmprojForm, TowerFamily, rows_of
from rekindle._src.models.vision.inputs import fixed_rows
from rekindle._src.models.vision.siglip import (
    DEFAULTS,
    SiglipTower,
    siglip,
    siglip_keys,
    siglip_names,
    siglip_sources,
    unused,
)
from rekindle.errors import UnsupportedModel

PREFIX, PROJECTOR = "vision_tower", "multi_modal_projector"
OWN_DEFAULTS = {**DEFAULTS, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}


def config(keys: VisionKeys) -> VisionConfig:
    made, tokens = siglip(keys, 1), keys.whole_model.size("mm_tokens_per_image", 256)
    across = math.isqrt(min(tokens, MAX_POSITIONS))
    if across * across != tokens or made.side % across:
        raise UnsupportedModel(
            f"mm_tokens_per_image={tokens:,} in config.json is not a square that divides {made.side} × {made.side} "
            "patches. Check the file."
        )
    return dataclasses.replace(made, merge=made.side // across)


class Gemma3Tower(SiglipTower):
    """The encoder of Gemma 3, with its projector."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        self.token_norm = RMSNorm(config.hidden_size, config.norm_eps, precision)
        self.projection = Linear(config.out_size, config.hidden_size, precision)

    def project(self, patches: Array) -> Array:
        pooled = jnp.mean(patches.astype(jnp.float32), axis=1)
        return self.projection(self.token_norm(pooled).astype(patches.dtype))


def manifest(config: VisionConfig) -> Manifest:
    projector = {
        "token_norm.weight": one(f"{PROJECTOR}.mm_soft_emb_norm.weight", config.hidden_size, add=1.0),
        "projection.weight": one(f"{PROJECTOR}.mm_input_projection_weight", config.out_size, transpose=True),
    }
    return Manifest(siglip_sources(config, PREFIX) | projector, prefix="", ignored=unused(PREFIX))


def read_mmproj(model: GgufModel) -> VisionConfig:
    keys = siglip_keys(model)
    # llama.cpp knows the side of a token by the architecture, unless the file has it.
    side, merge = keys["image_size"] // max(1, keys["patch_size"]), model.integer("projector.scale_factor", 4)
    tokens = (side // max(1, merge)) ** 2
    text = {"hidden_size": rows_of(model, "mm.input_projection.weight", 1)}
    whole = {"model_type": "gemma3", "vision_config": keys, "text_config": text, "mm_tokens_per_image": tokens}
    return config(VisionKeys(whole, OWN_DEFAULTS))


NAMES = siglip_names(PREFIX) | {
    f"{PROJECTOR}.mm_soft_emb_norm": "mm.soft_emb_norm",
    f"{PROJECTOR}.mm_input_projection_weight": "mm.input_projection.weight",
}
MMPROJ = MmprojForm(projector="gemma3", read=read_mmproj, names=lambda config: NAMES)
BEGINNINGS = tuple(
    (f"{model}{theirs}.", f"{own}.")
    for theirs, own in (("vision_tower.vision_model", PREFIX), ("vision_tower", PREFIX), (PROJECTOR, PROJECTOR))
    for model in ("model.", "")
)
TOWERS = {"gemma3": TowerFamily(config, OWN_DEFAULTS, Gemma3Tower, manifest, BEGINNINGS, fixed_rows, mmproj=MMPROJ)}
