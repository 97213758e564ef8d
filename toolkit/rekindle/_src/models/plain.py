"""A model over whole sequences, without pages, for a trainer to differentiate.

Axes: B sequences, T tokens of each, H query heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from rekindle._src.models.base import LoadedModel, Model, graph_of, merge
from rekindle._src.models.config import AttentionSpec, ModelConfig, SharedWith
from rekindle.errors import InvalidRequest
from rekindle_kernels import RaggedBatch

if TYPE_CHECKING:
    from flax import nnx
    from jax.typing import ArrayLike, DTypeLike

    from rekindle._src.models.nn.forward import Compute


def logits(model: LoadedModel | nnx.Module, tokens: ArrayLike) -> Array:
    """Compute the logits [B, T, V] after each token of whole sequences [B, T], in float32.

    `model` is a loaded model, or a module as `merge` returns it. Every token attends to those before it in its line,
    so that padding at the end of a line changes nothing before it. Gradients flow to the module's parameters; call it
    inside `jax.jit`.
    """
    module: Any = merge(model.graph, model.leaves) if isinstance(model, LoadedModel) else model
    ids = jnp.asarray(tokens, jnp.int32)
    if ids.ndim != 2:
        raise InvalidRequest("tokens", list(ids.shape), "must have two axes", "Pass an array [sequences, tokens]")
    rows, length = ids.shape
    attend = PlainAttention(module, length, rows)
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), rows)
    hidden = module(ids.reshape(-1), positions, attend, jnp.full(rows * length, length))
    result: Array = module.logits(hidden)
    return result.reshape(rows, length, -1)


def token_logprobs(model: LoadedModel | nnx.Module, tokens: ArrayLike, *, temperature: float = 1.0) -> Array:
    """Compute the log-probability [B, T] of each token given those before it; 0 for the first one of each line.

    Places match `RolloutBatch.logprobs`. Like `logits`, a part of a loss.
    """
    ids = jnp.asarray(tokens, jnp.int32)
    every = jax.nn.log_softmax(logits(model, ids)[:, :-1] / temperature, axis=-1)
    of_tokens = jnp.take_along_axis(every, ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(of_tokens, ((0, 0), (1, 0)))


def trainable(model: LoadedModel) -> tuple[Callable[[Mapping[str, Array], ArrayLike], Array], dict[str, Array]]:
    """Return the `logits` of a model as a function of parameters by path and of tokens, and a copy of its parameters.

    Raise ValueError for integer weights: they have no derivatives.
    """
    precision = dataclasses.replace(model.graph.precision, loop_experts=False)  # stacks would be integers
    graph, shapes = graph_of(model.graph.config, precision)
    integers = [
        path for path, leaf in zip(graph.paths, shapes, strict=True) if not jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if integers:
        raise ValueError(f"{len(integers)} of {len(shapes)} arrays are integers, such as {integers[0]}")
    known, stored = frozenset(graph.paths), dict(zip(model.graph.paths, model.leaves, strict=True))
    parameters = {
        path: jnp.array(_as_floats(stored[path], leaf.dtype), copy=True)
        for path, leaf in zip(graph.paths, shapes, strict=True)
    }

    def compute(parameters: Mapping[str, Array], tokens: ArrayLike) -> Array:
        if parameters.keys() != known:
            other = min(parameters.keys() ^ known)
            problem = f"is {'missing' if other in known else 'no parameter of this model'}"
            raise InvalidRequest("params", other, problem, "Pass what session.trainable() returned, with its paths")
        return logits(cast("nnx.Module", merge(graph, [parameters[path] for path in graph.paths])), tokens)

    return compute, parameters


def _as_floats(stored: Array, dtype: DTypeLike) -> Array:
    """Return an array of floats, which may be stored as the bits in integers."""
    return stored if stored.dtype == dtype else jax.lax.bitcast_convert_type(stored, dtype)


class AttendOwn:
    """An `Attend` without a cache: `attention(q, k, v, spec, sinks)` for each layer, over this call's keys alone."""

    def __init__(self, config: ModelConfig, attention: Callable[..., Array]) -> None:
        self._config, self._attention = config, attention
        self._shared = {cache.layer for cache in config.pages if isinstance(cache, SharedWith)}
        self.kept: dict[int, tuple[Array, Array]] = {}  # keys and values of layers that others share

    def __call__(self, layer: int, q: Array, k: Array | None, v: Array | None, sinks: Array | None = None, /) -> Array:
        if k is None:
            keys, values = self.kept[self._config.source(layer)]
        else:
            keys, values = k, k[..., : self._config.pages_of(layer).value_size] if v is None else v
        if layer in self._shared:
            self.kept[layer] = keys, values
        return self._attention(q, keys, values, self._config.attention[layer], sinks)


class PlainAttention(AttendOwn):
    """A model's `attend` over whole texts of one length, without pages: every token attends to those before it."""

    def __init__(self, module: Model, length: int, rows: int = 1) -> None:
        super().__init__(module.config, self.attention)
        self._length, self._rows = length, rows
        ends = jnp.arange(rows + 1, dtype=jnp.int32) * length
        lengths = jnp.full(rows, length, jnp.int32)
        self._batch = RaggedBatch(lengths, ends, jnp.asarray(rows, jnp.int32), 0, differentiable=True)

    def attention(self, q: Array, k: Array, v: Array, spec: AttentionSpec, sinks: Array | None) -> Array:
        """Compute the attention of all lines."""
        from rekindle._src.models.nn.layers import soft_cap, soft_max  # it imports flax, which only tracing needs

        group, queries = q.shape[1] // k.shape[1], self._lines(q)
        keys, values = (jnp.repeat(self._lines(heads), group, axis=2) for heads in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", queries, keys, precision="highest") * spec.scale
        masked = jnp.where(self.visible(spec), soft_cap(scores, spec.soft_cap), -jnp.inf)
        weights = jax.vmap(soft_max, (0, None))(masked, sinks)
        out = jnp.einsum("bhts,bshd->bthd", weights, values, precision="highest")
        return out.reshape(-1, *out.shape[2:]).astype(q.dtype)

    def visible(self, spec: AttentionSpec) -> Array:
        """Return which keys each query sees [T, T]."""
        position = jnp.arange(self._length)
        visible: Array = spec.sees(position[:, None] - position)
        return visible

    def _lines(self, x: Array) -> Array:
        """Return x [B·T, …] as [B, T, …] in float32."""
        return x.astype(jnp.float32).reshape(self._rows, self._length, *x.shape[1:])

    def recur(self, layer: int, compute: Compute, /) -> Array:
        """Compute a recurrent layer from states of zeros."""
        spec = self._config.states[layer]
        assert spec is not None, "the layer has a state"
        zeros = tuple(jnp.zeros((self._rows, *shape), jnp.float32) for shape in spec.shapes)
        return compute(zeros, self._batch)[0]
