"""The recipe of the shipped model: its shape and the constants of its training."""

from __future__ import annotations

import dataclasses
from typing import Any

CONTEXT = 1024  # tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training with batches of one shape."""

    rows: int  # windows in a batch
    length: int  # tokens in a window
    steps: int
    copying: float = 0.02  # share of documents that are copying exercises
    sums: float = 0.0  # share of documents that are sheets of sums, in addition to those of the corpus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Shape and training constants; the defaults make the shipped weights."""

    # Nine documents of ten are shorter than 320 tokens; the long windows at the end teach far positions.
    stages: tuple[Stage, ...] = (
        Stage(32, 128, 640, copying=0.3),
        Stage(12, 320, 5140),
        Stage(12, 320, 4050, sums=0.12),
        Stage(8, 512, 450, sums=0.12),
        Stage(4, CONTEXT, 320, sums=0.06),
    )
    matrix_rate: float = 0.02  # Muon, for the matrices of the blocks
    other_rate: float = 0.006  # Adam, for embedding, head and norms
    warmup: int = 250  # the first steps, over which the rates rise
    decay: int = 3500  # the last steps, over which the rates fall to zero
    seed: int = 0
    checkpoint_every: int = 100
    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        """The number of tokens in the windows of all steps, padding included."""
        return sum(stage.steps * stage.rows * stage.length for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """Return the stage of a step, counted from 0."""
        end = 0
        for stage in self.stages:
            end += stage.steps
            if step < end:
                return stage
        return self.stages[-1]

    def rate(self, step: int) -> float:
        """Return the share of the full rates at a step, counted from 0: it rises, stays and falls to zero."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / self.decay)

    def scaled(self, steps: int) -> Recipe:
        """Return the recipe with every part scaled to about `steps` steps in all."""
        share = steps / self.steps
        stages = tuple(dataclasses.replace(stage, steps=max(1, round(stage.steps * share))) for stage in self.stages)
        return dataclasses.replace(
            self, stages=stages, warmup=max(1, round(self.warmup * share)), decay=max(1, round(self.decay * share))
        )

    @classmethod
    def of_size(cls, size: str) -> Recipe:
        """Return the recipe of one of SIZES."""
        return cls(**SIZES[size])

    def config(self, eos_token_ids: list[int], pad_token_id: int) -> dict[str, Any]:
        """Return the model's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": eos_token_ids,
            "pad_token_id": pad_token_id,
            "torch_dtype": "bfloat16",
        }


# The differences of larger models from the shipped one, "tiny". Their weights are not shipped.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "30m": {"hidden_size": 512, "num_layers": 9, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 1536},
}
