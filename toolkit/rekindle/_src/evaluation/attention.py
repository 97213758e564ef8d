"""The weights of attention: computed from captured queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.calls.call import Call
from rekindle._src.calls.prompts import PromptLike
from rekindle._src.capabilities.captures.tapped import TapFacts
from rekindle._src.core import words
from rekindle._src.core.captured import Captured
from rekindle._src.core.positions import END, Layers, Positions, layer_of, runs_of
from rekindle._src.core.records import Completion
from rekindle._src.dispatch.backend import Front
from rekindle._src.evaluation import attention_picture
from rekindle._src.evaluation.lens import Generates, captured_of, facts_of
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from rekindle._src.notebook.figures import Figure

AT_ONCE = 1 << 25  # numbers of queries and keys of one request
MOST = 1 << 28  # weights of one result: 1 GiB


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionMap:
    """The weights of one layer's attention: how much each position reads of each other one."""

    tokens: tuple[str, ...]
    layer: int
    weights: NDArray[np.float32]  # [heads, positions that read, positions that are read]
    positions: NDArray[np.int32]  # that read

    def save(self, path: str | Path, *, head: int | None = None, first: bool = False) -> Path:
        """Write the maps of all heads, or of one `head` with its tokens, to an SVG file for a paper. Return its path.

        Position 0 is left out unless `first` is True: many heads rest there, and hide what else they read.
        """
        if head is not None:
            head = _head_of(head, len(self.weights))
        return attention_picture.save(self, path, head=head, first=first)

    def __repr__(self) -> str:
        heads, count, _ = self.weights.shape
        return f"<AttentionMap of layer {self.layer}: {words.count(heads, 'head')}, {words.count(count, 'position')}>"

    def _repr_html_(self) -> str:
        return _figure((self,)).saved()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return _figure((self,))._repr_mimebundle_(**options)


