"""The layers that encoders of pictures are built from.

N patches of a batch, T tokens, M patches of a token, E hidden size, H heads, D numbers of a head, F rotated
frequencies, X the language model's hidden size, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rekindle._src.models.nn.layers import LayerNorm
from rekindle._src.models.nn.linear import Linear, parameter
from rekindle._src.models.precision import Precision
from rekindle._src.models.vision.attention import picture_attention
from rekindle._src.models.vision.config import VisionConfig
from rekindle._src.models.vision.inputs import PatchBatch
from rekindle_kernels import activate


class PictureEmbeddings(NamedTuple):
    """The result of an encoder."""

    tokens: Array  # [T, X]
    levels: Array  # [L, T, X]: added to the text's first layers; L is 0 for most encoders


class PatchPass(NamedTuple):
    """The arrays that all layers of a pass share."""

    starts: Array  # [N]
    stops: Array  # [N]
    rope: tuple[Array, Array] | None  # cos and sin [N, 1, …, F]


def rope_tables(
    batch: PatchBatch, frequencies: np.ndarray[Any, Any], *, columns_first: bool, apart: bool
) -> tuple[Array, Array]:
    """Return cos and sin of rows and columns times the frequencies.

    They are rotated `apart`, each in its own half of a head, or as the halves of one list of frequencies.
    """
    axes = (batch.columns, batch.rows) if columns_first else (batch.rows, batch.columns)
    angles = jnp.stack([axis.astype(jnp.float32)[:, None] * frequencies for axis in axes], axis=1)  # [N, 2, F]
    angles = angles[:, None] if apart else angles.reshape(angles.shape[0], 1, -1)
    return jnp.cos(angles), jnp.sin(angles)


def axial_frequencies(head_dim: int, theta: float) -> np.ndarray[Any, Any]:
    """Return the radians per patch of one axis [D / 4], in float32 as transformers computes them."""
    half = head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    result: np.ndarray[Any, Any] = np.float32(1.0) / np.power(np.float32(theta), exponents)
    return result


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
    """Rotate heads [N, H, D]: the two numbers of a pair lie half of a rotated part apart."""
    cos, sin = rope
    pairs = x.reshape(*x.shape[:2], *cos.shape[2:-1], 2, cos.shape[-1]).astype(jnp.float32)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return rotated.reshape(x.shape).astype(x.dtype)


class PositionTable(nnx.Module):
    """A table of positions [R, E]; a batch's patches read some rows, or all, by their weights."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        self.weight = parameter((config.positions, config.hidden_size), precision.weights)

    def __call__(self, batch: PatchBatch) -> Array:
        """Return the positions of a batch's patches [N, E], float32."""
        table, weights = self.weight[...], jnp.asarray(batch.weights)
        table_rows = jnp.asarray(batch.table_rows)
        if not table_rows.shape[1]:
            return jnp.dot(weights, table.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        total = weights[:, 0, None] * table[table_rows[:, 0]]
        for place in range(1, table_rows.shape[1]):
            total = total + weights[:, place, None] * table[table_rows[:, place]]
        return total.astype(jnp.float32)


class PatchHeads(NamedTuple):
    """The heads of patches, normed and rotated."""

    q: Array  # [H, N, D], so that a block's lie together
    k: Array
    v: Array


class PatchLayer(nnx.Module):
    """A layer: `project`, attention with its `scale`, then `mix`. Each takes any number of patches at a time.

    All layers of an encoder have the same shapes, so that one program of each serves all of them.
    """

    scale: float  # of scores

    def project(self, x: Array, shared: PatchPass) -> PatchHeads:
        """Compute the heads of patches from their hidden states [N, E]."""
        raise NotImplementedError

    def mix(self, x: Array, y: Array) -> Array:
        """Compute the layer's output for patches [N, E] from what their heads attend to [N, H · D]."""
        raise NotImplementedError

    def __call__(self, x: Array, shared: PatchPass) -> Array:
        y = picture_attention(*self.project(x, shared), shared.starts, shared.stops, self.scale)
        return self.mix(x, joined_heads(y, x))


class FusedPatchAttention(nnx.Module):
    """Attention among a picture's patches, with q, k and v in one matrix."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        E, H, D = config.hidden_size, config.num_heads, config.head_dim
        self.qkv = Linear(3 * H * D, E, precision, bias=True)
        self.out = Linear(E, H * D, precision, bias=True)
        self.heads, self.head_dim = H, D

    def project(self, x: Array, shared: PatchPass) -> PatchHeads:
        qkv = self.qkv(x).reshape(x.shape[0], 3, self.heads, self.head_dim)
        q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
        if shared.rope is not None:
            q, k = rotate(q, shared.rope), rotate(k, shared.rope)
        return PatchHeads(*(part.swapaxes(0, 1) for part in (q, k, v)))


class PatchMlp(nnx.Module):
    """An MLP without a gate, with biases."""

    def __init__(
        self, sizes: tuple[int, int, int], activation: str, precision: Precision, *, bias: bool = True
    ) -> None:
        inputs, inner, outputs = sizes
        self.up = Linear(inner, inputs, precision, bias=bias)
        self.down = Linear(outputs, inner, precision, bias=bias)
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        return self.down(activate(self.up(x), self.activation))


class PatchBlock(PatchLayer):
    """A layer with norms before attention and MLP."""

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        E = config.hidden_size
        self.scale = config.head_dim**-0.5
        self.attention_norm = LayerNorm(E, config.norm_eps)
        self.attention = FusedPatchAttention(config, precision)
        self.mlp_norm = LayerNorm(E, config.norm_eps)
        self.mlp = PatchMlp((E, config.intermediate_size, E), config.activation, precision)

    def project(self, x: Array, shared: PatchPass) -> PatchHeads:
        with jax.named_scope("project"):
            return self.attention.project(self.attention_norm(x), shared)

    def mix(self, x: Array, y: Array) -> Array:
        with jax.named_scope("attend"):
            x = x + self.attention.out(y)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


class VisionTower(nnx.Module):
    """An encoder: `begin`, each of `layers`, and `end`; calling it does the same. `steps.py` runs them apart.

    `begin` takes any patches of a batch, `end` and `level` take any tokens' patches.
    """

    layers: Sequence[PatchLayer]

    def __init__(self, config: VisionConfig, precision: Precision) -> None:
        self.config, self.stream = config, precision.stream

    def begin(self, batch: PatchBatch) -> tuple[Array, PatchPass]:
        """Compute the first layer's input [N, E], and what all layers share."""
        raise NotImplementedError

    def end(self, x: Array) -> Array:
        """Compute the last layer's output [N, E] → tokens [T, X]."""
        raise NotImplementedError

    def level(self, number: int, x: Array) -> Array:
        """Compute a level [T, X] of the result from the output [N, E] of the layer `config.deepstack[number]`."""
        raise NotImplementedError

    def __call__(self, batch: PatchBatch) -> PictureEmbeddings:
        x, shared = self.begin(batch)
        levels = list[Array]()
        for number, layer in enumerate(self.layers):
            with jax.named_scope(f"layer {number}"):
                x = layer(x, shared)
            if number in self.config.deepstack:
                levels.append(self.level(len(levels), x))
        tokens = self.end(x)
        return PictureEmbeddings(tokens, jnp.stack(levels) if levels else jnp.zeros((0, *tokens.shape), tokens.dtype))


def joined_heads(y: Array, x: Array) -> Array:
    """Return heads [H, N, D] as one row for each patch [N, H · D], in the dtype of x."""
    return y.swapaxes(0, 1).reshape(y.shape[1], -1).astype(x.dtype)


def grouped(x: Array, config: VisionConfig) -> Array:
    """Return the patches of each token [T, M, E]."""
    return x.reshape(-1, config.patches_of_token, x.shape[-1])
