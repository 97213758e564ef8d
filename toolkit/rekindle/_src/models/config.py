"""The architecture and sizes of a model as plain records; `registry.config_from_hf` reads them from a config.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from rekindle._src.models.nn.rope import RopeSpec
from rekindle.errors import UnsupportedModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The scale, window, cap and rotation of one layer's attention."""

    scale: float  # multiplies q·k
    sliding_window: int | None = None  # a query sees this many keys, its own included
    soft_cap: float | None = None  # scores become cap · tanh(score / cap)
    rope: RopeSpec | None = None  # None: this layer does not rotate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The mixture of experts of one layer."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool  # the weights of the chosen experts sum to one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture and sizes of a model. It is hashable; programs and stores are keyed by it."""

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
    dtype: str | None = None  # of the weights, by config.json

    def __post_init__(self) -> None:
        assert len(self.attention) == self.num_layers, "one AttentionSpec per layer"
        assert len(self.moe) in (0, self.num_layers), "one entry per layer, or none"
        for spec in self.moe:
            if spec is not None and spec.top_k > spec.num_experts:
                raise UnsupportedModel(
                    f"num_experts_per_tok={spec.top_k} is more than the {spec.num_experts} experts. Check config.json."
                )
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
        """Return a number that is equal for prompts whose keys are rotated alike; only those share prefixes.

        It is 0 up to the length from which a dynamic or longrope model rotates in another way.
        """
        return max((rope.regime(prompt_length) for rope in self.ropes), default=0)

    def digest(self) -> str:
        """Return a hash of the config that is the same in every process."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
