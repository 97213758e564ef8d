"""Attributions: how much each token, and each node inside the model, adds to a number after a prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.calls.call import Call
from rekindle._src.calls.prompts import PromptLike
from rekindle._src.capabilities.gradients.request import logprob
from rekindle._src.core import words
from rekindle._src.core.captured import Captured, Key, key_name
from rekindle._src.core.records import Completion
from rekindle._src.evaluation import attribution_picture
from rekindle.errors import InvalidRequest

FloatArray = NDArray[np.float32]


class NodeScore(NamedTuple):
    """One node, its score, and the change of the number if it alone is patched; None if that was not computed."""

    site: str
    layer: int | None
    position: int
    token: str
    head: int | None
    score: float
    exact: float | None = None

    @property
    def name(self) -> str:
        """The node in words: "layer 3, head 5, at ·Tom"."""
        where = "" if self.layer is None else f"layer {self.layer}, "
        what = self.site if self.head is None else f"{self.site} {self.head}"
        return f"{where}{what}, at {self.token!r} ({self.position})"


class EdgeScore(NamedTuple):
    """One edge, its score, and the change of the number if it alone is patched; None if that was not computed."""

    source: str
    target: str
    score: float
    exact: float | None = None


class EdgeScores(NamedTuple):
    """Scores of edges [sources, targets]: from what a node writes into the stream to what another one reads there."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    scores: FloatArray  # 0 where the source does not come before the target
    patched: tuple[EdgeScore, ...] = ()  # the edges that were patched, too

    def strongest(self, count: int = 10) -> list[EdgeScore]:
        """Return the edges with the largest sizes of scores, the largest first."""
        known = {(edge.source, edge.target): edge.exact for edge in self.patched}
        order = np.argsort(-np.abs(self.scores), axis=None, kind="stable")[: max(0, count)]
        pairs = (divmod(int(place), len(self.targets)) for place in order)
        return [
            EdgeScore(*names, float(self.scores[row, column]), known.get(names))
            for row, column in pairs
            for names in [(self.sources[row], self.targets[column])]
        ]


class Attribution(Captured):
    """How much each token and each node inside the model adds to a number: `a.scores`, `a["heads", 3]`.

    Scores of a site have a line for each token of the prompt, and a column for each head where the site has heads.
    The other properties are those of `Captured`.
    """

    __slots__ = ("edges", "method", "number", "other_value", "patched", "texts", "token_ids", "value")

    def __init__(
        self,
        method: str,
        number: str,
        value: float,
        other_value: float | None,
        token_ids: Sequence[int],
        texts: Sequence[str],
        arrays: Mapping[Key, FloatArray],
        layers: int,
        *,
        patched: Sequence[NodeScore] = (),
        edges: EdgeScores | None = None,
    ) -> None:
        super().__init__(np.arange(len(token_ids), dtype=np.int32), arrays, layers)
        self.method: str = method
        self.number: str = number  # that is attributed, in words
        self.value: float = value  # after the prompt
        self.other_value: float | None = other_value  # after the baseline, or the source; None: it was not computed
        self.token_ids: tuple[int, ...] = tuple(token_ids)
        self.texts: tuple[str, ...] = tuple(texts)
        self.patched: tuple[NodeScore, ...] = tuple(patched)  # the nodes that were patched, too
        self.edges: EdgeScores | None = edges

    @property
    def scores(self) -> FloatArray:
        """The score of each token's embedding [tokens]."""
        scores: FloatArray = self["embedding"]
        return scores

    @property
    def convergence(self) -> float | None:
        """The sum of the tokens' scores less the change of the number along the path.

        None for methods without this sum. More `steps` bring it nearer to 0.
        """
        if self.method != "integrated" or self.other_value is None:
            return None
        return float(self.scores.astype(np.float64).sum()) - (self.value - self.other_value)

    def map(self, site: str) -> FloatArray:
        """Return the scores of a site as [layers, heads], summed over tokens, or without heads as [layers, tokens].

        A layer without the site has zeros.
        """
        present = {key[1]: array for key, array in self.items() if isinstance(key, tuple) and key[0] == site}
        if not present:
            known = ", ".join(repr(name) for name in self.sites) or "none"
            raise InvalidRequest("site", site, "has no scores by layer", f"There are: {known}")
        lines = {layer: array.sum(axis=0) if array.ndim > 1 else array for layer, array in present.items()}
        result = np.zeros((self.layers, max(map(len, lines.values()))), np.float32)
        for layer, line in lines.items():
            result[layer, : len(line)] = line
        return result

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites with scores by layer."""
        return tuple(dict.fromkeys(key[0] for key in self if isinstance(key, tuple)))

    def strongest(self, count: int = 10) -> list[NodeScore]:
        """Return the nodes with the largest sizes of scores, the largest first. Tokens are among them."""
        nodes = [node for key in self for node in self._of(key, count)]
        known = {(each.site, each.layer, each.position, each.head): each.exact for each in self.patched}
        order = sorted(nodes, key=lambda node: -abs(node.score))[: max(0, count)]
        return [node._replace(exact=known.get((node.site, node.layer, node.position, node.head))) for node in order]

    def _of(self, key: Key, count: int) -> list[NodeScore]:
        array = self[key]
        site, layer = (key, None) if isinstance(key, str) else key
        found = []
        for place in np.argsort(-np.abs(array), axis=None, kind="stable")[: max(0, count)]:
            position, *rest = np.unravel_index(int(place), array.shape)
            head = int(rest[0]) if rest else None
            text = self.texts[int(position)]
            found.append(NodeScore(site, layer, int(position), text, head, float(array.flat[int(place)])))
        return found

    def save(self, path: str | Path) -> Path:
        """Write the text and the maps of the sites as an SVG file for a paper. Return its path."""
        return attribution_picture.save(self, path)

    def __repr__(self) -> str:
        sites = ", ".join(dict.fromkeys(key_name(key).partition(" ")[0] for key in self))
        return f"<Attribution of {self.number} = {self.value:.4g}: {words.count(len(self.texts), 'token')}, {sites}>"

    def _repr_html_(self) -> str:
        return str(attribution_picture.drawn(self))


class Attributes(Protocol):
    """The part of a session that the view uses."""

    @property
    def generate(self) -> Callable[..., Awaitable[Completion]]: ...
    @property
    def attribute(self) -> Callable[..., Awaitable[Attribution]]: ...


class AttributionCall(Call[Attribution]):
    """Await it for an `Attribution`."""

    _awaited = "await session.view.attribution(…)"

    def __init__(self, session: Attributes, prompt: PromptLike, of: object, options: Mapping[str, object]) -> None:
        self._session, self._prompt, self._of, self._options = session, prompt, of, options

    async def _result(self) -> Attribution:
        of = self._of
        if of is None:
            changes = {name: value for name, value in self._options.items() if name in ("steer", "patch")}
            done = await self._session.generate(self._prompt, max_tokens=1, temperature=0.0, **changes)
            if not done.token_ids:
                raise InvalidRequest("prompt", self._prompt, "has no next token", "Pass of=rekindle.logprob(token)")
            of = logprob(done.token_ids[0])
        return await self._session.attribute(self._prompt, of=of, **self._options)
