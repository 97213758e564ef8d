"""Attributions of an open session: gradients along a path between two inputs, weighted and multiplied by the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rekindle._src.calls.prompts import PromptLike
from rekindle._src.capabilities.captures.tapped import TapFacts
from rekindle._src.capabilities.gradients.corrections import HeadArrays, corrected
from rekindle._src.capabilities.gradients.edges import EdgeKey, EdgeOutputs, EdgePatchKey, EdgeTable, edge_arguments
from rekindle._src.capabilities.gradients.paths import (
    PatchKey,
    PathKey,
    PathOutputs,
    patch_arguments,
    path_arguments,
    rows_for,
)
from rekindle._src.capabilities.gradients.request import Point, points_of, token_of
from rekindle._src.capabilities.gradients.step import GradientPrompt, public_key
from rekindle._src.core.captured import Captured, Key
from rekindle._src.core.records import IntArray
from rekindle._src.core.taps import SteerLike
from rekindle._src.evaluation.attribution import Attribution, EdgeScore, EdgeScores, FloatArray, NodeScore
from rekindle._src.session.client import Client
from rekindle._src.session.gradients import computed, owner_of, prepared
from rekindle.errors import InvalidRequest

AttributionMethod = Literal["gradient_x_input", "integrated", "patching", "atp_star"]
METHODS: tuple[AttributionMethod, ...] = ("gradient_x_input", "integrated", "patching", "atp_star")
PATCHING = ("patching", "atp_star")
ZEROS = "zeros"  # a baseline
STEPS = 32  # of an integral, by default
MOST_STEPS = 512
MOST_PATCHES = 4096  # of one call


class AttributionOptions(NamedTuple):
    """The options of `Session.attribute` in addition to the prompt."""

    of: object
    method: str = "gradient_x_input"
    steps: int | None = None
    baseline: str | int | None = None
    source: PromptLike | None = None
    at: Mapping[str, object] | None = None
    exact: int | Literal["all"] = 0
    edges: bool = False
    steer: SteerLike | Sequence[SteerLike] = ()
    patch: Captured | None = None
    adapter: str | Mapping[str, float] | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for values and combinations that have no meaning."""
        if self.method not in METHODS:
            known = ", ".join(map(repr, METHODS))
            raise InvalidRequest("method", self.method, "is not a method of attribution", f"Use one of {known}")
        patches = self.method in PATCHING
        if patches and self.source is None:
            fix = "Pass source=…, a prompt of as many tokens whose arrays are put in"
            raise InvalidRequest("source", None, f"is missing, and method={self.method!r} patches from it", fix)
        if not patches and self.source is not None:
            raise InvalidRequest("source", self.source, "is for patching", "Use method='patching', or leave it out")
        if self.baseline is not None and self.method != "integrated":
            raise InvalidRequest("baseline", self.baseline, "is for integrated gradients", "Leave it out")
        if not patches and self.exact:
            raise InvalidRequest("exact", self.exact, "patches nodes from a source", "Use method='patching'")
        if self.exact != "all" and (
            isinstance(self.exact, bool) or not isinstance(self.exact, int) or not 0 <= self.exact <= MOST_PATCHES
        ):
            fix = f"Pass a number from 0 to {MOST_PATCHES}, or 'all'"
            raise InvalidRequest("exact", self.exact, "is not a number of nodes", fix)
        if not isinstance(self.edges, bool):
            raise InvalidRequest("edges", self.edges, "must be True or False", "Pass edges=True")
        if self.edges and self.method != "patching":
            raise InvalidRequest("edges", True, "are patched from a source", "Use method='patching'")
        if self.edges and (self.patch is not None or self.steer not in ((), [])):
            raise InvalidRequest("edges", True, "are those of a model without changes", "Leave out steer and patch")
        if self.steps is None:
            return
        if self.method not in ("integrated", "patching"):
            raise InvalidRequest("steps", self.steps, f"has no meaning for method={self.method!r}", "Leave it out")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 1 <= self.steps <= MOST_STEPS:
            fix = f"Pass a number from 1 to {MOST_STEPS}"
            raise InvalidRequest("steps", self.steps, "is not a number of steps", fix)


