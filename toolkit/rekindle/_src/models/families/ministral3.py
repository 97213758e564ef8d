"""Ministral 3: Mistral whose queries grow with the logarithm of their position beyond the pre-training length."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import manifest, module
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    head_dim = keys.size("head_dim")
    options = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    rope = keys.rope(head_dim, theta=1_000_000.0)
    growth = float(options.get("llama_4_scaling_beta") or 0.0)
    if growth:
        length = int(options.get("original_max_position_embeddings") or keys.size("max_position_embeddings"))
        rope = dataclasses.replace(rope, query_growth=growth, original_length=length)
    return decoder(keys, eps=1e-5, window=keys.window(), rope=rope)


def read_gguf(model: GgufModel) -> dict[str, Any]:
    rope = model.rope()
    growth = model.number("attention.temperature_scale", 0.0)
    scaling = rope.pop("rope_scaling", {"rope_type": "default"})
    if weight := model.number("rope.scaling.yarn_log_multiplier", 0.0):
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return model.decoder() | {"rope_parameters": {**rope, **scaling, "llama_4_scaling_beta": growth}}


GGUF = GgufForm(
    architecture="mistral3", read=read_gguf, paired=True, reads_only="rekindle does not write its scaling of queries"
)
FAMILY = Family("Ministral3ForCausalLM", config, module, manifest, gguf=GGUF)
