"""The numbers of an encoder of pictures, and reading them from the config.json of the model that it belongs to.

A stranger's file decides them, so each has a type and a bound before anything is built from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rekindle._src.models.hf_config import MAX_LAYERS, ConfigKeys
from rekindle.errors import UnsupportedModel

# Several times the values of any published encoder, as in `hf_config.py`.
MAX_SIZE = 1 << 16  # of hidden states, MLPs, heads and the text's embeddings
MAX_POSITIONS = 1 << 17  # rows of a table of positions
MAX_SIDE = 1 << 12  # of a patch, in pixels; of a token, in patches
MAX_PATCH = 1 << 20  # numbers of a patch
_SIZES = ("hidden_size", "intermediate_size", "head_dim", "out_hidden_size", "projector_hidden_size")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """An encoder of pictures, with its projector to the embeddings of a language model."""

    model_type: str  # of the whole model; names the entry in `registry.py`
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    out_size: int  # of the language model's embeddings
    patch_size: int  # pixels of each side of a patch
    channels: int = 3
    frames: int = 1  # pictures in a patch: of a still one the same, several times
    merge: int  # patches of each side of a token
    positions: int  # rows of the table of positions; of each of the two tables, where columns and rows have their own
    norm_eps: float = 1e-6
    activation: str = "gelu_tanh"
    rope_theta: float = 10_000.0
    deepstack: tuple[int, ...] = ()  # layers with outputs that are levels of the result, too
    clipped: bool = False  # inputs and outputs of matrices are limited
    standardized: bool = False  # tokens have a mean and a deviation
    projector_size: int = 0
    projector_norm: bool = False
    projector_bias: bool = False
    projector_activation: str = "gelu"

    @property
    def patch_length(self) -> int:
        """The numbers of a patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def patches_of_token(self) -> int:
        return self.merge**2

    @property
    def side(self) -> int:
        """The side of a square table of positions."""
        return math.isqrt(self.positions)


class VisionKeys(ConfigKeys):
    """The `vision_config` of a config.json, with transformers' defaults for omitted keys.

    `whole` is all of config.json, which has the projector's numbers.
    """

    def __init__(
        self, model: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str] | None = None
    ) -> None:
        vision = model.get("vision_config")
        if not isinstance(vision, Mapping):
            raise UnsupportedModel(
                f"vision_config is {type(vision).__name__} in config.json, not an object. Download it again."
            )
        text = model.get("text_config")
        self.whole_model = ConfigKeys(model)
        self.text = ConfigKeys(text if isinstance(text, Mapping) else model)
        given = ConfigKeys({name: value for name, value in vision.items() if value is not None}, aliases)
        super().__init__({**defaults, **given.raw, "model_type": model.get("model_type")})

    @property
    def model_type(self) -> str:
        return str(self.raw["model_type"])

    def number(self, name: str, most: int, least: int = 1) -> int:
        """Return a whole number from `least` to `most`."""
        value = self.whole(name, -1, most=most)
        if value < least:
            raise self.wrong(name, f"a whole number from {least} to {most:,}")
        return value

    def share(self, name: str, of: int) -> int:
        """Return a whole number that divides another one."""
        value = self.number(name, of)
        if of % value:
            raise self.wrong(name, f"a divisor of {of:,}")
        return value

    def epsilon(self, name: str) -> float:
        """Return the number that a norm adds to variances."""
        return self.real(name, 0.0, 1.0)

    def real(self, name: str, above: float, most: float) -> float:
        """Return a number above one bound and up to another."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
            raise self.wrong(name, f"a number above {above:g}, at most {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a key that is true or false."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def square(self, name: str, most: int = MAX_POSITIONS) -> int:
        """Return the number of rows of a table for a square grid of positions."""
        value = self.number(name, most)
        if math.isqrt(value) ** 2 != value:
            raise self.wrong(name, "the square of a whole number")
        return value

    def layers_of(self, name: str, layers: int) -> tuple[int, ...]:
        """Return ascending numbers of layers."""
        value = self.get(name, ())
        if isinstance(value, list | tuple) and len(value) <= layers and all(type(at) is int for at in value):
            numbers = tuple(sorted({at for at in value if 0 <= at < layers}))
            if numbers == tuple(value):
                return numbers
        raise self.wrong(name, f"ascending numbers of its {layers:,} layers")

    def theta(self, default: float) -> float:
        """Return the base of rotary positions."""
        options = self.get("rope_parameters") or {}
        if not isinstance(options, Mapping):
            raise self.wrong("rope_parameters", "an object")
        keys = ConfigKeys({"model_type": self.model_type, **options})
        keys.only("rope_type", "axial", "default")
        return float(keys.factor("rope_theta", default))

    def wrong(self, name: str, expected: str) -> UnsupportedModel:
        shown = repr(self.raw.get(name))[:80]
        return UnsupportedModel(f"vision_config has {name}={shown}, which is not {expected}. Check config.json.")


def encoder(
    keys: VisionKeys, *, layers: str = "num_hidden_layers", heads: str = "num_attention_heads", **fields: Any
) -> VisionConfig:
    """Return the `VisionConfig` of a transformer, from the keys that all of them share; `fields` are the others."""
    hidden = keys.number("hidden_size", MAX_SIZE)
    count = keys.number(heads, hidden)
    head_dim = keys.number("head_dim", MAX_SIZE) if "head_dim" in keys.raw else hidden // keys.share(heads, hidden)
    common: dict[str, Any] = {
        "model_type": keys.model_type,
        "hidden_size": hidden,
        "intermediate_size": keys.number("intermediate_size", MAX_SIZE * 4),
        "num_layers": keys.number(layers, MAX_LAYERS),
        "num_heads": count,
        "head_dim": head_dim,
        "patch_size": keys.number("patch_size", MAX_SIDE),
    }
    config = VisionConfig(**(common | fields))
    if config.num_heads * config.head_dim > MAX_SIZE or config.patch_length > MAX_PATCH:
        raise UnsupportedModel(
            f"vision_config has {config.num_heads:,} heads of {config.head_dim:,} numbers and patches of "
            f"{config.patch_length:,}; at most {MAX_SIZE:,} and {MAX_PATCH:,} are read. Check config.json."
        )
    return config
