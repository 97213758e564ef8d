"""The static options of a model's layers: the dtypes for storing and computing, and the devices that share it.

They are chosen once, before the model is made. Layers of an undivided model have None for `Shards`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from rekindle._src.core.dtypes import checked_quantize, dtype_name, kinds_of
from rekindle._src.models.config import ModelConfig
from rekindle_kernels import current_platform, traits

AXES = ("expert", "model")


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """The devices that share a model, seen from a layer."""

    model: int
    expert: int
    vocab_size: int  # of the whole model
    sharing_keys: int = 1  # devices next to each other with the same head of keys in recurrent layers

    def sum(self, x: Array) -> Array:
        """Return the sum over all devices."""
        return lax.psum(x, AXES)

    def mean(self, x: Array) -> Array:
        """Return the mean over all devices."""
        return lax.pmean(x, AXES)

    def mean_of_keys(self, x: Array) -> Array:
        """Return the mean over the devices that have the same head of keys."""
        every = lax.all_gather(x, AXES)
        means = every.reshape(-1, self.sharing_keys, *x.shape).mean(axis=1)
        return means[self.index() // self.sharing_keys]

    def index(self) -> Array:
        """Return the number of this device among all."""
        return lax.axis_index(AXES)

    def lookup(self, tokens: Array, rows: int) -> tuple[Array, Array]:
        """Return the tokens' row indices in this device's part of a table, 0 if absent, and True where present."""
        local = tokens - self.index() * rows
        present = (local >= 0) & (local < rows)
        return jnp.where(present, local, 0), present

    def whole_vocab(self, logits: Array) -> Array:
        """Return all logits [N, V] from every device's part, without the padding of the last part."""
        return lax.all_gather(logits, AXES, axis=logits.ndim - 1, tiled=True)[..., : self.vocab_size]

    def experts_here(self, count: int) -> tuple[Array, int]:
        """Return the first of `count` experts on this device, and how many it has."""
        share = count // self.expert
        return lax.axis_index("expert") * share, share


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a model's weights and of its computation. Static in its graph."""

    weights: str = "float32"
    quantize: str | None = None  # in the form of `dtypes.checked_quantize`
    quantize_embeddings: bool = True  # True if the embedding and the head are quantised, too
    stream: str = "float32"  # the residual stream
    loop_experts: bool = False  # one expert at a time rather than `grouped_linear`
    implementation: str | None = None  # of norms, products, ropes and sampling; None: the first that fits each call
    deterministic: bool = False  # a token's numbers are the same to the last bit in any batch
    shards: Shards | None = None  # the layers of one device, which shares the model with others
    kinds: tuple[tuple[str, str], ...] = ()  # kinds of matrices by their paths; replaces `quantize`
    # Matrices that are held in `weights` though they have been quantised to these kinds: this machine's products would
    # unpack them every time.
    unpacked: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, dtype: DTypeLike, quantize: Any = None, *, quantize_embeddings: bool = True, platform: str | None = None
    ) -> Precision:
        """Return a platform's precision: on CPU activations are float32, elsewhere they have the weights' dtype."""
        name = jnp.dtype(dtype_name(dtype)).name
        on_cpu = (platform or current_platform()) == "cpu"
        return cls(
            name,
            checked_quantize(quantize),
            quantize_embeddings=quantize_embeddings,
            stream="float32" if on_cpu else name,
            loop_experts=on_cpu,
        )

    def value_dtype(self, stored: DTypeLike) -> np.dtype[Any]:
        """Return the dtype of a leaf's values, from the dtype that it is stored with."""
        return jnp.dtype(self.weights if stored == jnp.uint16 else stored)

    @property
    def quantizes(self) -> bool:
        """True if any matrix is quantised."""
        return self.quantize is not None or bool(self.kinds)

    def kind(self, path: str, part: str) -> str | None:
        """Return the kind of a quantised matrix of this part of the model; None if it is not quantised."""
        if path in dict(self.unpacked):
            return None
        return dict(self.kinds).get(path) if self.kinds else kinds_of(self.quantize).get(part)


def resolve_dtype(dtype: str, config: ModelConfig | None, platform: str | None = None) -> str:
    """Return the dtype that "auto" stands for: bfloat16 on CPU, where it reads twice as fast, else the checkpoint's.

    GPUs that don't multiply bfloat16 get float16 instead, or float32 for models that scale embeddings up: the
    numbers of Gemma go beyond what float16 holds. Without a config the result can be "auto" again.
    """
    if dtype != "auto":
        return dtype
    platform = platform or current_platform()
    if platform == "cpu":
        return "bfloat16"
    if config is None:
        return "auto"
    own = config.dtype if config.dtype in ("float16", "bfloat16", "float32") else "bfloat16"
    if own != "bfloat16" or traits(platform=platform).bfloat16:
        return own
    return "float16" if config.embed_scale == 1.0 else "float32"