class _PathPlace(NamedTuple):
    """The number at a place on the path, with gradients and arrays by point."""

    value: float
    gradients: dict[Point, FloatArray]
    arrays: dict[Point, FloatArray]


class _Path:
    """The path from another input to a prompt, and programs along it."""

    def __init__(
        self, client: Client, prompt: GradientPrompt, other: IntArray | None, points: tuple[Point, ...]
    ) -> None:
        self.client, self.prompt, self.other, self.points = client, prompt, other, points
        self.key = prompt.key(points)

    async def places(
        self,
        shares: Sequence[float],
        take: Callable[[int, _PathPlace], None],
        dropped: Sequence[int] = (),
        *,
        ends: bool = False,
    ) -> None:
        """Compute places on the path, as many at a time as a program has rows, and call `take` with each in order."""
        rows = min(len(shares), rows_for(self.prompt.size))
        dropped = dropped or [-1] * len(shares)
        key, length = PathKey(self.key, rows, ends), len(self.prompt.tokens)

        def taken(outputs: PathOutputs) -> list[_PathPlace]:
            gradients, arrays = (
                {index: np.array(array[:, :length]) for index, array in each.items()}
                for each in (outputs.gradients, outputs.arrays)
            )
            return [
                _PathPlace(float(value), self._by_point(gradients, row), self._by_point(arrays, row))
                for row, value in enumerate(np.asarray(outputs.values))
            ]

        for start in range(0, len(shares), rows):
            count = min(rows, len(shares) - start)
            own = [*shares[start : start + count], *[1.0] * (rows - count)]
            layers = [*dropped[start : start + count], *[-1] * (rows - count)]
            arguments = path_arguments(self.prompt, self.other, own, layers)
            found = await computed(self.client, key, arguments, taken)
            for index in range(count):
                take(start + index, found[index])

    def _by_point(self, arrays: Mapping[str, FloatArray], row: int) -> dict[Point, FloatArray]:
        return {point: arrays[str(index)][row] for index, point in enumerate(self.points) if arrays}

    async def mean(self, steps: int) -> dict[Point, FloatArray]:
        """Return the gradients' integral over the path by Gauss and Legendre's rule."""
        places, weights = np.polynomial.legendre.leggauss(steps)
        total: dict[Point, NDArray[np.float64]] = {}

        def add(index: int, place: _PathPlace) -> None:
            for point, gradient in place.gradients.items():
                total[point] = total.get(point, np.zeros(1)) + weights[index] / 2 * gradient

        await self.places(((1 + places) / 2).tolist(), add)
        return {point: each.astype(np.float32) for point, each in total.items()}


async def attribute(client: Client, prompt: PromptLike, options: AttributionOptions) -> Attribution:
    """Compute an attribution; see `Session.attribute`."""
    options.check()
    base = prepared(client, prompt, options.of, options.steer, options.patch, options.adapter)
    points = _points(options, base.facts)
    path = _Path(client, base, _other(client, base, options), points)
    method, number = options.method, getattr(options.of, "__name__", None) or repr(options.of)
    ends: list[_PathPlace] = []
    await path.places([1.0, 0.0], lambda index, place: ends.append(place), ends=True)
    first, second = ends
    change = {point: first.arrays[point] - second.arrays[point] for point in points}
    if method in PATCHING:
        change = {point: -each for point, each in change.items()}
    elif method == "gradient_x_input":
        change = first.arrays
    if method == "atp_star":
        scores = await _starred(path, change, first, second)
    else:
        steps = options.steps or (STEPS if method == "integrated" else 0)
        slopes = await path.mean(steps) if steps else first.gradients
        scores = {point: _score(change[point], slopes[point]) for point in points}
    arrays: dict[Key, FloatArray] = {public_key(point): scores[point] for point in points}
    tokens = [int(token) for token in base.tokens]
    known = {token: client.text([token]) or f"[{token}]" for token in {*tokens}}
    other_value = None if method == "gradient_x_input" else second.value
    result = Attribution(
        method, number, first.value, other_value, tokens, [known[token] for token in tokens], arrays, base.facts.layers
    )
    if options.exact:
        assert path.other is not None, "patches come from a source"
        count = options.exact if options.exact != "all" else sum(array.size for array in arrays.values())
        result.patched = await _patched(path, result, count)
    if options.edges:
        result.edges = await _edges(path, options, result.value)
    return result


