"""The logit lens: the next token as predicted after each layer of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.calls.call import Call
from rekindle._src.calls.prompts import PromptLike
from rekindle._src.capabilities.captures.request import TAPS
from rekindle._src.capabilities.captures.tapped import TapFacts
from rekindle._src.core import words
from rekindle._src.core.captured import Captured
from rekindle._src.core.names import checked_path
from rekindle._src.core.positions import Positions
from rekindle._src.core.records import Completion
from rekindle._src.core.taps import Capture
from rekindle._src.dispatch.backend import Front
from rekindle._src.views import html, style, svg
from rekindle._src.views.html import Markup
from rekindle._src.views.labels import visible
from rekindle.errors import InvalidRequest

TOP = 5  # tokens of a position that hovering shows
BLOCK = 64  # logits; the largest of a block is looked at first
AT_ONCE = 1 << 25  # logits of one request
SHOWN = 40  # positions of a picture


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lens:
    """The logit lens: the most likely next tokens of each position, layer by layer.

    A layer's residual stream goes through the final norm and the head as if no layer followed.
    """

    tokens: tuple[str, ...]  # of the positions
    positions: NDArray[np.int32]
    layers: tuple[str, ...]  # names
    texts: tuple[tuple[tuple[str, ...], ...], ...]  # [layers][positions][most likely first]
    token_ids: NDArray[np.int32]  # the same as ids
    probabilities: NDArray[np.float32]  # of them
    entropies: NDArray[np.float32]  # [layers, positions], in bits: 0 is certain

    def save(self, path: str | Path, *, positions: int = SHOWN) -> Path:
        """Write the picture of the last `positions`, at most so many, to an SVG file for a paper. Return its path."""
        if isinstance(positions, bool) or not isinstance(positions, int) or positions < 1:
            raise InvalidRequest("positions", positions, "is not a number of positions", "Use 1 or more")
        target = checked_path("path", path)
        columns = range(max(0, len(self.tokens) - positions), len(self.tokens))
        width, height, parts = _paper(self, columns)
        target.write_text(svg.document(width, height, parts, title="Logit lens"), encoding="utf-8")
        return target

    def rank(self, layer: int, place: int) -> int | None:
        """Return the rank of the answer, the last layer's likeliest token, after a layer; None beyond the likeliest."""
        ranks = self.token_ids[layer, place].tolist()
        answer = int(self.token_ids[-1, place, 0])
        return ranks.index(answer) if answer in ranks else None

    def leads_from(self, place: int) -> int:
        """Return the first layer from which the answer stays the likeliest token."""
        layer = len(self.texts) - 1
        while layer and self.rank(layer - 1, place) == 0:
            layer -= 1
        return layer

    def __repr__(self) -> str:
        return f"<Lens: {words.count(len(self.texts), 'layer')}, {words.count(len(self.tokens), 'position')}>"

    def _repr_html_(self) -> str:
        first = max(0, len(self.tokens) - SHOWN)
        columns = range(first, len(self.tokens))
        heads = ["", "entropy, bits", *(visible(self.tokens[place]) for place in columns)]
        head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(text)}</th>' for text in heads)
        means = _means(self.entropies, columns)
        rows = []
        for layer in range(len(self.texts) - 1, -1, -1):
            cells = "".join(self._cell(layer, place) for place in columns)
            name = f'<th scope="row" style="{_CELL};font-weight:400">{html.escape(self.layers[layer])}</th>'
            rows.append(f'<tr style="background:none">{name}{_bar(means[layer], max(means))}{cells}</tr>')
        words = "what the model would say next after each layer, for each token of the prompt; hover for others"
        left_out = f"the last {SHOWN} of {len(self.tokens):,} positions" if first else ""
        look = "border-collapse:separate;border-spacing:3px 1px;font-size:80%"  # columns read as one
        table = f'<table style="{look}"><tr>{head}</tr>{"".join(rows)}</table>'
        scroll = Markup(f'<div style="overflow-x:auto">{table}</div>')
        mean = f"entropy: the mean over {len(columns)} positions" if len(columns) > 1 else ""
        found = html.text(_finding([self.leads_from(place) for place in columns], self.layers))
        return str(html.block(found, html.line(words, left_out), scroll, _legend(mean), title="Logit lens"))

    def _cell(self, layer: int, place: int) -> str:
        texts, shares = self.texts[layer][place], self.probabilities[layer, place]
        answer, ranks = int(self.token_ids[-1, place, 0]), self.token_ids[layer, place].tolist()
        rank = self.rank(layer, place)
        title = [f"{self.layers[layer]}, entropy {self.entropies[layer, place]:.1f} bits"]
        for token, text, share in zip(ranks, texts, shares.tolist(), strict=True):
            title.append(f"{text!r} {share:.1%}{', the answer' if token == answer else ''}")
        path = "" if rank is None else _FIRST if rank == 0 else _AMONG
        hint = html.escape("\n".join(title))
        shade = _shade(rank, float(shares[0]))
        return f'<td title="{hint}" style="{_CELL};background:{shade};{path}">{html.escape(visible(texts[0]))}</td>'


