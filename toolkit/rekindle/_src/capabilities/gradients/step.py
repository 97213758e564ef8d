"""The programs of gradients: forward over a prompt or several, and back to the sites that they name.

Axes: T tokens with padding, R prompts, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from rekindle._src.capabilities.captures.tapped import INNER, Edit, TapFacts
from rekindle._src.capabilities.gradients.adapted import (
    AdapterArrays,
    AdapterShape,
    deltas_of,
    shape_digest,
    shape_of,
    shapes_of,
)
from rekindle._src.capabilities.gradients.request import (
    WITHOUT_LAYERS,
    ObjectiveFunction,
    Point,
    ResolvedObjective,
)
from rekindle._src.capabilities.gradients.seen import SeenRows, places_of, seeing, tokens_of
from rekindle._src.core.captured import Key
from rekindle._src.core.records import IntArray
from rekindle._src.models.base import Graph, Model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.differentiable import PassResult, at_points, differentiable, module_of, recomputing_pass
from rekindle._src.models.hooks import Listener
from rekindle._src.programs.user_functions import function_hash, problem_of
from rekindle.errors import InvalidRequest

SHORTEST = 16  # tokens of the smallest program
Tree = TypeVar("Tree")


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
    adapter: AdapterArrays  # empty without one
    seen: SeenRows | None = None  # of a prompt with pictures


class GradientOutputs(NamedTuple):
    """The number, and its gradient at each point by index."""

    value: Array
    gradients: dict[str, Array]


class GradientKey(NamedTuple):
    """Everything that decides on a program, in addition to the model."""

    size: int  # T
    points: tuple[Point, ...]
    places: tuple[int, ...]  # of the changes
    difference: bool
    function: ObjectiveFunction | None = None
    adapter: AdapterShape = ()
    levels: int = 0  # of pictures' rows; 0: the prompt has none

    @property
    def name(self) -> str:
        """Its name in the store."""
        of = "difference" if self.difference else "logprob"
        of = of if self.function is None else f"function {function_hash(self.function)}"
        sites = " ".join(f"{site}.{layer}" for site, layer in self.points)
        edits = f" changed {' '.join(map(str, self.places))}" if self.places else ""
        adapted = f" adapted {shape_digest(self.adapter)}" if self.adapter else ""
        seen = f" seeing {self.levels}" if self.levels else ""
        return f"gradient {of} {self.size} at {sites}{edits}{adapted}{seen}"

    def build(self, graph: Graph) -> Callable[[Sequence[Array], GradientArguments], GradientOutputs]:
        """Return the function of leaves and arguments."""
        return program_of(graph, self)

    def shapes(self, model: ModelConfig) -> GradientArguments:
        """Return the shapes of the arguments."""
        size, hidden = self.size, model.hidden_size
        edit = EditArrays(shape(np.float32, 3), shape(np.float32, size, hidden), shape(np.bool_, size))
        scalar, tokens, edits = shape(np.int32), shape(np.int32, size), (edit,) * len(self.places)
        rows = shape(np.float32, self.levels, size, hidden), shape(np.int32, size, 3), tokens
        seen = SeenRows(shape(np.bool_, size), *rows) if self.levels else None
        return GradientArguments(tokens, scalar, scalar, shape(np.int32, 2), edits, shapes_of(self.adapter), seen)


class BatchKey(NamedTuple):
    """Everything that decides on the program of several prompts' gradients, in addition to the model."""

    of: GradientKey
    rows: int  # R

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.rows} rows of {self.of.name}"

    def build(self, graph: Graph) -> Callable[[Sequence[Array], GradientArguments], GradientOutputs]:
        """Return the function of leaves and arguments [R, …]: numbers [R], and gradients [R, T, …]."""
        return program_of(graph, self.of, self.rows)

    def shapes(self, model: ModelConfig) -> GradientArguments:
        """Return the shapes of the arguments."""
        return _batched(self.of.shapes(model), lambda leaf: shape(leaf.dtype, self.rows, *leaf.shape))

    def arguments(self, prompts: Sequence[GradientPrompt]) -> GradientArguments:
        """Return the operands of at most R prompts; the first fills the rows that are left."""
        own = [prompt.arguments for prompt in prompts]
        rows = own + own[:1] * (self.rows - len(own))
        leaves = [jax.tree.leaves(each._replace(adapter={})) for each in rows]
        stacked = iter([np.stack(row) for row in zip(*leaves, strict=True)])
        return _batched(own[0], lambda leaf: next(stacked))


def _batched(arguments: GradientArguments, change: Callable[[Any], Any]) -> GradientArguments:
    """Return operands with each leaf changed, but the adapter's: all prompts share it."""
    changed: GradientArguments = jax.tree.map(change, arguments._replace(adapter={}))
    return changed._replace(adapter=arguments.adapter)


