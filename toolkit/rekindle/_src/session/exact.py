"""`rekindle.models.logprobs_like`: a session's log-probabilities to the last bit, as a function with derivatives.

Axes: B sequences, T tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.models.plain import token_logprobs
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.determinism import deterministic
from rekindle._src.programs.distribution import model_logprobs
from rekindle._src.programs.feature import Paging
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.session.session import Session


def logprobs_like(session: Session) -> Callable[[Any, Any], jax.Array]:
    """Return a function of weights and tokens [B, T] that computes a deterministic session's log-probabilities.

        logprobs = rekindle.models.logprobs_like(session)
        ratio = jnp.exp(logprobs(params, batch.tokens) - batch.logprobs)  # with the weights of the draw: exactly 1

    Its values [B, T] are those of `RolloutBatch.logprobs` to the last bit, for the places of completions that were
    drawn from the model's own distribution (at temperature 1, with no other option) by these weights. So it needs a
    session that was opened with `deterministic=True`, whose kernels give a token the same numbers in any batch. Its
    derivatives are those of `token_logprobs`, since native kernels have none. Weights are a module, an nnx state or
    a loaded model.
    """
    from rekindle._src.session.session import client_of  # loading a model alone needs no session

    config = session.config
    if not config.deterministic:
        problem = "gives a token other last bits in other batches"
        raise InvalidRequest("session", repr(session), problem, "Open it with deterministic=True")
    in_use = client_of(session).engine.resources.model
    if in_use is None or session.asleep:
        raise InvalidRequest("session", repr(session), "has no weights of its own now", "Use one that is awake")
    plain: Graph = in_use().graph
    fixed = deterministic(plain, config)

    @jax.custom_jvp
    def logprobs(leaves: Any, tokens: jax.Array) -> jax.Array:
        return _paged_logprobs(fixed, config, leaves, tokens)

    @logprobs.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        leaves, tokens = primals
        changes = (tangents[0],)
        _, change = jax.jvp(lambda values: token_logprobs(merge(plain, values), tokens), (leaves,), changes)  # type: ignore[arg-type]
        return logprobs(leaves, tokens), change

    def of_weights(weights: Any, tokens: Any) -> jax.Array:
        ids = jnp.asarray(tokens, jnp.int32)
        if ids.ndim != 2:
            raise InvalidRequest("tokens", list(ids.shape), "must have two axes", "Pass an array [sequences, tokens]")
        result: jax.Array = logprobs(_leaves(weights), ids)
        return result

    return of_weights


def _leaves(weights: Any) -> tuple[Any, ...]:
    if isinstance(weights, LoadedModel):
        return weights.leaves
    from flax import nnx

    return tuple(jax.tree.leaves(nnx.state(weights) if isinstance(weights, nnx.Module) else weights))


def _paged_logprobs(graph: Graph, config: EngineConfig, leaves: Any, tokens: jax.Array) -> jax.Array:
    """Compute the log-probabilities as a step computes prompts: over pages, with the session's kernels."""
    rows, length = tokens.shape
    model: Any = merge(graph, leaves)
    assert config.page_size is not None, "resolved"
    width = -(-length // config.page_size)
    shapes = paged.abstract(graph.config, 1 + rows * width, config.page_size, config.kv_dtype, slots=rows)
    pages = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    table = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    places, slots = np.arange(length, dtype=np.int32), jnp.arange(1, rows + 1, dtype=jnp.int32)
    paging = Paging(
        jnp.asarray(table[:, places // config.page_size].reshape(-1)),
        jnp.asarray(np.tile(places % config.page_size, rows)),
        jnp.asarray(table),
        jnp.full(rows, length, jnp.int32),
        jnp.arange(rows + 1, dtype=jnp.int32) * length,
        jnp.asarray(rows, jnp.int32),
        (slots, slots),
    )
    attend = paged.PagedAttention(graph.config, pages, paging, 0, config.kernels, deterministic=True)
    every = jnp.asarray(np.tile(places, rows))
    hidden = model(tokens.reshape(-1), every, attend, jnp.full(rows * length, length, jnp.int32))
    scores = model_logprobs(model.logits(hidden)).reshape(rows, length, -1)
    of_tokens = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(of_tokens, ((0, 0), (1, 0)))
