"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rekindle._src.models import roles
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.families.llama import attention_sources, gate_up_role, manifest_of, mlp_sources, norm_sources
from rekindle._src.models.family import Family, GgufForm, decoder_of, windows_in_all_layers
from rekindle._src.models.hf_config import Keys, decoder
from rekindle._src.models.loading.manifest import Source, one
from rekindle._src.models.roles import row

if TYPE_CHECKING:
    from rekindle._src.models.loading.gguf.architecture import GgufModel


def config(keys: Keys) -> ModelConfig:
    moe = keys.experts(
        "num_local_experts",
        size="intermediate_size",
        normalize=True,
    )
    layers = keys.size("num_hidden_layers")
    window = keys.window()
    return decoder(keys, theta=1_000_000.0, eps=1e-5, window=window, moe=(moe,) * layers)


module = decoder_of("SparseBlock")


def experts(config: ModelConfig, layer: int) -> dict[str, Source]:
    prefix = f"model.layers.{layer}.block_sparse_moe"
    return expert_sources(config, layer, f"{prefix}.gate", f"{prefix}.experts", ("w1", "w3", "w2"))


manifest = manifest_of(attention_sources, norm_sources, experts)


def expert_sources(
    config: ModelConfig, layer: int, router: str, experts: str, names: tuple[str, str, str]
) -> dict[str, Source]:
    """Return the sources of a layer's router and experts, or of its MLP; `names` are gate, up and down's."""
    spec = config.moe[layer]
    if spec is None:
        return mlp_sources(config, layer)
    gate, up, down = names
    size, numbers = spec.intermediate_size, range(spec.num_experts)
    experts_of = functools.partial(roles.experts, spec.num_experts)

    def stack(kind: str, of: tuple[str, ...], rows: tuple[int, ...], **role: Any) -> Source:
        names = tuple(f"{experts}.{number}.{name}.{kind}" for number in numbers for name in of)
        return Source(names=names, rows=rows, stack=True, **role)

    gate_up = functools.partial(stack, of=(gate, up), rows=(size, size), role=experts_of(gate_up_role(size)))
    downs = functools.partial(stack, of=(down,), rows=(config.hidden_size,))
    sources = {
        "mlp.router.weight": one(f"{router}.weight", spec.num_experts),
        "mlp.gate_up.weight": gate_up("weight"),
        "mlp.down.weight": downs("weight", role=experts_of(row(size))),
    }
    if spec.bias:
        sources |= {
            "mlp.router.bias": one(f"{router}.bias", spec.num_experts),
            "mlp.gate_up.bias": gate_up("bias"),
            "mlp.down_bias": downs("bias"),
        }
    return sources


def usual_expert_sources(config: ModelConfig, layer: int) -> dict[str, Source]:
    """Return the same by the names that most families have."""
    prefix = f"model.layers.{layer}.mlp"
    return expert_sources(config, layer, f"{prefix}.gate", f"{prefix}.experts", ("gate_proj", "up_proj", "down_proj"))


def shared_sources(config: ModelConfig, layer: int, shared: str, gate: str | None = None) -> dict[str, Source]:
    """Return the sources of the MLP beside a layer's experts, and of its `gate`."""
    spec = config.moe[layer]
    if spec is None or not spec.shared_size:
        return {}
    names = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
    size = spec.shared_size
    sources = {
        "mlp.shared.gate_up.weight": Source(names=names, rows=(size, size), role=gate_up_role(size)),
        "mlp.shared.down.weight": one(f"{shared}.down_proj.weight", config.hidden_size, role=row(size)),
    }
    return sources if gate is None else sources | {"mlp.shared_gate.weight": one(f"{gate}.weight", 1)}


def read_gguf(model: GgufModel) -> dict[str, Any]:
    experts = {
        **model.experts("num_local_experts", size=None),
        "sliding_window": model.integer("attention.sliding_window", 0) or None,
    }
    return model.decoder() | experts | model.rope()


GGUF = GgufForm(architecture="llama", read=read_gguf, paired=True, windows=windows_in_all_layers, expert_length=False)
ALIASES = {"num_experts": "num_local_experts"}
FAMILY = Family("MixtralForCausalLM", config, module, manifest, ALIASES, GGUF)