_CELL = "padding:1px 5px;text-align:left;white-space:nowrap;border:none"
# The answer is blue and also bold, so that colour is not the only cue; other tokens are grey.
_FIRST = "font-weight:600"
_AMONG = f"outline:1px dashed {style.BLUE};outline-offset:-1px"


def _shade(rank: int | None, share: float) -> str:
    """Return the shade of a layer's likeliest token: blue for the answer, grey for another one."""
    return style.likely(share) if rank == 0 else style.shade(style.GREY, share)


def _finding(leads: Sequence[int], layers: Sequence[str]) -> str:
    """Say where the answers begin to lead, given the layer at which each does."""
    if not leads:
        return ""
    middle = layers[sorted(leads)[(len(leads) - 1) // 2]].partition(":")[0]
    return f"{'The answer leads' if len(leads) == 1 else 'Half of the answers lead'} from {middle} on."


def _means(entropies: NDArray[np.float32], columns: range) -> list[float]:
    """Return each layer's mean entropy over some positions; a little where it is zero, since bars are shares of it."""
    shown = entropies[:, columns.start : columns.stop]
    return [max(float(layer.mean()), 1e-6) if columns else 1e-6 for layer in shown]


def _bar(entropy: float, most: float) -> str:
    """Return the cell of a layer's entropy: a bar and its number."""
    look = (
        f"display:inline-block;height:.7em;width:{48 * entropy / most:.0f}px;background:{style.GREY};margin-right:4px"
    )
    return f'<td style="{_CELL};padding-right:12px"><span style="{look}"></span>{entropy:.1f}</td>'


def _legend(mean: str) -> Markup:
    """Return a legend of shades and lines."""
    sample = "padding:0 6px;white-space:nowrap"
    shades = "".join(
        f'<span style="{sample};background:{_shade(0, share)};{_FIRST}">{share:.0%}</span>' for share in _SHARES
    )
    other = f'<span style="{sample};background:{_shade(None, 0.5)}">another token</span>'
    among = f'<span style="{sample};{_AMONG}">the answer is among the {TOP} likeliest</span>'
    row = f"display:flex;flex-wrap:wrap;gap:4px 12px;font-size:{style.TINY}"
    return Markup(
        f'<div style="{row};margin:6px 2px"><span>probability of the answer {shades}</span>{other}{among}</div>'
        + (html.line(mean) if mean else "")
    )


_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_LETTER, _ROW, _ENTROPY = 6.1, 18.0, 96.0  # pixels on paper: a letter, a row, the bars of entropy with their numbers


def _paper(lens: Lens, columns: range) -> tuple[float, float, list[Markup]]:
    """Return the width, the height and the parts of the picture in plain colours."""
    order = range(len(lens.texts) - 1, -1, -1)
    names = [
        [visible(lens.tokens[place]), *(visible(lens.texts[layer][place][0]) for layer in order)] for place in columns
    ]
    widths = [12 + _LETTER * max(map(len, column)) for column in names]
    left = 12 + _LETTER * max(map(len, lens.layers), default=0)
    parts = [svg.words(left, 13, "entropy, bits", size=10)]
    means = _means(lens.entropies, columns)
    for row, layer in enumerate(order):
        y, wide = _ROW * (row + 1), 48 * means[layer] / max(means)
        parts.append(svg.words(0, y + 13, lens.layers[layer], size=10))
        parts.append(svg.rect(left, y + 4, max(0.5, wide), 9, style.GREY))
        parts.append(svg.words(left + 4 + wide, y + 13, f"{means[layer]:.1f}", size=10))
    x = left + _ENTROPY
    for column, width, place in zip(names, widths, columns, strict=True):
        parts.append(svg.words(x + 5, 13, column[0], size=10, font_weight=600))
        for row, layer in enumerate(order):
            y, rank = _ROW * (row + 1), lens.rank(layer, place)
            fill = _on_white(rank, float(lens.probabilities[layer, place, 0]))
            parts.append(svg.rect(x + 1, y + 0.5, width - 2, _ROW - 1, fill, **(_DASHED if rank else {})))
            weight = 600 if rank == 0 else ""
            parts.append(svg.words(x + 5, y + 13, column[row + 1], size=10, font_weight=weight))
        x += width
    bottom = _ROW * (len(lens.texts) + 1) + 8
    parts.append(svg.words(left, bottom + 11, "probability of the answer", size=10))
    at = left + 10 + _LETTER * len("probability of the answer")
    for share in _SHARES:
        parts.append(svg.rect(at, bottom, 36, 14, _on_white(0, share)))
        parts.append(svg.words(at + 18, bottom + 11, f"{share:.0%}", size=10, anchor="middle"))
        at += 38
    samples: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("another token", _on_white(None, 0.5), {}),
        (f"the answer is among the {TOP} likeliest", "none", _DASHED),
    )
    for label, fill, edge in samples:
        width = 12 + _LETTER * len(label)
        parts.append(svg.rect(at + 8, bottom, width, 14, fill, **edge))
        parts.append(svg.words(at + 14, bottom + 11, label, size=10))
        at += width + 8
    return max(x, at) + 2, bottom + 18, parts


_DASHED: dict[str, Any] = {"stroke": style.BLUE, "stroke_width": 1.2, "stroke_dasharray": "3 2"}


def _on_white(rank: int | None, share: float) -> str:
    """Return the shade of a layer's likeliest token on paper."""
    channels = bytes.fromhex((style.BLUE if rank == 0 else style.GREY)[1:])
    strength = style.STRONGEST * min(1.0, max(0.0, share))
    return "#" + "".join(f"{round(255 + (channel - 255) * strength):02x}" for channel in channels)


def names_of(facts: TapFacts) -> tuple[str, ...]:
    """Return the names of a model's layers; where they differ, with what their attention sees."""
    kinds = [_kind(facts.attention[layer]) if facts.attention else "" for layer in range(facts.layers)]
    mixed = len(set(kinds)) > 1
    names = [f"layer {layer}" + (f", {kind}" if mixed and kind else "") for layer, kind in enumerate(kinds)]
    return (*names[:-1], f"{names[-1]}: the answer")


def _kind(spec: Any) -> str:
    if spec is None:
        return ""
    return "all tokens" if spec.sliding_window is None else f"{spec.sliding_window:,} tokens"


class LensCall(Call[Lens]):
    """Await it for a `Lens`."""

    _awaited = "await session.view.lens(…)"

    def __init__(
        self, session: Generates, front: Front, prompt: PromptLike, positions: Positions, options: Mapping[str, object]
    ) -> None:
        self._session, self._prompt, self._positions, self._options = session, prompt, positions, options
        self._front = front

    async def _result(self) -> Lens:
        facts = facts_of(self._front)
        first, logits = await captured_of(self._session, self._prompt, {"logits": 0}, self._positions, self._options)
        positions = logits.positions
        each = max(1, AT_ONCE // max(1, len(positions) * self._front.vocab_size))
        ids, shares, entropies = [], [], []
        for start in range(0, facts.layers, each):
            layers = list(range(start, min(start + each, facts.layers)))
            _, logits = await captured_of(
                self._session, self._prompt, {"logits": layers}, self._positions, self._options
            )
            for layer in layers:
                likely = most_likely(logits["logits", layer])
                ids.append(likely.token_ids)
                shares.append(likely.probabilities)
                entropies.append(likely.entropies)
        known = {token: first.text_of(token) for token in np.unique(np.stack(ids)).tolist()}
        texts = tuple(tuple(tuple(known[token] for token in top) for top in layer.tolist()) for layer in ids)
        texts_of_prompt = first.prompt_texts
        tokens = tuple(texts_of_prompt[position] for position in positions)
        arrays = np.stack(ids), np.stack(shares), np.stack(entropies)
        return Lens(tokens, positions, names_of(facts), texts, *arrays)


class Likely(NamedTuple):
    """The most likely tokens of each position, and how open the rest is."""

    token_ids: NDArray[np.int32]  # [positions, TOP]
    probabilities: NDArray[np.float32]  # of them
    entropies: NDArray[np.float32]  # [positions], in bits


def most_likely(logits: NDArray[np.float32]) -> Likely:
    """Return the most likely tokens of each position, from its logits [positions, vocabulary]."""
    top = _candidates(logits)
    values = np.take_along_axis(logits, top, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :TOP]
    top, values = np.take_along_axis(top, order, axis=-1), np.take_along_axis(values, order, axis=-1)
    below = logits - values[:, :1]
    weights = np.exp(below)
    total = weights.sum(axis=-1, keepdims=True)
    # The sum of -p log p; a token without any probability adds nothing, though its logit may be -inf.
    inside = np.multiply(weights, below, out=np.zeros_like(weights), where=weights > 0).sum(axis=-1) / total[:, 0]
    entropies = np.maximum(np.log(total[:, 0]) - inside, 0.0) / np.log(2.0)
    probabilities = np.exp(values - values[:, :1]) / total
    return Likely(top.astype(np.int32), probabilities.astype(np.float32), entropies.astype(np.float32))


def _candidates(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return ids [positions, n] that contain the TOP likeliest.

    They are the ids of the TOP blocks with the largest maxima, and those after the last whole block. Choosing among
    all ids is ten times slower.
    """
    count, size = logits.shape
    blocks = size // BLOCK
    whole = blocks * BLOCK
    if blocks <= TOP:
        return np.broadcast_to(np.arange(size), (count, size))
    largest = logits[:, :whole].reshape(count, blocks, BLOCK).max(axis=-1)
    chosen = np.argpartition(largest, blocks - TOP, axis=-1)[:, -TOP:]
    inside = (chosen[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(count, -1)
    return np.concatenate([inside, np.broadcast_to(np.arange(whole, size), (count, size - whole))], axis=-1)


def facts_of(front: Front) -> TapFacts:
    facts = TAPS.of(front)
    if facts is None or facts.elsewhere:
        fix = "Use a session of one process, in its own process"
        raise InvalidRequest("session", front.model, "has its model in another process", fix)
    return facts


class Generates(Protocol):
    """The part of a session that lenses use."""

    @property
    def generate(self) -> Callable[..., Awaitable[Completion]]: ...


async def captured_of(
    session: Generates,
    prompt: PromptLike,
    sites: Mapping[str, object],
    positions: Positions,
    options: Mapping[str, object],
) -> tuple[Completion, Captured]:
    """Compute a prompt without generating, and return its completion and its captures."""
    wanted = Capture(sites, "prompt" if positions is None else positions)
    done = await session.generate(prompt, **{"max_tokens": 0, "temperature": 0.0, **options, "capture": wanted})
    assert done.captured is not None, "the request captures"
    return done, done.captured
