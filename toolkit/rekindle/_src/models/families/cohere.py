"""Cohere (Command R): Cohere2 without windows, so that all layers rotate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.cohere2 import NORM, logit_scale, manifest, module
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    keys.only("use_qk_norm", False)
    return decoder(
        keys,
        kv_heads_implied=True,
        tie=True,
        norm_eps=keys.get("layer_norm_eps", 1e-5),
        rope=keys.rope(keys.head_dim, theta=500_000.0, interleaved=True),
        logit_scale=float(keys.get("logit_scale", 0.0625)),
        attention_bias=keys.get("attention_bias", False),
    )


def read_gguf(model: GgufModel) -> dict[str, Any]:
    shared = model.decoder(NORM)
    keys = {"layer_norm_eps": shared.pop("rms_norm_eps"), "logit_scale": model.number("logit_scale")}
    return shared | keys | model.rope(theta=500_000.0)


GGUF = GgufForm(architecture="command-r", read=read_gguf, norm=NORM, fields=logit_scale)
FAMILY = Family("CohereForCausalLM", config, module, manifest, gguf=GGUF)
