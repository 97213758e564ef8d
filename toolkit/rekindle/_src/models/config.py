"""What a model is, in rekindle's words; `ModelConfig.from_hf` is the only way from a config.json to it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle._src.models.nn.rope import KINDS, RopeSpec, attention_factor
from rekindle.errors import UnsupportedModel

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How one layer attends."""

    scale: float  # multiplies q·k
    sliding_window: int | None = None  # a query sees this many keys, its own included
    soft_cap: float | None = None  # scores become cap · tanh(score / cap)
    rope: RopeSpec | None = None  # None: this layer does not rotate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A layer's experts."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool  # the weights of the chosen experts sum to one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture and sizes of a checkpoint. Hashable: programs and stores are keyed by it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    tie_embeddings: bool
    attention: tuple[AttentionSpec, ...]  # one per layer
    moe: tuple[MoeSpec | None, ...] = ()  # one per layer, or empty: no experts at all
    activation: str = "silu"
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 1.0
    final_soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None  # what the checkpoint says its weights are

    def __post_init__(self) -> None:
        assert len(self.attention) == self.num_layers, "one AttentionSpec per layer"
        assert len(self.moe) in (0, self.num_layers), "one entry per layer, or none"
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}. "
                "Check config.json."
            )

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct ropes, in order of first use."""
        return tuple(dict.fromkeys(spec.rope for spec in self.attention if spec.rope is not None))

    def rope_regime(self, prompt_length: int) -> int:
        """0, unless the prompt is so long that its keys are rotated otherwise than a shorter prompt's would be.

        Prefixes may be shared between prompts of one regime only.
        """
        return max((rope.regime(prompt_length) for rope in self.ropes), default=0)

    def digest(self) -> str:
        """The same in every process for the same config."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a parsed config.json. An option that is not implemented raises `UnsupportedModel` and is named."""
        from rekindle._src.models import registry  # noqa: F401  its families bring their readers

        model_type = raw.get("model_type")
        read = _READERS.get(str(model_type))
        if read is None:
            architecture = (raw.get("architectures") or ["?"])[0]
            raise UnsupportedModel(
                f"model_type={model_type!r} (architecture {architecture}) is not implemented. "
                f"Use one of: {', '.join(sorted(_READERS))}."
            )
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "?")
            raise UnsupportedModel(
                f"quantization_config: the checkpoint is already quantised ({method}), which is not implemented. "
                "Open the unquantised checkpoint with quantize='int8'."
            )
        return read(Keys(raw))


Reader = Callable[["Keys"], ModelConfig]
_READERS: dict[str, Reader] = {}


def reads(model_type: str) -> Callable[[Reader], Reader]:
    """Marks the function that reads this family's config.json."""

    def register(read: Reader) -> Reader:
        _READERS[model_type] = read
        return read

    return register