class GradientPrompt(NamedTuple):
    """A prompt that is checked, with all that a program needs to know of it."""

    facts: TapFacts
    tokens: IntArray
    objective: ResolvedObjective
    edits: tuple[Edit, ...]
    size: int  # T
    adapter: AdapterArrays  # empty without one
    seen: SeenRows | None = None

    def key(self, points: tuple[Point, ...]) -> GradientKey:
        """Return the key of the gradient at these points."""
        places, objective = tuple(edit.place for edit in self.edits), self.objective
        adapter = shape_of(self.adapter)
        levels = 0 if self.seen is None else len(self.seen.rows)
        return GradientKey(self.size, points, places, objective.difference, objective.function, adapter, levels)

    @property
    def arguments(self) -> GradientArguments:
        """The operands of a gradient."""
        own = arguments_of(self.tokens, self.objective, self.edits, self.facts.hidden_size, self.size)
        return own._replace(adapter=self.adapter, seen=self.seen)


def shape(dtype: DTypeLike, *sizes: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an operand."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def size_for(length: int, *, exact: bool) -> int:
    """Return the number of tokens of a program for a prompt; a function sees `exact` lengths, without padding."""
    return length if exact else max(SHORTEST, 1 << (length - 1).bit_length())


def arguments_of(
    tokens: IntArray, objective: ResolvedObjective, edits: Sequence[Edit], hidden_size: int, size: int
) -> GradientArguments:
    """Return the operands for a prompt, without an adapter."""
    length = len(tokens)
    padded = np.zeros(size, np.int32)
    padded[:length] = tokens
    return GradientArguments(
        padded,
        np.int32(length),
        np.int32(objective.position),
        np.asarray(objective.tokens, np.int32),
        tuple(_edit(edit, hidden_size, size) for edit in edits),
        {},
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


def listener_of(places: Sequence[int], edits: Sequence[EditArrays], layers: int) -> Listener:
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


def program_of(
    graph: Graph, key: GradientKey, rows: int | None = None
) -> Callable[[Sequence[Array], GradientArguments], GradientOutputs]:
    """Return a function that computes the number, and its gradient at each point by index.

    With `rows`, operands, numbers and gradients have a line for each of so many prompts.
    """
    wide = differentiable(graph)
    points = [at_points(point) for point in key.points]

    def compute(leaves: Sequence[Array], arguments: GradientArguments) -> GradientOutputs:
        module = module_of(wide, leaves, deltas_of(arguments.adapter))
        edits = arguments.edits if rows is None else tuple(map(_joined, arguments.edits))
        listener, tokens = listener_of(key.places, edits, len(module.layers)), arguments.tokens.reshape(-1)
        seen, model, places = arguments.seen, module.config, None
        if seen is not None:
            listener, tokens, places = seeing(seen, listener), tokens_of(seen, tokens, model), places_of(seen, model)

        def run(added: Mapping[Point, Array]) -> PassResult:
            return recomputing_pass(module, tokens, arguments.length, points, added, listener, rows or 1, places)

        def objective(added: Mapping[Point, Array]) -> tuple[Array, Array]:
            result = run(added)
            if rows is None:
                value = value_of(key, module, result, arguments)
                return value, value
            apart = _apart(result, rows)
            values = jax.vmap(
                lambda hidden, arrays, own: value_of(key, module, PassResult(hidden, arrays), own),
                in_axes=(0, 0, GradientArguments(0, 0, 0, 0, 0, None)),  # type: ignore[arg-type]
            )(apart.hidden, apart.arrays, arguments._replace(adapter={}))
            return values.sum(), values

        zeros = zeros_of(lambda: run({}).arrays)
        (_, value), gradients = jax.value_and_grad(objective, has_aux=True)(zeros)
        found = gradients if rows is None else _apart(gradients, rows)
        return GradientOutputs(value, {str(index): found[point] for index, point in enumerate(points)})

    return compute


def _joined(edit: EditArrays) -> EditArrays:
    """Return a change of several prompts [R, …] as one of their tokens [R · T, …]. They share its factors."""
    return EditArrays(edit.factors[0], edit.vectors.reshape(-1, edit.vectors.shape[-1]), edit.mask.reshape(-1))


def _apart(arrays: Tree, rows: int) -> Tree:
    """Return arrays [R · T, …] as [R, T, …]."""
    result: Tree = jax.tree.map(lambda array: array.reshape(rows, -1, *array.shape[1:]), arrays)
    return result


def zeros_of(arrays: Callable[[], Mapping[Point, Array]]) -> dict[Point, Array]:
    """Return zeros of the shapes of arrays, which are not computed."""
    return {point: jnp.zeros(each.shape, jnp.float32) for point, each in jax.eval_shape(arrays).items()}


def value_of(key: GradientKey, module: Model, result: PassResult, arguments: GradientArguments) -> Array:
    """Compute the number after a pass."""
    if key.function is not None:
        captures = {public_key(point): result.arrays[at_points(point)] for point in key.points}
        return _scalar(key.function, module.logits(result.hidden), captures)
    logits = module.logits(result.hidden[arguments.position][None])[0]
    first, second = logits[arguments.chosen[0]], logits[arguments.chosen[1]]
    return first - (second if key.difference else jax.nn.logsumexp(logits))


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