def _points(options: AttributionOptions, facts: TapFacts) -> tuple[Point, ...]:
    """Return the points of an attribution, the embeddings first."""
    starred, at = options.method == "atp_star", options.at
    if at is None:
        sites = ("q", "k", "v", "heads", "mlp") if starred else ("heads", "mlp")
        at = {site: "all" for site in sites if facts.sites.get("q" if site == "heads" else site)}
    points = points_of({"embedding": True, **at}, facts)
    if not starred:
        return points
    layers = [layer for site, layer in points if site in ("q", "k")]
    for layer in layers:
        if facts.attention[layer] is None or any(layer not in facts.sites.get(site, ()) for site in ("k", "v")):
            fix = "Name other layers in at=…, or use method='patching'"
            raise InvalidRequest("at", {"q": layer}, "has attention whose weights can't be computed again", fix)
    needed = [(site, layer) for layer in layers for site in ("q", "k", "v", "heads")]
    return tuple(dict.fromkeys((*points, *needed)))


def _other(client: Client, base: GradientPrompt, options: AttributionOptions) -> IntArray | None:
    """Return the tokens at the path's other end; None for embeddings of zeros.

    Zeros are no good beginning for models that norm their input: all of the change is near 0 on the path.
    """
    if options.source is not None:
        tokens = client.keyed_request(options.source).token_ids
        if len(tokens) != len(base.tokens):
            problem = f"has {len(tokens)} tokens, and the prompt {len(base.tokens)}"
            fix = "Pass prompts of as many tokens; names and words of one token each keep the places alike"
            raise InvalidRequest("source", options.source, problem, fix)
        if tokens.max(initial=0) >= client.front.vocab_size:
            fix = f"Pass ids below {client.front.vocab_size}"
            raise InvalidRequest("source", int(tokens.max()), "is not a token id", fix)
        return tokens
    ends = client.front.tokenizer.eos_ids
    if options.method == "gradient_x_input" or options.baseline == ZEROS or (options.baseline is None and not ends):
        return None
    if options.baseline is None:
        return np.full(len(base.tokens), min(ends), np.int32)
    token = token_of("baseline", options.baseline, client.front.vocab_size, client.front.tokenizer)
    return np.full(len(base.tokens), token, np.int32)


def _score(change: FloatArray, slope: FloatArray) -> FloatArray:
    scores: FloatArray = np.einsum("...e,...e->...", change, slope, dtype=np.float64).astype(np.float32)
    return scores


async def _starred(
    path: _Path, change: Mapping[Point, FloatArray], base: _PathPlace, source: _PathPlace
) -> dict[Point, FloatArray]:
    """Return the scores of AtP*: sizes as means over dropped layers, with the signs of the plain estimates."""
    layers = path.prompt.facts.layers
    plain = _corrected(path, change, base, source, base.gradients)
    total = {point: np.zeros(scores.shape) for point, scores in plain.items()}

    def add(dropped: int, place: _PathPlace) -> None:
        for point, scores in _corrected(path, change, base, source, place.gradients).items():
            if point[1] != dropped or point[0] == "embedding":
                total[point] += np.abs(scores)

    await path.places([1.0] * layers, add, range(layers))
    others = {point: layers if point[0] == "embedding" else max(1, layers - 1) for point in total}
    return {point: (np.sign(plain[point]) * total[point] / others[point]).astype(np.float32) for point in total}


def _corrected(
    path: _Path,
    change: Mapping[Point, FloatArray],
    base: _PathPlace,
    source: _PathPlace,
    gradients: Mapping[Point, FloatArray],
) -> dict[Point, FloatArray]:
    """Return estimates by these gradients; for queries and keys, the softmax is computed again."""
    scores = {point: _score(change[point], gradients[point]) for point in path.points}
    for layer in dict.fromkeys(layer for site, layer in path.points if site in ("q", "k")):
        spec = path.prompt.facts.attention[layer]
        assert spec is not None, "others are refused"
        q, k, v = (base.arrays[site, layer] for site in ("q", "k", "v"))
        arrays = HeadArrays(q, k, v, gradients["heads", layer])
        own = corrected(arrays, {site: source.arrays[site, layer] for site in ("q", "k")}, spec)
        scores |= {(site, layer): each for site, each in own.items() if (site, layer) in scores}
    return scores


