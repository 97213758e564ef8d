"""ERNIE 4.5 (0.3B): Llama with rotated pairs of neighbours, and one key for all biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import manifest, module
from rekindle._src.models.family import Family, GgufForm
from rekindle._src.models.hf_config import Keys, decoder

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    head_dim = keys.size("head_dim")
    bias = keys.get("use_bias", False)
    return decoder(
        keys,
        tie=True,
        eps=1e-5,
        head_dim=head_dim,
        rope=keys.rope(head_dim, theta=500_000.0, interleaved=True),
        attention_bias=bias,
        mlp_bias=bias,
    )


def read_gguf(model: GgufModel) -> dict[str, Any]:
    return model.decoder() | {"use_bias": model.has("blk.0.attn_q.bias")} | model.rope()


GGUF = GgufForm(architecture="ernie4_5", read=read_gguf)
FAMILY = Family("Ernie4_5ForCausalLM", config, module, manifest, gguf=GGUF)
