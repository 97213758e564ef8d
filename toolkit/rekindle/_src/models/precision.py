"""The dtypes in which a model stores and computes. They are chosen once, before the model is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from rekindle._src.models.nn.shards import Shards
from rekindle_kernels import current_platform

QUANTIZE = (None, "int8", "int8-weight")


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a model's weights and of its computation. Static in its graph."""

    weights: str = "float32"
    quantize: str | None = None
    quantize_embeddings: bool = True  # the embedding and the head too
    stream: str = "float32"  # the residual stream
    loop_experts: bool = False  # one expert at a time rather than `ragged_dot`
    implementation: str | None = None  # of norms, products, ropes and sampling; None: the first that fits each call
    deterministic: bool = False  # a token's numbers are the same to the last bit, whatever is computed beside it
    shards: Shards | None = None  # the layers are those of one device, which shares the model with others

    @classmethod
    def of(
        cls,
        dtype: DTypeLike,
        quantize: str | None = None,
        *,
        quantize_embeddings: bool = True,
        platform: str | None = None,
    ) -> Precision:
        """The precision for a platform: on CPU activations are float32, elsewhere they have the weights' dtype."""
        assert quantize in QUANTIZE, f"quantize={quantize!r}"
        name = jnp.dtype(dtype).name
        on_cpu = (platform or current_platform()) == "cpu"
        return cls(
            name,
            quantize,
            quantize_embeddings,
            "float32" if on_cpu else name,
            loop_experts=on_cpu,
        )

    def value_dtype(self, stored: DTypeLike) -> np.dtype[Any]:
        """The dtype of a leaf's values, given the dtype that it is stored with."""
        return jnp.dtype(self.weights if stored == jnp.uint16 else stored)