async def _patched(path: _Path, result: Attribution, count: int) -> tuple[NodeScore, ...]:
    """Return the strongest nodes with the exact change of the number when each alone is patched."""
    if count > MOST_PATCHES:
        problem = f"are {count:,} nodes, over {MOST_PATCHES:,}"
        raise InvalidRequest("exact", "all", problem, "Pass a number of the strongest, or fewer sites in at=…")
    nodes = result.strongest(count)
    key = PatchKey(path.key)
    index = {public_key(point): place for place, point in enumerate(path.points)}
    rows: list[list[int]] = []
    for node in nodes:
        point = index[node.site if node.layer is None else (node.site, node.layer)]
        rows.append([point, node.position, -1 if node.head is None else node.head])
    assert path.other is not None, "patches come from a source"
    values: list[float] = []
    for part in _parts(rows, key.rows):
        arguments = patch_arguments(path.prompt, path.other, part)
        values += await computed(path.client, key, arguments, _numbers)
    changes = (value - result.value for value in values)
    return tuple(node._replace(exact=change) for node, change in zip(nodes, changes, strict=False))


async def _edges(path: _Path, options: AttributionOptions, value: float) -> EdgeScores:
    """Return the scores of all edges, and the exact changes of the strongest."""
    prompt, client, other = path.prompt, path.client, path.other
    assert other is not None, "patches come from a source"
    graph, key = client.engine.device.model.graph, prompt.key(path.points)
    if any(leaf.endswith(".scalar") for leaf in graph.paths):
        raise InvalidRequest("edges", True, "have no meaning where layers multiply the stream", "Leave it out")
    table = EdgeTable.of(graph.config, prompt.facts)
    owner_of(client).check_edges(prompt.size, *table.widths)
    before = table.reaches()
    reachable = int(before.sum())
    count = reachable if options.exact == "all" else min(options.exact, reachable)
    if count > MOST_PATCHES:
        problem = f"are {count:,} edges, over {MOST_PATCHES:,}"
        raise InvalidRequest("exact", "all", problem, "Pass a number of the strongest")
    places, weights = np.polynomial.legendre.leggauss(options.steps) if options.steps else ([1.0], [2.0])
    none, total = np.zeros((0, 2), np.int32), np.zeros(table.widths)

    def taken(outputs: EdgeOutputs) -> FloatArray:
        return np.array(outputs.scores)

    for place, weight in zip(places, weights, strict=True):
        arguments = edge_arguments(prompt, other, (1 + float(place)) / 2, none)
        total += weight / 2 * await computed(client, EdgeKey(key, table), arguments, taken)
    names = [tuple(name for nodes in side for name in nodes.names) for side in table]
    scores = EdgeScores(names[0], names[1], total.astype(np.float32))
    order = np.argsort(-np.where(before, np.abs(total), -1.0), axis=None, kind="stable")[:count]
    chosen = [divmod(int(edge), total.shape[1]) for edge in order]
    patches, values = EdgePatchKey(key, table), list[float]()
    for part in _parts(chosen, patches.rows, 2):
        values += await computed(client, patches, edge_arguments(prompt, other, 1.0, part), _numbers)
    patched = [
        EdgeScore(names[0][row], names[1][column], float(scores.scores[row, column]), exact - value)
        for (row, column), exact in zip(chosen, values, strict=False)
    ]
    return scores._replace(patched=tuple(patched))


def _parts(rows: Sequence[Sequence[int]], size: int, width: int = 3) -> Iterator[IntArray]:
    """Yield rows in parts of one size; the last has rows of no node, or no edge, at its end."""
    for start in range(0, len(rows), size):
        part = np.full((size, width), -1, np.int32)
        own = rows[start : start + size]
        part[: len(own)] = own
        yield part


def _numbers(values: jax.Array) -> list[float]:
    return [float(value) for value in np.asarray(values)]
