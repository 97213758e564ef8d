"""A session's log-probabilities compared with a trainer's.

`rekindle.models.parity` says how far apart they are and where that begins; `rekindle.models.logprobs_like` computes the
session's to the last bit, as a function with derivatives. Axes: B sequences, T tokens of each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.drawable import Record
from rekindle._src.core.records import IntArray
from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.models.hooks import STREAM_SITES, keeping
from rekindle._src.models.plain import PlainAttention, token_logprobs
from rekindle._src.opening.resolve import deterministic
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.kv_layout import Paging
from rekindle._src.programs.logprobs import model_logprobs
from rekindle._src.views import html
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from flax import nnx


WORST = 10  # tokens that are listed
EQUAL = 1e-6  # of a stage's root mean square, below which two stages count as equal


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TokenDifference(Record):
    """A token's log-probability in a session and by a trainer's model."""

    text: int  # the number of the text
    position: int  # in the text
    token_id: int
    session: float
    trainer: float

    @property
    def difference(self) -> float:
        """The session's log-probability less the trainer's."""
        return self.session - self.trainer


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ParityReport(Record):
    """The differences of log-probabilities between a session and a trainer's model, over all tokens but each first."""

    tokens: int
    largest: float  # absolute difference
    mean: float  # absolute difference
    first: str  # the part of the model where both begin to differ, such as "layers.3"; empty if no part does
    stages: tuple[tuple[str, float], ...]  # each part: the largest difference after it, over the root mean square there
    worst: tuple[TokenDifference, ...]  # the tokens that differ most
    differences: tuple[NDArray[np.float32], ...] = dataclasses.field(repr=False)  # of each text, token by token

    def __str__(self) -> str:
        where = f"they begin in {self.first}" if self.first else "all parts of the model agree"
        return (
            f"log-probabilities of {words.count(self.tokens, 'token')} differ by {self.largest:.2g} at most and "
            f"{self.mean:.2g} on average; {where}"
        )

    def __repr__(self) -> str:
        return f"<ParityReport: {self}>"

    def _repr_html_(self) -> str:
        stages = html.table(("part", "largest difference"), [(name, f"{value:.2g}") for name, value in self.stages])
        rows = [
            (one.text, one.position, one.token_id, f"{one.session:.5f}", f"{one.trainer:.5f}", f"{one.difference:.2g}")
            for one in self.worst
        ]
        heads = ("text", "position", "token", "session", "trainer", "difference")
        return str(html.block(html.line(str(self)), html.table(heads, rows), html.details("by part", stages)))


class ComparableSession(Protocol):
    """A session, as a comparison uses it."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def generate_sync(self) -> Callable[..., Any]: ...


def compare(
    session: ComparableSession,
    weights: Callable[[], LoadedModel],
    model: LoadedModel | nnx.Module,
    texts: Sequence[str] | Sequence[Sequence[int]],
) -> ParityReport:
    """Compare the log-probabilities of a session that has these `weights` with a trainer's model."""
    encode = session.tokenizer.encode
    sequences = [np.asarray(encode(text) if isinstance(text, str) else text, np.int32) for text in texts]
    for number, ids in enumerate(sequences):
        if ids.ndim != 1 or len(ids) < 2:
            raise InvalidRequest("texts", number, "has fewer than two tokens", "Pass longer texts")
    if not sequences:
        raise InvalidRequest("texts", [], "is empty", "Pass at least one text")
    theirs = _module(model)
    own = weights()
    ours = None if own.placement.divided else _module(own)
    scored = session.generate_sync([ids.tolist() for ids in sequences], max_tokens=0, prompt_logprobs=0)
    differences, worst, stages = [], list[TokenDifference](), dict[str, float]()
    for number, (ids, done) in enumerate(zip(sequences, scored, strict=True)):
        names, states, logits = _plain(theirs, ids)
        expected = np.asarray(jax.nn.log_softmax(logits[:-1], axis=-1))[np.arange(len(ids) - 1), ids[1:]]
        entries = done.prompt_logprobs or ()
        engine = np.asarray([entry.logprob for entry in entries], np.float32)
        differences.append(engine - expected)
        worst += [
            TokenDifference(number, place + 1, int(ids[place + 1]), float(engine[place]), float(expected[place]))
            for place in np.argsort(-np.abs(engine - expected))[:WORST].tolist()
        ]
        if ours is not None:
            for name, left, right in zip(names, _plain(ours, ids)[1], states, strict=True):
                scale = float(jnp.sqrt(jnp.mean(jnp.square(right)))) or 1.0
                stages[name] = max(stages.get(name, 0.0), float(jnp.abs(left - right).max()) / scale)
    absolute = np.abs(np.concatenate(differences))
    return ParityReport(
        tokens=len(absolute),
        largest=float(absolute.max()),
        mean=float(absolute.mean()),
        first=next((name for name, value in stages.items() if value > EQUAL), ""),
        stages=tuple(stages.items()),
        worst=tuple(sorted(worst, key=lambda one: -abs(one.difference))[:WORST]),
        differences=tuple(differences),
    )


def _module(model: Any) -> Any:
    return merge(model.graph, model.leaves) if isinstance(model, LoadedModel) else model


def _plain(module: Any, ids: IntArray) -> tuple[list[str], list[jax.Array], jax.Array]:
    """Return the names of a module's parts, their outputs for a text in float32, and its logits [T, V]."""
    from flax import nnx

    graph, state = nnx.split(module)
    states, logits = _forward(graph, state, jnp.asarray(ids))
    names = ["embed", *(f"layers.{number}" for number in range(len(module.layers))), "norm", "head"]
    return names, [*states, logits], logits


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: Any, state: Any, tokens: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    from flax import nnx

    module: Any = nnx.merge(graph, state)
    attend = PlainAttention(module, len(tokens))
    stream: dict[tuple[str, int], jax.Array] = {}
    lengths = jnp.full(len(tokens), len(tokens))
    hidden = module(tokens, jnp.arange(len(tokens)), attend, lengths, [keeping(stream, STREAM_SITES)])
    return [state.astype(jnp.float32) for state in (*stream.values(), hidden)], module.logits(hidden)


def deterministic_logprobs(plain: Graph, config: ResolvedConfig) -> Callable[[Any, Any], jax.Array]:
    """Return a function of weights and tokens [B, T] that computes a deterministic session's log-probabilities.

    Its values equal the session's to the last bit; its derivatives are taken from `token_logprobs`, since native
    kernels have none.
    """
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


def _paged_logprobs(graph: Graph, config: ResolvedConfig, leaves: Any, tokens: jax.Array) -> jax.Array:
    """Compute the log-probabilities as a step computes prompts: over pages, with the session's kernels."""
    rows, length = tokens.shape
    model: Any = merge(graph, leaves)
    width = -(-length // config.page_size)
    shapes = paged.abstract(graph.config, 1 + rows * width, config.page_size, config.kv_dtype, {"states": 1 + rows})
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
        {"states": (slots, slots)},
    )
    attend = paged.PagedAttention(graph.config, pages, paging, 0, config.kernels, deterministic=True)
    every = jnp.asarray(np.tile(places, rows))
    hidden = model(tokens.reshape(-1), every, attend, jnp.full(rows * length, length, jnp.int32))
    scores = model_logprobs(model.logits(hidden), deterministic=True).reshape(rows, length, -1)
    of_tokens = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(of_tokens, ((0, 0), (1, 0)))
