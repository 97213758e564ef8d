"""Idefics 3 and SmolVLM 2: SigLIP with positions for pictures of any shape; a token joins the patches of a square."""

from __future__ import annotations

from jax import Array

from rekindle._src.models.loading.manifest import Manifest, one
from rekindle._src.models.nn.linear import Linear
from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.config import VisionConfig, VisionKeys
from rekindle._src.models.vision.family import GgufModel, MmprojForm, TowerFamily, rows_of
from rekindle._src.models.vision.inputs import bucketed_rows
from rekindle._src.models.vision.siglip import (
    DEFAULTS,
    SiglipTower,
    siglip,
    siglip_keys,
    siglip_names,
    siglip_sources,
    unused,
)

PREFIX, CONNECTOR = "vision_model", "connector.modality_projection.proj"
OWN_DEFAULTS = {**DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


def config(keys: VisionKeys) -> VisionConfig:
    return siglip(keys, keys.whole_model.size("scale_factor", 2))


class Idefics3Tower(SiglipTower):
    """The encoder of Idefics 3 and SmolVLM 2, with its connector."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        super().__init__(config, precision)
        self.projection = Linear(config.out_size, config.hidden_size * config.patches_of_token, precision)

    def project(self, patches: Array) -> Array:
        return self.projection(patches.reshape(len(patches), -1))


def manifest(config: VisionConfig) -> Manifest:
    projection = {"projection.weight": one(f"{CONNECTOR}.weight", config.out_size)}
    return Manifest(siglip_sources(config, PREFIX) | projection, prefix="", ignored=unused(PREFIX))


def read_mmproj(model: GgufModel) -> VisionConfig:
    # Checkpoints leave out the epsilon, and the converter has written another one than transformers' default.
    keys = siglip_keys(model) | {"layer_norm_eps": DEFAULTS["layer_norm_eps"]}
    whole = {"scale_factor": model.integer("projector.scale_factor"), "text_config": {}}
    whole["text_config"] = {"hidden_size": rows_of(model, "mm.model.fc.weight")}
    return config(VisionKeys({"model_type": "smolvlm", "vision_config": keys, **whole}, OWN_DEFAULTS))


NAMES = siglip_names(PREFIX) | {CONNECTOR: "mm.model.fc"}
MMPROJ = MmprojForm(projector="idefics3", read=read_mmproj, names=lambda config: NAMES)
BEGINNINGS = tuple(
    (f"{model}{part}.", f"{part}.") for part in ("vision_model", "connector") for model in ("model.", "")
)
_FAMILY = TowerFamily(config, OWN_DEFAULTS, Idefics3Tower, manifest, BEGINNINGS, bucketed_rows, mmproj=MMPROJ)
TOWERS = {"idefics3": _FAMILY, "smolvlm": _FAMILY}
