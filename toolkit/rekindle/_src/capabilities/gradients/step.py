"""The program of a gradient: forward over one prompt, and back to the sites that it names.

Axes: T tokens with padding, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rekindle._src.capabilities.captures.tapped import INNER, Edit
from rekindle._src.capabilities.gradients.request import (
    WITHOUT_LAYERS,
    ObjectiveFunction,
    Point,
    ResolvedObjective,
)
from rekindle._src.core.captured import Key
from rekindle._src.core.records import IntArray
from rekindle._src.models.base import Graph
from rekindle._src.models.differentiable import at_points, differentiable, module_of, recomputing_pass
from rekindle._src.models.hooks import Listener
from rekindle._src.programs.user_functions import function_hash, problem_of
from rekindle.errors import InvalidRequest

SHORTEST = 16  # tokens of the smallest program


class EditArrays(NamedTuple):
    """The numbers of one change: x becomes a · x + b · v + c · (x · v) · v where `mask` is true."""

    factors: Any  # [3]
    vectors: Any  # [T, E]
    mask: Any  # [T]


class GradientArguments(NamedTuple):
    """The operands of a program, in addition to the weights."""

    tokens: Any  # int32 [T]
    length: Any  # int32
    position: Any  # int32
    chosen: Any  # int32 [2]
    edits: tuple[EditArrays, ...]


class GradientKey(NamedTuple):
    """Everything that decides on a program, in addition to the model."""

    size: int  # T
    points: tuple[Point, ...]
    places: tuple[int, ...]  # of the changes
    difference: bool
    function: ObjectiveFunction | None = None

    @property
    def name(self) -> str:
        """Its name in the store."""
        of = "difference" if self.difference else "logprob"
        of = of if self.function is None else f"function {function_hash(self.function)}"
        sites = " ".join(f"{site}.{layer}" for site, layer in self.points)
        edits = f" changed {' '.join(map(str, self.places))}" if self.places else ""
        return f"gradient {of} {self.size} at {sites}{edits}"


def size_for(length: int, *, exact: bool) -> int:
    """Return the number of tokens of a program for a prompt; a function sees `exact` lengths, without padding."""
    return length if exact else max(SHORTEST, 1 << (length - 1).bit_length())


def arguments_of(
    tokens: IntArray, objective: ResolvedObjective, edits: Sequence[Edit], hidden_size: int, size: int
) -> GradientArguments:
    """Return the operands for a prompt."""
    length = len(tokens)
    padded = np.zeros(size, np.int32)
    padded[:length] = tokens
    return GradientArguments(
        padded,
        np.int32(length),
        np.int32(objective.position),
        np.asarray(objective.tokens, np.int32),
        tuple(_edit(edit, hidden_size, size) for edit in edits),
    )


def _edit(edit: Edit, hidden_size: int, size: int) -> EditArrays:
    vectors, mask = np.zeros((size, hidden_size), np.float32), np.zeros(size, bool)
    row = 0
    for start, stop in edit.runs:
        inside = slice(min(start, size), min(stop, size))
        count = inside.stop - inside.start
        mask[inside] = True
        vectors[inside] = edit.vectors[row : row + count] if edit.each else edit.vectors
        row += stop - start if edit.each else 0
    return EditArrays(np.asarray(edit.factors, np.float32), vectors, mask)


def _listener(places: Sequence[int], edits: Sequence[EditArrays], layers: int) -> Listener:
    """Return the listener that makes the changes of a request."""

    def at(site: str, layer: int) -> Callable[[Array], Array] | None:
        if site in INNER:
            place = layers + 1 + len(INNER) * layer + INNER.index(site)
        else:
            place = {"residual_before": 0, "residual": layer + 1}.get(site, -1)
        mine = [edit for own, edit in zip(places, edits, strict=True) if own == place]
        if not mine:
            return None

        def change(x: Array) -> Array:
            for factors, vectors, mask in mine:
                along = jnp.sum(x * vectors, axis=-1, keepdims=True)
                changed = factors[0] * x + factors[1] * vectors + factors[2] * along * vectors
                x = jnp.where(mask[:, None], changed, x).astype(x.dtype)
            return x

        return change

    return at


def public_key(point: Point) -> Key:
    """Return the key of a point in results: sites without layers are named alone."""
    return point[0] if point[0] in WITHOUT_LAYERS else point


def program_of(graph: Graph, key: GradientKey) -> Callable[..., tuple[Array, dict[str, Array]]]:
    """Return a function of leaves and arguments that computes the number, and its gradient at each point by index."""
    wide = differentiable(graph)
    points = [at_points(point) for point in key.points]

    def compute(leaves: Sequence[Array], arguments: GradientArguments) -> tuple[Array, dict[str, Array]]:
        module = module_of(wide, leaves)
        listener = _listener(key.places, arguments.edits, len(module.layers))

        def run(added: Mapping[Point, Array]) -> Any:
            return recomputing_pass(module, arguments.tokens, arguments.length, points, added, listener)

        def objective(added: Mapping[Point, Array]) -> Array:
            hidden, arrays = run(added)
            if key.function is not None:
                captures = {public_key(one): arrays[point] for one, point in zip(key.points, points, strict=True)}
                return _scalar(key.function, module.logits(hidden), captures)
            logits = module.logits(hidden[arguments.position][None])[0]
            first, second = logits[arguments.chosen[0]], logits[arguments.chosen[1]]
            return first - (second if key.difference else jax.nn.logsumexp(logits))

        shapes = jax.eval_shape(lambda: run({}).arrays)
        zeros = {point: jnp.zeros(shape.shape, jnp.float32) for point, shape in shapes.items()}
        value, gradients = jax.value_and_grad(objective)(zeros)
        return value, {str(index): gradients[point] for index, point in enumerate(points)}

    return compute


def _scalar(function: ObjectiveFunction, logits: Array, captures: Mapping[Any, Array]) -> Array:
    """Call a user's function. Raise `InvalidRequest` if it raises, or returns anything but one float."""
    try:
        value = jnp.asarray(function(logits, captures))
    except Exception as error:
        problem = problem_of(function, error, f"for logits {list(logits.shape)}")
        raise InvalidRequest("of", function, problem, "Pass a pure JAX function of logits and captures") from error
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        problem = f"returned {value.dtype} {list(value.shape)}"
        raise InvalidRequest("of", function, problem, "Return one float, such as logits[-1, 5] - logits[-1, 6]")
    return value.astype(jnp.float32)
