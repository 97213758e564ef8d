"""llama.cpp's places of the tensors that Hugging Face's names stand for, and the order of their rows.

llama.cpp's converter changes three things on the way: the rows of q and k of some architectures are reordered, so that
the two halves of a rotated pair lie side by side; Gemma's norms have one added; GPT-2's matrices are transposed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rekindle._src.models.family import GgufForm

_OUTER = {
    "model.embed_tokens": "token_embd", "model.word_embeddings": "token_embd",
    "model.norm": "output_norm", "model.final_layernorm": "output_norm",
    "model.embedding_norm": "token_embd_norm", "backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm",
    "lm_head": "output", "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection",
}  # fmt: skip
_INNER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp", "ln_1": "attn_norm", "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output", "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_EXPERTS = {
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down",
}  # fmt: skip
_TENSOR = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
_LAYER = re.compile(
    r"(?:(?:model|backbone)\.layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias|e_score_correction_bias|sinks)"
)
_EXPERT = re.compile(r"(?:mlp\.|block_sparse_moe\.|feed_forward\.|mixer\.)?experts\.(\d+)\.(\w+)")


class GgufPlace(NamedTuple):
    """The tensor of a GGUF file that is one of Hugging Face's, or has it as a part."""

    name: str
    expert: int | None = None  # which matrix of a stack it is
    alone: str | None = None  # the name of the expert's own tensor, which old files have in place of the stack
    half: int | None = None  # which half of the rows it is: gate and up of an expert may be one matrix
    paired: bool = False  # True if its rows are heads with rotated pairs side by side


def place(name: str, form: GgufForm) -> GgufPlace:
    """Return where a tensor lies. `name` is one of the family's manifest."""
    if name in form.tensors:
        return GgufPlace(form.tensors[name])
    module, _, end = name.rpartition(".")
    if module in _OUTER:
        return GgufPlace(f"{_OUTER[module]}.{end}")
    whole = _TENSOR.fullmatch(name)
    if whole is not None and (theirs := form.tensors.get(whole[2]) or form.numbers.get(whole[2])) is not None:
        return GgufPlace(f"blk.{whole[1]}.{theirs}")
    match = _LAYER.fullmatch(name)
    assert match is not None, name
    layer, inner, end = match.groups()
    expert = _EXPERT.fullmatch(inner)
    if expert is not None:
        kind = _EXPERTS[expert[2]]
        if form.fused_experts and kind != "ffn_down":
            return GgufPlace(f"blk.{layer}.ffn_gate_up_exps.{end}", int(expert[1]), half=int(kind == "ffn_up"))
        return GgufPlace(f"blk.{layer}.{kind}_exps.{end}", int(expert[1]), f"blk.{layer}.{kind}.{expert[1]}.{end}")
    if end == "e_score_correction_bias":
        return GgufPlace(f"blk.{layer}.exp_probs_b.bias")
    if end == "sinks":
        return GgufPlace(f"blk.{layer}.attn_sinks.weight")
    gguf_name = inner if inner.startswith("nextn.") else form.names.get(inner) or _INNER[inner]
    return GgufPlace(f"blk.{layer}.{gguf_name}.{end}", paired=gguf_name in ("attn_q", "attn_k") and form.paired)


_OF_HEAD = {
    "mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}  # fmt: skip
_OF_BLOCK = {
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}  # fmt: skip


def in_block(name: str, layers: int) -> str:
    """Return llama.cpp's place for a tensor of a draft head: the block after the `layers` of the model. Any other name
    is returned as it is.
    """
    module, _, end = name.rpartition(".")
    block = f"model.layers.{layers}."
    own = _OF_HEAD.get(module) or (_OF_BLOCK.get(module.removeprefix(block)) if module.startswith(block) else None)
    if own is not None:
        return f"{block}{own}.{end}"
    return name.replace("mtp.layers.0.", f"model.layers.{layers}.", 1) if name.startswith("mtp.layers.0.") else name


def within_layer(name: str) -> tuple[int, str] | None:
    """Return the layer of a tensor of the manifest and its name there; None for tensors of no layer."""
    match = _TENSOR.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])
