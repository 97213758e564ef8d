"""llama.cpp's places of the tensors that Hugging Face's names stand for, and the order of their rows.

llama.cpp's converter changes three things on the way: the rows of q and k of some architectures are reordered, so that
the two halves of a rotated pair lie side by side; Gemma's norms have one added; GPT-2's matrices are transposed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_EXPERTS = {
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down",
}  # fmt: skip
# Families that norm the output of attention: the same name in Hugging Face's checkpoints means another norm.
POST_NORMED = frozenset(("gemma2", "gemma3_text", "olmo2"))
# Families whose pairs lie side by side in llama.cpp (LLAMA_ROPE_TYPE_NORM).
PAIRED = frozenset(("llama", "mistral", "mixtral", "smollm3"))
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


class Place(NamedTuple):
    """The tensor of a GGUF file that is one of Hugging Face's, or has it as a part."""

    name: str
    expert: int | None = None  # which matrix of a stack it is
    alone: str | None = None  # the name of the expert's own tensor, which old files have in place of the stack
    paired: bool = False  # True if its rows are those of heads with rotated pairs side by side


def place(name: str, model_type: str) -> Place:
    """Return where a tensor lies. `name` is one of the family's manifest."""
    module, _, end = name.rpartition(".")
    if module in _OUTER:
        return Place(f"{_OUTER[module]}.{end}")
    match = _LAYER.fullmatch(name)
    assert match is not None, name
    layer, inner, end = match.groups()
    expert = _EXPERT.fullmatch(inner)
    if expert is not None:
        kind = _EXPERTS[expert[2]]
        return Place(f"blk.{layer}.{kind}_exps.{end}", int(expert[1]), f"blk.{layer}.{kind}.{expert[1]}.{end}")
    gguf_name = _INNER[inner]
    if inner == "post_attention_layernorm" and model_type in POST_NORMED:
        gguf_name = "post_attention_norm"
    return Place(f"blk.{layer}.{gguf_name}.{end}", paired=gguf_name in ("attn_q", "attn_k") and model_type in PAIRED)
