"""A plain loop over a model that shows the numbers inside it, with and without changes of the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rekindle._src.models.base import Graph, LoadedModel, merge
from rekindle._src.models.nn.forward import ForwardPass
from workshop import reference

LENGTH = 96  # tokens at most: one compiled program for all sequences of a model and a change
Change = Callable[[int, jax.Array, jax.Array], jax.Array]  # of the stream at a place, [T, E], and positions [T]


class Inside(NamedTuple):
    """The numbers inside a model, each a line for each position."""

    stream: NDArray[np.float32]  # [layers + 1, T, E]: before the first layer, and after each
    norm: NDArray[np.float32]
    logits: NDArray[np.float32]
    attended: dict[str, dict[int, NDArray[np.float32]]]  # q, k and v by layer

    def of(self, key: Any) -> NDArray[np.float32]:
        """Return the value of a key of `capture`, of the sites that lie between modules."""
        if key == "norm":
            return self.norm
        site, layer = key
        if site in self.attended:
            return self.attended[site][layer]
        return self.stream[layer + (site == "residual")]


def _nothing(place: int, x: jax.Array, positions: jax.Array) -> jax.Array:
    return x


class Plain:
    """A model without the engine: whole sequences from their first token on, with a change of the residual stream."""

    _programs: ClassVar[dict[tuple[Graph, Change], Any]] = {}  # models that differ in their weights share one

    def __init__(self, model: LoadedModel, change: Change = _nothing) -> None:
        self._model = model

        def forward(leaves: Sequence[Any], tokens: jax.Array) -> Any:
            network = merge(model.graph, leaves)
            positions, kept = jnp.arange(LENGTH), {"q": {}, "k": {}, "v": {}}  # type: ignore[var-annotated]
            cache = reference.DenseCache(model.config, reference.empty_cache(model, LENGTH), jnp.int32(0), LENGTH)

            def attend(layer: int, *qkv: jax.Array) -> jax.Array:
                for site, array in zip("qkv", qkv, strict=False):
                    kept[site][layer] = array
                return cache(layer, *qkv)

            attend.recur = cache.recur  # type: ignore[attr-defined]
            x, tables = network.begin(tokens, positions, None)
            stream = [change(0, x, positions)]
            for number, layer in enumerate(network.layers):
                step = ForwardPass(tables, attend).of(number)
                stream.append(change(number + 1, layer(stream[-1], step), positions))
            norm = network.end(stream[-1])
            return jnp.stack(stream), norm, network.logits(norm), kept

        self._forward = self._programs.setdefault((model.graph, change), jax.jit(forward))

    def inside(self, tokens: Sequence[int]) -> Inside:
        """The numbers at each of the tokens."""
        count = len(tokens)
        padded = jnp.asarray([*tokens, *[0] * (LENGTH - count)], jnp.int32)
        stream, norm, logits, kept = jax.tree.map(np.asarray, self._forward(self._model.leaves, padded))
        return Inside(
            stream[:, :count],
            norm[:count],
            logits[:count],
            {site: {layer: array[:count] for layer, array in arrays.items()} for site, arrays in kept.items()},
        )

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the greedy tokens after a prompt."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(np.argmax(self.inside(tokens).logits[-1])))
        return tokens[len(prompt) :]


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the largest difference, in standard deviations of the expected values."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.abs(found - expected).max() / expected.std())


def relative(found: Any, expected: Any) -> float:
    """Return the largest difference, compared with the largest number."""
    expected = np.asarray(expected)
    scale = float(np.abs(expected).max())
    assert scale > 0
    return float(np.abs(np.asarray(found) - expected).max()) / scale
