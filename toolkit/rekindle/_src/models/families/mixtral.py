"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

import functools

from flax import nnx

from rekindle._src.models import roles
from rekindle._src.models.config import ModelConfig, MoeSpec
from rekindle._src.models.families.llama import (
    Block,
    Llama,
    attention_sources,
    blocks,
    gate_up_role,
    mlp_sources,
    norm_sources,
    outer_sources,
)
from rekindle._src.models.family import Family
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Manifest, Source, one
from rekindle._src.models.nn.layers import GatedMlp
from rekindle._src.models.nn.moe import Experts
from rekindle._src.models.precision import Precision
from rekindle._src.models.roles import row


def config(keys: Keys) -> ModelConfig:
    moe = MoeSpec(
        num_experts=keys.size("num_local_experts"),
        top_k=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("intermediate_size"),
        normalize=True,
    )
    layers = keys.size("num_hidden_layers")
    window = keys.window()
    return decoder(keys, theta=1_000_000.0, eps=1e-5, window=window, moe=(moe,) * layers)


class SparseBlock(Block):
    """A block with experts where the config has them, and a gated MLP in the other layers."""

    def make_mlp(self, config: ModelConfig, layer: int, precision: Precision) -> nnx.Module:
        spec = config.moe[layer] if config.moe else None
        return GatedMlp(config, precision) if spec is None else Experts(config, spec, precision)


class Mixtral(Llama):
    block = SparseBlock


def manifest(config: ModelConfig) -> Manifest:
    def experts(config: ModelConfig, layer: int) -> dict[str, Source]:
        prefix = f"model.layers.{layer}.block_sparse_moe"
        return expert_sources(config, layer, f"{prefix}.gate", f"{prefix}.experts", ("w1", "w3", "w2"))

    return Manifest(outer_sources(config) | blocks(config, attention_sources, norm_sources, experts))


def expert_sources(
    config: ModelConfig, layer: int, router: str, experts: str, names: tuple[str, str, str]
) -> dict[str, Source]:
    """Return the sources of a layer's router and experts; `names` are gate, up and down's in the checkpoint."""
    spec = config.moe[layer]
    if spec is None:
        return mlp_sources(config, layer)
    gate, up, down = names
    experts_of = functools.partial(roles.experts, spec.num_experts)
    numbers = range(spec.num_experts)
    return {
        "mlp.router.weight": one(f"{router}.weight", spec.num_experts),
        "mlp.gate_up.weight": Source(
            names=tuple(f"{experts}.{number}.{name}.weight" for number in numbers for name in (gate, up)),
            rows=(spec.intermediate_size,) * 2,
            stack=True,
            role=experts_of(gate_up_role(spec.intermediate_size)),
        ),
        "mlp.down.weight": Source(
            names=tuple(f"{experts}.{number}.{down}.weight" for number in numbers),
            rows=(config.hidden_size,),
            stack=True,
            role=experts_of(row(spec.intermediate_size)),
        ),
    }


FAMILY = Family("MixtralForCausalLM", config, Mixtral, manifest, aliases={"num_experts": "num_local_experts"})
