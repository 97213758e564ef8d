"""Reading a Hugging Face config.json: its keys, their aliases, and the bounds of the numbers that decide shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rekindle._src.models.config import AttentionSpec, ModelConfig, MoeSpec
from rekindle._src.models.config_kinds import mismatch
from rekindle._src.models.nn.rope import KINDS, RopeSpec, attention_factor
from rekindle.errors import UnsupportedModel

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


# The largest value of each number that decides how much is built from a config.json. They are several times the
# values of any published model, and small enough that a hostile file is refused before anything is allocated for it.
MAX_LAYERS, MAX_EXPERTS = 1024, 1 << 17  # in all layers; DeepSeek V3 has 14,848 experts
_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOST = {"num_hidden_layers": MAX_LAYERS, "n_layer": MAX_LAYERS, **dict.fromkeys(_OF_EXPERTS, 4096)}
_MOST_ELSEWHERE = 1 << 24
_WIDEST = 1 << 16  # rotated numbers of a head
_RAMP = {"beta_fast": 32, "beta_slow": 1}  # of YaRN


class ConfigKeys:
    """A config.json as a family reads it: its own keys, with transformers' aliases and defaults.

    `aliases` is transformers' `attribute_map`: a key may be in the file under either of its two names.
    """

    def __init__(self, raw: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> None:
        self.raw = dict(raw)
        for name, alias in (aliases or {}).items():
            values = [raw[key] for key in (name, alias) if raw.get(key) is not None]
            if len(values) == 2 and values[0] != values[1]:
                raise UnsupportedModel(
                    f"config.json has {name}={values[0]!r} and {alias}={values[1]!r}, which are two names of one key. "
                    "Remove the wrong one."
                )
            if values:
                self.raw |= {name: values[0], alias: values[0]}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` where it is absent or null, as in transformers.

        Raise `UnsupportedModel` for a value that is not of the key's kind.
        """
        value = self._of_its_kind(name, self.raw.get(name))
        return default if value is None else value

    def nullable(self, name: str, default: Any) -> Any:
        """Return the value of a key for which null has a meaning of its own, such as "no window"."""
        return self._of_its_kind(name, self.raw.get(name, default))

    def _of_its_kind(self, name: str, value: Any) -> Any:
        found = mismatch(name, value)
        if found is not None:
            raise UnsupportedModel(
                f"{found.key}={_shown(found.value)} in config.json is not {found.kind.words}. Check the file."
            )
        return value

    def size(self, name: str, derived: int | None = None) -> int:
        """Return a positive whole number that decides the shape or the number of tensors.

        It has no default of its own: a guessed size would open another model than the saved one. `derived`
        is the value that other keys imply where this one is absent, such as one KV head per query head.
        """
        value = self.get(name, derived)
        if value is None:
            raise UnsupportedModel(
                f"config.json has no {name}, which decides the shapes of the weights. Add it, or download the "
                "checkpoint again."
            )
        return self._within(name, value, 1, _MOST.get(name, _MOST_ELSEWHERE))

    def whole(self, name: str, default: int, *, most: int = _MOST_ELSEWHERE, null: int | None = None) -> int:
        """Return a whole number that sizes the model and may be zero; null in the file means `null`."""
        value = self.raw.get(name, default)
        return self._within(name, (default if null is None else null) if value is None else value, 0, most)

    def _within(self, name: str, value: Any, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise UnsupportedModel(
                f"{name}={_shown(value)} in config.json is not a whole number from {least} to {most:,}. Check the file."
            )
        return value

    def factor(self, name: str, default: float) -> float:
        """Return a number that sizes are multiplied by."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or not 0 < value <= _MOST_ELSEWHERE:
            raise UnsupportedModel(f"{name}={_shown(value)} in config.json is not a positive number. Check the file.")
        return value

    @property
    def head_dim(self) -> int:
        """The size of a head, by default the hidden size divided by the heads."""
        return self.size("head_dim", self.size("hidden_size") // self.size("num_attention_heads"))

    def window(self, default: int | None = None) -> int | None:
        """Return `sliding_window`: how many tokens a query sees, or None for all of them."""
        return None if self.nullable("sliding_window", default) is None else self.size("sliding_window", default)

    def experts(
        self,
        count: str = "num_experts",
        *,
        of_token: str = "num_experts_per_tok",
        size: str = "moe_intermediate_size",
        **options: Any,
    ) -> MoeSpec:
        """Return the experts of a layer, with their sizes read from these keys; `options` are the other fields."""
        return MoeSpec(
            num_experts=self.size(count), top_k=self.size(of_token), intermediate_size=self.size(size), **options
        )

    def only(self, name: str, *accepted: Any) -> None:
        """Raise `UnsupportedModel` if the option has a value that is not implemented."""
        value = self.raw.get(name)
        if value is not None and value not in accepted:
            raise UnsupportedModel(
                f"{name}={_shown(value)} is not implemented for {self.raw.get('model_type')}. "
                f"Implemented: {', '.join(map(repr, accepted))}."
            )

    def activation(self, name: str = "hidden_act", default: str = "silu") -> str:
        self.only(name, *ACTIVATIONS)
        return ACTIVATIONS[self.get(name, default)]

    def kinds_of_layers(self, default: Sequence[str], *accepted: str, name: str = "layer_types") -> tuple[str, ...]:
        """Return the kind of each layer, or `default` where there is none. `accepted` are the implemented ones."""
        kinds = tuple(self.get(name, default))
        for kind in kinds:
            if kind not in accepted:
                raise UnsupportedModel(
                    f"{name} has {_shown(kind)}, which is not implemented. Implemented: {', '.join(accepted)}."
                )
        if len(kinds) != len(default):
            raise UnsupportedModel(f"{name} has {len(kinds)} entries for {len(default)} layers. Check config.json.")
        return kinds

    def layer_types(self, default: Sequence[bool]) -> tuple[bool, ...]:
        """Return which layers have a sliding window: from `layer_types`, or `default` where config.json has none."""
        kinds = ("full_attention", "sliding_attention")
        names = self.kinds_of_layers([kinds[slides] for slides in default], *kinds)
        return tuple(name == "sliding_attention" for name in names)

    def has_rope_per_layer_type(self) -> bool:
        """True if `rope_parameters` has an object for each layer type."""
        return any(isinstance(value, Mapping) for value in (self.get("rope_parameters") or {}).values())

    def rope(
        self,
        head_dim: int,
        *,
        theta: float = 10_000.0,
        partial: bool = False,
        part: float = 1.0,
        layer_type: str | None = None,
        interleaved: bool = False,
        sections: tuple[int, int, int] | None = None,
    ) -> RopeSpec:
        """Return the rope from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`.

        `rope_parameters` is read as one object, or with `layer_type` as one object per layer type. `theta` is the
        family's default, `part` the default of `partial_rotary_factor`, which the family implements if `partial`. The
        family knows by itself whether pairs are `interleaved`. In a model that takes pictures, `sections` are the
        default for a file that does not name any.
        """
        scaling, parameters = self.get("rope_scaling") or {}, self.get("rope_parameters") or {}
        if layer_type is None:
            options = dict(scaling or parameters)
            if self.has_rope_per_layer_type():
                raise UnsupportedModel(
                    f"rope_parameters per layer type are not implemented for {self.raw.get('model_type')}."
                )
        else:
            options = dict(parameters.get(layer_type) or {}) | (scaling if layer_type == "full_attention" else {})
        options = {name: value for name, value in options.items() if value is not None}
        kind = options.get("rope_type", options.get("type", "default"))
        if kind not in KINDS:
            raise UnsupportedModel(f"rope_type={kind!r} is not implemented. Implemented: {', '.join(KINDS)}.")
        key = "rope_local_base_freq" if layer_type == "sliding_attention" else "rope_theta"
        part = options.get("partial_rotary_factor", self.get("partial_rotary_factor", part))
        proportional = kind == "proportional"  # has zeros among the frequencies of the whole head
        if not 0.0 < part <= 1.0:
            raise UnsupportedModel(f"partial_rotary_factor={part} is not between 0 and 1. Check config.json.")
        if part != 1.0 and not (partial or proportional):
            raise UnsupportedModel(
                f"partial_rotary_factor={part} is not implemented for {self.raw.get('model_type')}. Implemented: 1.0."
            )
        base = float(options.get("rope_theta", self.get(key, theta)))
        if not 0.0 < base < math.inf:
            raise UnsupportedModel(f"rope_theta={base} is not a positive number. Check config.json.")
        if proportional:
            spec = RopeSpec(theta=base, dim=head_dim, kind=kind, factor=float(options.get("factor", 1.0)), part=part)
        else:
            spec = self.rope_spec(kind, options, int(head_dim * part), base)
        _check_frequencies(spec)
        if sections is not None and self.get("pictures") is not None:
            sections = self.sections(options.get("mrope_section", sections), spec.dim // 2)
        else:
            sections = None
        return dataclasses.replace(spec, interleaved=interleaved, sections=sections or ())

    def sections(self, value: Any, frequencies: int) -> tuple[int, int, int]:
        """Return the sections of a rope's frequencies. Raise `UnsupportedModel` if they are invalid."""
        whole = isinstance(value, list | tuple) and len(value) == 3 and all(type(size) is int for size in value)
        if not whole or min(value) < 0 or sum(value) != frequencies:
            raise UnsupportedModel(f"mrope_section={value!r} are no three parts of {frequencies}. Check config.json.")
        return value[0], value[1], value[2]

    def rope_spec(self, kind: str, options: dict[str, Any], dim: int, theta: float) -> RopeSpec:
        """Return the `RopeSpec` of one kind. Raise `UnsupportedModel` for a missing option that the kind needs."""
        longest = self.get("max_position_embeddings", 0)
        # As in transformers, a key next to rope_parameters overrides the one within: Phi-3 needs it.
        original = self.get(
            "original_max_position_embeddings", options.get("original_max_position_embeddings", longest)
        )
        fields: dict[str, Any] = {}
        try:
            if kind in ("linear", "dynamic", "llama3"):
                fields = {"factor": float(options["factor"])}
            if kind == "dynamic":  # scales from the end of the context in config.json
                fields["original_length"] = longest
            elif kind == "llama3":
                fields |= {name: float(options[name]) for name in ("low_freq_factor", "high_freq_factor")}
                fields["original_length"] = original
            elif kind == "factors":  # of GGUF files; transformers has no such kind
                fields = {"short_factor": tuple(map(float, options["factors"]))}
            elif kind in ("yarn", "longrope"):
                factor, attention = float(options.get("factor", longest / original)), options.get("attention_factor")
                scale = attention_factor(kind, factor, original, options) if attention is None else float(attention)
                fields = {"factor": factor, "original_length": original, "attention_factor": scale}
            if kind == "yarn":
                fields |= {name: float(options.get(name) or usual) for name, usual in _RAMP.items()}
                fields["truncate"] = bool(options.get("truncate", True))
            elif kind == "longrope":
                fields |= {name: tuple(map(float, options[name])) for name in ("short_factor", "long_factor")}
        except KeyError as missing:
            raise UnsupportedModel(f"rope_type={kind!r} needs {missing.args[0]!r} in config.json.") from None
        lengths = [len(fields[name]) for name in ("short_factor", "long_factor") if name in fields]
        if lengths != [dim // 2] * len(lengths):
            names = "factors" if kind == "factors" else "short_factor and long_factor"
            raise UnsupportedModel(
                f"{names} have {' and '.join(map(str, lengths))} entries, but {dim // 2} frequencies are rotated. "
                "Check config.json."
            )
        return RopeSpec(theta=theta, dim=dim, kind=kind, **fields)


def decoder(
    keys: ConfigKeys,
    *,
    kv_heads_implied: bool = False,
    head_dim: int | None = None,
    tie: bool = False,
    theta: float = 10_000.0,
    eps: float = 1e-6,
    slides: Callable[[int], bool] | None = None,
    window: int | None = None,
    partial_rope: bool = False,
    rope: RopeSpec | None = None,
    attention_bias: bool = False,
    **overrides: Any,
) -> ModelConfig:
    """Return the `ModelConfig` of a Llama-like family, from the keys that all of them share.

    Arguments are the family's defaults; `rope` is for all layers, and `overrides` replace fields regardless of
    config.json. Sizes have no defaults except ones that other keys imply: `head_dim` is hidden_size / heads, and
    without num_key_value_heads there is one KV head per query head, where the family has `kv_heads_implied` or the file
    says null.
    """
    layers, heads = keys.size("num_hidden_layers"), keys.size("num_attention_heads")
    hidden = keys.size("hidden_size")
    head_dim = keys.size("head_dim", head_dim or hidden // heads)
    if "attention" not in overrides:
        rope = rope or keys.rope(head_dim, theta=theta, partial=partial_rope)
        spec = AttentionSpec(scale=head_dim**-0.5, rope=rope)
        sliding = dataclasses.replace(spec, sliding_window=window)
        slides = slides or (lambda layer: window is not None)
        overrides["attention"] = tuple(sliding if slides(layer) else spec for layer in range(layers))
    if "activation" not in overrides:
        overrides["activation"] = keys.activation()
    if "intermediate_size" not in overrides:
        overrides["intermediate_size"] = keys.size("intermediate_size")
    fields: dict[str, Any] = {
        "model_type": keys.raw["model_type"],
        "vocab_size": keys.size("vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": keys.size(
            "num_key_value_heads", heads if kv_heads_implied or "num_key_value_heads" in keys.raw else None
        ),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("max_position_embeddings", 2048),
        "tie_embeddings": keys.get("tie_word_embeddings", tie),
        "norm_eps": keys.get("rms_norm_eps", eps),
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "eos_token_ids": token_ids(keys.get("eos_token_id")),
        "bos_token_id": keys.get("bos_token_id"),
        "dtype": keys.get("dtype", keys.get("torch_dtype")),
    }
    return ModelConfig(**(fields | overrides))


def _check_frequencies(spec: RopeSpec) -> None:
    """Raise `UnsupportedModel` for options of a rope, each of its kind, that together make no frequencies."""
    if spec.dim > _WIDEST:  # no tensors are as wide: they are compared with the sizes later
        return
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            made = [spec.frequencies(long=long) for long in {False, spec.kind == "longrope"}]
    except (ArithmeticError, ValueError):
        made = []
    if not made or not all(np.isfinite(frequencies).all() for frequencies in made):
        raise UnsupportedModel(
            f"rope_type={spec.kind!r} with rope_theta={spec.theta:g} and factor={spec.factor:g} makes frequencies that "
            "are not finite. Check rope_parameters and rope_scaling in config.json."
        )


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return `eos_token_id` as a tuple: config.json has a number, a list of them, or null."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _shown(value: object) -> str:
    """Return the value as error messages show it, at most 80 characters."""
    if isinstance(value, int) and abs(value) >= 10**24:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
