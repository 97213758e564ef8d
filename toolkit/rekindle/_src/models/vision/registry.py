"""The encoders of pictures that rekindle implements, by the model_type of the model that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rekindle._src.models.vision import towers
from rekindle._src.models.vision.config import VisionConfig, VisionKeys
from rekindle.errors import UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.loading.manifest import Manifest
    from rekindle._src.models.vision.family import TowerFamily

MODULES = {  # the module of each in `towers`
    "gemma3": "gemma3", "gemma4": "gemma4", "gemma4_unified": "gemma4_unified", "idefics3": "idefics3",
    "lfm2_vl": "lfm2_vl", "qwen3_5": "qwen3_vl", "qwen3_5_moe": "qwen3_vl", "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl", "smolvlm": "idefics3",
}  # fmt: skip


def tower_family(model_type: Any) -> TowerFamily:
    """Return the encoder of a model_type. Raise `UnsupportedModel`, which lists the implemented ones."""
    if not isinstance(model_type, str) or model_type not in MODULES:
        raise UnsupportedModel(
            f"pictures are not implemented for model_type={str(model_type)[:80]!r}. Use one of: {', '.join(MODULES)}."
        )
    entry: TowerFamily = import_module(f"{towers.__name__}.{MODULES[model_type]}").TOWERS[model_type]
    return entry


def vision_config(model: Mapping[str, object], out_size: int | None = None) -> VisionConfig | None:
    """Return the `VisionConfig` of a parsed config.json, of the whole model; None if it has no `vision_config`.

    `out_size` is the hidden size of its language model, where that is known already. Raise `UnsupportedModel` for
    anything that is not implemented.
    """
    if model.get("vision_config") is None:
        return None
    entry = tower_family(model.get("model_type"))
    if out_size is not None:
        text = model.get("text_config")
        model = {**model, "text_config": {"hidden_size": out_size, **(text if isinstance(text, Mapping) else {})}}
    try:
        config = entry.config(VisionKeys(model, entry.defaults, entry.aliases))
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UnsupportedModel(
            f"vision_config has a value of the wrong kind ({type(error).__name__}: {str(error)[:200]}). Download the "
            "checkpoint again."
        ) from error
    if out_size not in (None, config.out_size):
        raise UnsupportedModel(
            f"the encoder of pictures makes embeddings of {config.out_size:,} numbers, and its language model has "
            f"{out_size:,}. Check config.json."
        )
    return config


def tower_manifest(config: VisionConfig) -> Manifest:
    """Return the sources of an encoder's parameters in a checkpoint."""
    return tower_family(config.model_type).manifest(config)