class AttentionMaps(Mapping[int, AttentionMap]):
    """The `AttentionMap` of several layers, by their numbers."""

    def __init__(self, maps: Sequence[AttentionMap]) -> None:
        self._maps = {each.layer: each for each in maps}

    def __getitem__(self, layer: int) -> AttentionMap:
        return self._maps[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def __repr__(self) -> str:
        heads, count, _ = next(iter(self.values())).weights.shape
        sizes = words.count(len(self), "layer"), words.count(heads, "head"), words.count(count, "position")
        return f"<AttentionMaps: {', '.join(sizes)}>"

    def _repr_html_(self) -> str:
        return _figure(tuple(self.values())).saved()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return _figure(tuple(self.values()))._repr_mimebundle_(**options)


def _figure(maps: Sequence[AttentionMap]) -> Figure:
    from rekindle._src.notebook.figures import Figure

    return Figure("attention", *attention_picture.figure(maps))


def _head_of(head: Any, heads: int) -> int:
    if isinstance(head, bool) or not isinstance(head, int) or not -heads <= head < heads:
        raise InvalidRequest("head", head, f"is not among the layer's {heads} heads", f"Use 0 to {heads - 1}")
    return head % heads


class AttentionMapsCall(Call[AttentionMaps]):
    """Await it for an `AttentionMaps`."""

    _awaited = "await session.view.attention(…)"

    def __init__(
        self,
        session: Generates,
        front: Front,
        prompt: PromptLike,
        layers: Layers,
        positions: Positions,
        options: Mapping[str, object],
    ) -> None:
        self._session, self._prompt, self._options = session, prompt, options
        self._front, self._layers, self._positions = front, layers, positions

    async def _result(self) -> AttentionMaps:
        facts = facts_of(self._front)
        layers = _layers_of(self._layers, facts)
        runs_of("positions", self._positions, None)
        first = await self._maps(facts, layers[:1])
        weights = first[0].weights
        if weights.size * len(layers) > MOST:
            needed, fix = weights.nbytes * len(layers) / 2**30, "Name fewer layers, or the positions that read"
            raise InvalidRequest("layer", self._layers, f"needs {needed:.1f} GiB of weights, at most 1 are made", fix)
        each = max(1, AT_ONCE // max(1, 2 * len(first[0].tokens) * facts.hidden_size))
        maps = [*first]
        for start in range(1, len(layers), each):
            maps += await self._maps(facts, layers[start : start + each])
        return AttentionMaps(maps)

    async def _maps(self, facts: TapFacts, layers: Sequence[int]) -> list[AttentionMap]:
        sites = {"q": list(layers), "k": list(layers)}
        done, captured = await captured_of(self._session, self._prompt, sites, None, self._options)
        reading = _positions_in(self._positions, len(captured["q", layers[0]]))
        return [
            AttentionMap(done.prompt_texts, layer, _weights(facts, layer, done, captured, reading), reading)
            for layer in layers
        ]


class AttentionMapCall(Call[AttentionMap]):
    """Await it for an `AttentionMap`."""

    _awaited = "await session.view.attention(…, layer=…)"

    def __init__(
        self,
        session: Generates,
        front: Front,
        prompt: PromptLike,
        layer: int,
        positions: Positions,
        options: Mapping[str, object],
    ) -> None:
        self._maps = AttentionMapsCall(session, front, prompt, layer, positions, options)

    async def _result(self) -> AttentionMap:
        (one,) = (await self._maps._result()).values()
        return one


def _layers_of(layers: Layers, facts: TapFacts) -> list[int]:
    """Return the layers' numbers; "all" means all with weights to compute. Others are refused by name."""
    if isinstance(layers, str) and layers == "all":
        numbers = [layer for layer, spec in enumerate(facts.attention) if spec is not None]
        if not numbers:
            raise InvalidRequest("layer", layers, "has no layer with weights to show", "Use session.view.lens")
        return numbers
    several = [layers] if hasattr(layers, "__index__") or isinstance(layers, str) else layers
    numbers = sorted({layer_of("layer", layer, facts.layers) for layer in several})
    if not numbers:
        raise InvalidRequest("layer", layers, "names no layer", 'Pass an int, several, or "all"')
    for layer in numbers:
        if facts.attention[layer] is None:
            raise InvalidRequest("layer", layer, "has attention without weights to show", "Show another layer")
    return numbers


def _weights(
    facts: TapFacts, layer: int, done: Completion, captured: Captured, reading: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Return the weights [heads, positions that read, positions that are read] from captured queries and keys."""
    spec = facts.attention[layer]
    assert spec is not None, "others are refused by name"
    q, k = captured["q", layer], captured["k", layer]
    count, heads, groups = len(q), q.shape[1], q.shape[1] // k.shape[1]
    scores = np.einsum("ihd,jhd->hij", q[reading], np.repeat(k, groups, axis=1)) * spec.scale
    if spec.soft_cap is not None:
        scores = np.tanh(scores / spec.soft_cap) * spec.soft_cap
    limits = np.arange(1, count + 1)
    for start, stop in done.image_runs if layer in facts.both_ways else ():
        limits[start:stop] = stop
    seen = np.arange(count) < limits[reading][:, None]
    seen &= reading[:, None] - np.arange(count) < (spec.sliding_window or count)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    assert weights.shape == (heads, len(reading), count)
    return weights.astype(np.float32)


def _positions_in(positions: Positions, count: int) -> NDArray[np.int32]:
    """Return positions of a prompt as numbers. Raise `InvalidRequest` for one past its end."""
    every, runs = np.arange(count, dtype=np.int32), runs_of("positions", positions, count)
    for start, stop in runs:
        if stop > count and stop != END:
            problem = f"has a position after the prompt, which has {count} tokens"
            raise InvalidRequest("positions", (start, stop), problem, f"Use positions below {count}")
    return np.concatenate([every[:0], *(every[start:stop] for start, stop in runs)])
