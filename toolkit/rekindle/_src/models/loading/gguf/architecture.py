"""The metadata of a GGUF file as the config.json that the same model has as a Hugging Face folder.

llama.cpp knows some numbers by the architecture alone; they stand here with a comment. A value that no family
implements raises `UnsupportedModel`, which names the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rekindle._src.models.loading.gguf.header import GgufHeader, GgufTensor
from rekindle._src.models.loading.gguf.metadata import Metadata
from rekindle._src.models.loading.gguf.rope import rope_fields
from rekindle._src.models.loading.gguf.stop_tokens import stop_tokens
from rekindle.errors import UnsupportedModel

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Described(NamedTuple):
    """A file's metadata below the prefix of its architecture, and its tensors by name."""

    header: GgufHeader
    prefix: str
    tensors: dict[str, GgufTensor]

    @property
    def metadata(self) -> Metadata:
        return self.header.metadata

    def integer(self, key: str, *default: Any) -> Any:
        return self.metadata.integer(f"{self.prefix}.{key}", *default)

    def number(self, key: str, *default: Any) -> Any:
        return self.metadata.number(f"{self.prefix}.{key}", *default)

    @property
    def head_dim(self) -> int:
        length = self.integer("attention.key_length", None)
        size = length or self.integer("embedding_length") // max(1, self.integer("attention.head_count"))
        if (value := self.integer("attention.value_length", size)) != size:
            raise self.unsupported("attention.value_length", value, f"where heads of q and k have {size}")
        return int(size)

    def unsupported(self, key: str, value: object, why: str = "") -> UnsupportedModel:
        """Return the error for a key whose value no family implements."""
        shown = repr(value)[:80]
        return UnsupportedModel(
            f"{self.header.path}: {self.prefix}.{key}={shown} is not implemented{' ' + why if why else ''}. "
            "Open another model."
        )

    def only(self, key: str, *accepted: Any) -> None:
        """Raise `UnsupportedModel` if a key is there with a value that is not implemented."""
        value = self.metadata.get(f"{self.prefix}.{key}")
        if value is not None and not any(value is choice or value == choice for choice in accepted):
            raise self.unsupported(key, value)


