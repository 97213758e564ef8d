"""`rekindle.models.parity`: how far a session's log-probabilities are from a trainer's, and where that begins."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import html
from rekindle._src.core.records import IntArray
from rekindle._src.models.base import LoadedModel, merge
from rekindle._src.models.plain import PlainAttention
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from flax import nnx

    from rekindle._src.session.session import Session

WORST = 10  # tokens that are listed
EQUAL = 1e-6  # of a stage's root mean square, below which two stages count as equal


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TokenDifference(html.Record):
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
class ParityReport(html.Record):
    """The differences of log-probabilities between a session and a trainer's model, over all tokens but each first."""

    tokens: int
    largest: float  # absolute difference
    mean: float  # absolute difference
    first: str  # the part of the model where both begin to differ, such as "layers.3"; empty if no part does
    stages: tuple[
        tuple[str, float], ...
    ]  # each part: the largest difference behind it, over the root mean square there
    worst: tuple[TokenDifference, ...]  # the tokens that differ most
    differences: tuple[NDArray[np.float32], ...] = dataclasses.field(repr=False)  # of each text, token by token

    def __str__(self) -> str:
        where = f"they begin in {self.first}" if self.first else "none of its parts differs"
        return (
            f"log-probabilities of {html.count(self.tokens, 'token')} differ by {self.largest:.2g} at most and "
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


def parity(
    session: Session, model: LoadedModel | nnx.Module, texts: Sequence[str] | Sequence[Sequence[int]]
) -> ParityReport:
    """Compare a session's log-probabilities with those of a trainer's model, token by token.

    `model` is what the trainer differentiates: a module as `merge` returns it, or a loaded model. `texts` are strings
    or lists of at least two token ids. The session computes them as it computes prompts, in chunks over pages; the
    model in one piece, with plain attention. Both graphs are also run part by part in this plain form, which says where
    they begin to differ: in a layer, if weights or their format differ; in none, if what is left is the order in which
    the session's programs add. Texts are computed in full, so pass some pages, not a corpus.
    """
    from rekindle._src.session.session import client_of  # loading a model does not import sessions

    encode = session.tokenizer.encode
    sequences = [np.asarray(encode(text) if isinstance(text, str) else text, np.int32) for text in texts]
    for number, ids in enumerate(sequences):
        if ids.ndim != 1 or len(ids) < 2:
            raise InvalidRequest("texts", number, "has fewer than two tokens", "Pass longer texts")
    if not sequences:
        raise InvalidRequest("texts", [], "is empty", "Pass at least one text")
    theirs = _module(model)
    in_use = client_of(session).engine.resources.model
    if in_use is None or session.asleep:
        raise InvalidRequest("session", repr(session), "has no weights of its own now", "Use one that is awake")
    own: LoadedModel = in_use()
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
    x, tables = module.begin(tokens, jnp.arange(len(tokens)), jnp.full(len(tokens), len(tokens)))
    states = [x]
    for layer in module.layers:
        x = layer(x, tables, attend)
        states.append(x)
    hidden = module.end(x)
    return [state.astype(jnp.float32) for state in (*states, hidden)], module.logits(hidden)