class Keys:
    """A config.json as a family reads it: its own keys with transformers' defaults."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def get(self, name: str, default: Any = None) -> Any:
        """The value; null counts as absent, as in transformers."""
        value = self.raw.get(name)
        return default if value is None else value

    def nullable(self, name: str, default: Any) -> Any:
        """The value where null is one of its own, such as no window."""
        return self.raw.get(name, default)

    def need(self, name: str) -> Any:
        value = self.raw.get(name)
        if value is None:
            raise UnsupportedModel(f"config.json has no {name}. Use a complete checkpoint folder.")
        return value

    def only(self, name: str, *accepted: Any) -> None:
        """Raise unless the option is absent or has a value that is implemented."""
        value = self.raw.get(name)
        if value is not None and value not in accepted:
            raise UnsupportedModel(
                f"{name}={value!r} is not implemented for {self.raw.get('model_type')}. "
                f"Implemented: {', '.join(map(repr, accepted))}."
            )

    def activation(self, name: str = "hidden_act", default: str = "silu") -> str:
        self.only(name, *ACTIVATIONS)
        return ACTIVATIONS[self.get(name, default)]

    def layer_types(self, default: Sequence[bool]) -> tuple[bool, ...]:
        """Which layers slide."""
        names = self.get("layer_types")
        if names is None:
            return tuple(default)
        for name in names:
            if name not in ("full_attention", "sliding_attention"):
                raise UnsupportedModel(
                    f"layer_types has {name!r}, which is not implemented. Implemented: full_attention, "
                    "sliding_attention."
                )
        if len(names) != len(default):
            raise UnsupportedModel(
                f"layer_types has {len(names)} entries for {len(default)} layers. Check config.json."
            )
        return tuple(name == "sliding_attention" for name in names)

    def rope(
        self, head_dim: int, *, theta: float = 10_000.0, partial: bool = False, layer_type: str | None = None
    ) -> RopeSpec:
        """From `rope_parameters` (flat, or per layer type if that is given), or the older `rope_theta`, `rope_scaling`.

        `theta` is the family's default; `partial`: it implements `partial_rotary_factor`.
        """
        flat, given = self.get("rope_scaling") or {}, self.get("rope_parameters") or {}
        if layer_type is None:
            options = dict(flat or given)
            if any(isinstance(value, Mapping) for value in options.values()):
                raise UnsupportedModel(
                    f"rope_parameters per layer type are not implemented for {self.raw.get('model_type')}."
                )
        else:
            options = dict(given.get(layer_type) or {}) | (flat if layer_type == "full_attention" else {})
        options = {name: value for name, value in options.items() if value is not None}
        kind = options.get("rope_type", options.get("type", "default"))
        if kind not in KINDS:
            raise UnsupportedModel(f"rope_type={kind!r} is not implemented. Implemented: {', '.join(KINDS)}.")
        key = "rope_local_base_freq" if layer_type == "sliding_attention" else "rope_theta"
        part = options.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        if part != 1.0 and not partial:
            raise UnsupportedModel(
                f"partial_rotary_factor={part} is not implemented for {self.raw.get('model_type')}. Implemented: 1.0."
            )
        return self.rope_spec(
            kind, options, int(head_dim * part), float(options.get("rope_theta", self.get(key, theta)))
        )

    def rope_spec(self, kind: str, options: dict[str, Any], dim: int, theta: float) -> RopeSpec:
        longest = self.get("max_position_embeddings", 0)
        # A key beside rope_parameters wins over the one within: transformers does so for Phi-3's sake.
        original = self.get(
            "original_max_position_embeddings", options.get("original_max_position_embeddings", longest)
        )
        try:
            if kind == "default":
                return RopeSpec(theta=theta, dim=dim)
            if kind == "linear":
                return RopeSpec(theta=theta, dim=dim, kind=kind, factor=float(options["factor"]))
            if kind == "dynamic":  # scales from the end of the context that config.json gives
                return RopeSpec(
                    theta=theta, dim=dim, kind=kind, factor=float(options["factor"]), original_length=longest
                )
            if kind == "llama3":
                return RopeSpec(
                    theta=theta, dim=dim, kind=kind, factor=float(options["factor"]), original_length=original,
                    low_freq_factor=float(options["low_freq_factor"]),
                    high_freq_factor=float(options["high_freq_factor"]),
                )  # fmt: skip
            factor = float(options.get("factor", longest / original))
            given = options.get("attention_factor")
            scale = attention_factor(kind, factor, original, options) if given is None else float(given)
            if kind == "yarn":
                return RopeSpec(
                    theta=theta, dim=dim, kind=kind, factor=factor, original_length=original, attention_factor=scale,
                    beta_fast=float(options.get("beta_fast") or 32), beta_slow=float(options.get("beta_slow") or 1),
                    truncate=bool(options.get("truncate", True)),
                )  # fmt: skip
            short, long = tuple(options["short_factor"]), tuple(options["long_factor"])
        except KeyError as missing:
            raise UnsupportedModel(f"rope_type={kind!r} needs {missing.args[0]!r} in config.json.") from None
        if not len(short) == len(long) == dim // 2:
            raise UnsupportedModel(
                f"short_factor and long_factor have {len(short)} and {len(long)} entries, but {dim // 2} frequencies "
                "are rotated. Check config.json."
            )
        return RopeSpec(
            theta=theta, dim=dim, kind=kind, factor=factor, original_length=original, attention_factor=scale,
            short_factor=tuple(map(float, short)), long_factor=tuple(map(float, long)),
        )  # fmt: skip


def decoder(
    keys: Keys,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tie: bool = False,
    theta: float = 10_000.0,
    eps: float = 1e-6,
    slides: Callable[[int], bool] | None = None,
    window: int | None = None,
    partial_rope: bool = False,
    **overrides: Any,
) -> ModelConfig:
    """The keys that all Llama-like families share. Arguments are the family's defaults; `overrides` are final."""
    layers, heads, hidden = keys.need("num_hidden_layers"), keys.need("num_attention_heads"), keys.need("hidden_size")
    head_dim = keys.get("head_dim", head_dim or hidden // heads)
    if "attention" not in overrides:
        spec = AttentionSpec(scale=head_dim**-0.5, rope=keys.rope(head_dim, theta=theta, partial=partial_rope))
        sliding = dataclasses.replace(spec, sliding_window=window)
        slides = slides or (lambda layer: window is not None)
        overrides["attention"] = tuple(sliding if slides(layer) else spec for layer in range(layers))
    if "activation" not in overrides:
        overrides["activation"] = keys.activation()
    fields: dict[str, Any] = {
        "model_type": keys.raw["model_type"],
        "vocab_size": keys.need("vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": keys.get("num_key_value_heads", kv_heads or heads),
        "head_dim": head_dim,
        "intermediate_size": keys.need("intermediate_size"),
        "max_position_embeddings": keys.get("max_position_embeddings", 2048),
        "tie_embeddings": keys.get("tie_word_embeddings", tie),
        "norm_eps": keys.get("rms_norm_eps", eps),
        "eos_token_ids": token_ids(keys.get("eos_token_id")),
        "bos_token_id": keys.get("bos_token_id"),
        "dtype": keys.get("dtype", keys.get("torch_dtype")),
    }
    return ModelConfig(**(fields | overrides))


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """`eos_token_id` is a number, a list of them, or null."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