def config(header: GgufHeader, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """Return the equivalent of config.json. Raise `UnsupportedModel` for an architecture that no family implements."""
    name = header.metadata.text("general.architecture")
    if name not in READERS:
        raise UnsupportedModel(
            f"{header.path}: general.architecture={name[:80]!r} is not implemented. "
            f"Use one of: {', '.join(sorted(READERS))}."
        )
    if header.metadata.text("general.type", "model") != "model":
        kind = header.metadata.text("general.type")
        raise UnsupportedModel(f"{header.path}: general.type={kind[:80]!r} is not a model. Pass the model's own file.")
    model = Described(header, name, tensors)
    raw = READERS[name](model)
    embedding = tensors.get("token_embd.weight")
    vocabulary = model.integer("vocab_size", None) if embedding is None else embedding.shape[0]
    return {**raw, "vocab_size": vocabulary, "dtype": _dtype(embedding, tensors), **stop_tokens(header.metadata)}


def _dtype(embedding: GgufTensor | None, tensors: dict[str, GgufTensor]) -> str:
    """Return the dtype of matrices that are plain numbers; quantised ones stand for numbers that 16 bits can't hold."""
    kinds = {tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1}
    (only,) = kinds if len(kinds) == 1 else ("",)
    return _FLOATS.get(only, "bfloat16")


def _decoder(model_type: str, architecture: str, m: Described) -> dict[str, Any]:
    """Return the keys that all families but GPT-2 share."""
    layers = m.integer("block_count")
    raw: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": m.integer("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": _same(m, "attention.head_count", layers),
        "intermediate_size": _same(m, "feed_forward_length", layers),
        "max_position_embeddings": m.integer("context_length"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "head_dim": m.head_dim,
        "tie_word_embeddings": "output.weight" not in m.tensors,
    }
    raw["num_key_value_heads"] = _same(m, "attention.head_count_kv", layers, raw["num_attention_heads"])
    for key in ("expert_shared_count", "leading_dense_block_count", "expert_group_count", "nextn_predict_layers"):
        m.only(key, 0)
    return raw


def _same(m: Described, key: str, layers: Any, *default: Any) -> Any:
    """Return a number that files may have for each layer. Raise `UnsupportedModel` if layers differ."""
    values = m.metadata.get(f"{m.prefix}.{key}")
    if values is None or isinstance(values, int):
        return m.integer(key, *default)
    listed = m.metadata.numbers(f"{m.prefix}.{key}").tolist()
    if len(set(listed)) != 1 or len(listed) != layers:
        raise m.unsupported(key, listed, "(layers of different sizes)")
    return int(listed[0])


def _llama(m: Described) -> dict[str, Any]:
    experts = m.integer("expert_count", 0)
    window = m.integer("attention.sliding_window", 0)
    biases = {"attention_bias": "blk.0.attn_q.bias" in m.tensors, "mlp_bias": "blk.0.ffn_gate.bias" in m.tensors}
    if experts:
        raw = _decoder("mixtral", "MixtralForCausalLM", m)
        raw |= {"num_local_experts": experts, "num_experts_per_tok": m.integer("expert_used_count")}
    elif window:
        raw = _decoder("mistral", "MistralForCausalLM", m)
    else:
        raw = _decoder("llama", "LlamaForCausalLM", m) | biases
    if experts or window:
        raw["sliding_window"] = window or None
    m.only("attention.scale", raw["head_dim"] ** -0.5)
    m.only("logit_scale", 1.0)
    m.only("embedding_scale", 1.0)
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"])


def _qwen2(m: Described) -> dict[str, Any]:
    raw = _decoder("qwen2", "Qwen2ForCausalLM", m)
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"])


def _qwen3(m: Described) -> dict[str, Any]:
    raw = _decoder("qwen3", "Qwen3ForCausalLM", m) | {"attention_bias": "blk.0.attn_q.bias" in m.tensors}
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"])


def _qwen3moe(m: Described) -> dict[str, Any]:
    raw = _decoder("qwen3_moe", "Qwen3MoeForCausalLM", m)
    raw |= {
        "num_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # known by the architecture
        "attention_bias": "blk.0.attn_q.bias" in m.tensors,
    }
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"])


def _gemma2(m: Described) -> dict[str, Any]:
    raw = _decoder("gemma2", "Gemma2ForCausalLM", m)
    m.only("attention.sliding_window_pattern", 2)
    raw |= {
        "sliding_window": m.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": m.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m.number("final_logit_softcapping", 30.0),
        **_gemma_fields(m, raw, large=46),
    }
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"])


def _gemma3(m: Described) -> dict[str, Any]:
    raw = _decoder("gemma3_text", "Gemma3ForCausalLM", m)
    pattern = m.metadata.get(f"{m.prefix}.attention.sliding_window_pattern", 6)  # 6 is known by the architecture
    if not isinstance(pattern, int):  # true for each layer that slides
        slides = m.metadata.numbers(f"{m.prefix}.attention.sliding_window_pattern").astype(bool).tolist()
        raw["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
    else:
        raw["sliding_window_pattern"] = pattern
    raw |= {
        "sliding_window": m.integer("attention.sliding_window"),
        "rope_local_base_freq": m.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": m.number("final_logit_softcapping", None),
        **_gemma_fields(m, raw, large=62),
    }
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"], theta=1_000_000.0)


def _gemma_fields(m: Described, raw: dict[str, Any], *, large: int) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 share.

    llama.cpp scales scores by the head's size, but for the 27B model, which has `large` layers.
    """
    scale = raw["hidden_size"] // raw["num_attention_heads"] if raw["num_hidden_layers"] == large else raw["head_dim"]
    if (stored := m.number("attention.scale", None)) is not None:
        scale = round(stored**-2, 3)
    return {"query_pre_attn_scalar": scale, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def _phi3(m: Described) -> dict[str, Any]:
    raw = _decoder("phi3", "Phi3ForCausalLM", m)
    window = m.integer("attention.sliding_window", 0)
    raw |= {"sliding_window": window or None, "attention_bias": False}
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"])


def _smollm3(m: Described) -> dict[str, Any]:
    raw = _decoder("smollm3", "SmolLM3ForCausalLM", m)
    raw |= {"no_rope_layer_interval": 4, "use_sliding_window": False}  # every fourth layer does not rotate
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"])


def _olmo2(m: Described) -> dict[str, Any]:
    raw = _decoder("olmo2", "Olmo2ForCausalLM", m)
    m.only("attention.sliding_window", 0)  # OLMo 3 has the same architecture's name, and windows
    return raw | rope_fields(m.header, m.prefix, m.tensors, raw["head_dim"])


def _gpt2(m: Described) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": m.integer("embedding_length"),
        "n_layer": m.integer("block_count"),
        "n_head": m.integer("attention.head_count"),
        "n_inner": m.integer("feed_forward_length"),
        "n_positions": m.integer("context_length"),
        "layer_norm_epsilon": m.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in m.tensors,
    }


READERS: dict[str, Callable[[Described], dict[str, Any]]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3moe, "gemma2": _gemma2, "gemma3": _gemma3,
    "phi3": _phi3, "smollm3": _smollm3, "olmo2": _olmo2, "gpt2": _gpt2,
}  # fmt: skip
