"""Pictures of attributions: the text in colours, maps of heads and layers, and the strongest nodes.

A page and a file for a paper show the same. Blue raises the number and orange lowers it; tokens that lower it are
underlined too, so that colour is not the only cue.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core import words
from rekindle._src.core.names import checked_path
from rekindle._src.views import html, style, svg
from rekindle._src.views.html import Markup
from rekindle._src.views.labels import readable, visible

SHOWN = 1000  # tokens of a text
COLUMNS = 64  # of a map with tokens
NODES = 10  # in the table
LEAST = 0.01  # of the largest score: smaller cells are not drawn
WIDTH, CELL, ROW = 620.0, 14.0, 18.0  # pixels, of a paper's text, of a map's cell and of a line of text
_LETTER = 6.1
_DARKEST = {1: (8, 64, 129), -1: (140, 70, 10)}  # red, green and blue of the strongest score on paper, by its sign
_ACCENTS = {1: tuple(bytes.fromhex(style.BLUE[1:])), -1: tuple(bytes.fromhex(style.ORANGE[1:]))}
_MEANING = {
    "gradient_x_input": "each token's embedding times the gradient there",
    "integrated": "integrated gradients, from embeddings of the baseline to the prompt's",
    "patching": "estimates of the change if the source's array is put in there, from one backward pass",
    "atp_star": "AtP*: sizes of the change if the source's array is put in there, with the sign of the plain estimate",
}


class ScoredNode(Protocol):
    """One node and its score."""

    @property
    def name(self) -> str: ...
    @property
    def score(self) -> float: ...
    @property
    def exact(self) -> float | None: ...


class AttributionLike(Protocol):
    """An attribution, as far as it is drawn."""

    @property
    def method(self) -> str: ...
    @property
    def number(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def other_value(self) -> float | None: ...
    @property
    def convergence(self) -> float | None: ...
    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def scores(self) -> NDArray[np.float32]: ...
    @property
    def sites(self) -> Sequence[str]: ...
    def map(self, site: str) -> NDArray[np.float32]: ...
    def strongest(self, count: int = NODES) -> Sequence[ScoredNode]: ...


def drawn(shown: AttributionLike) -> Markup:
    """Return an attribution as HTML without scripts; hovering shows numbers."""
    scores = shown.scores[-SHOWN:]
    scale = _scale(scores)
    left_out = "" if len(scores) == len(shown.texts) else f"the last {len(scores):,} of {len(shown.texts):,} tokens"
    tokens = zip(shown.texts[-SHOWN:], scores.tolist(), strict=True)
    text = "".join(_token(text, score, scale) for text, score in tokens)
    running = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7;margin:8px 0"
    maps = [_page_map(shown, site) for site in shown.sites]
    return html.block(
        html.line(_finding(shown), left_out),
        html.line(_MEANING[shown.method]),
        Markup(f'<div style="{running};max-width:{style.WIDE}">{text}</div>'),
        html.line(Markup(f"lowers it by {scale:.3g} {_SHADES} raises it by {scale:.3g}")),
        *maps,
        _table(shown.strongest(NODES)),
        title=f"Attribution of {readable(shown.number, 60)}",
    )


def _finding(shown: AttributionLike) -> str:
    found = f"it is {shown.value:.4g}"
    if shown.other_value is not None:
        where = "for the baseline" if shown.method == "integrated" else "for the source"
        found += f", and {shown.other_value:.4g} {where}"
    if shown.convergence is not None:
        found += f"; the tokens' sum misses the difference by {shown.convergence:.2g}"
    return found


def _scale(scores: NDArray[np.float32]) -> float:
    """Return the largest size of a score, which has the strongest shade."""
    return max(float(np.abs(scores).max(initial=0.0)), 1e-12)


_SHADES = "".join(
    f'<span aria-hidden="true" style="display:inline-block;width:14px;height:.8em;background:{shade}"></span>'
    for shade in (
        *(style.shade(style.ORANGE, share) for share in (1.0, 0.67, 0.33)),
        *(style.shade(style.BLUE, share) for share in (0.33, 0.67, 1.0)),
    )
)


def _token(text: str, score: float, scale: float) -> str:
    share = score / scale
    colour = style.shade(style.BLUE if share > 0 else style.ORANGE, abs(share))
    line = f";border-bottom:1px dotted {style.EDGE}" if share < -0.05 else ""
    hint = f"{score:+.3g}, {abs(share):.0%} of the strongest"
    shown = html.escape(text)
    return f'<span title="{hint}" style="border-radius:2px;background:{colour}{line}">{shown}</span>'


def _table(nodes: Sequence[ScoredNode]) -> Markup:
    """Return the strongest nodes, with the exact changes where they were computed."""
    exact = any(node.exact is not None for node in nodes)
    heads = ["node", "score", *(["exact patch"] if exact else [])]
    rows = [
        (node.name, f"{node.score:+.3g}", *([("" if node.exact is None else f"{node.exact:+.3g}")] if exact else []))
        for node in nodes
    ]
    return html.details("the strongest nodes", html.table(heads, rows), key="nodes")


def _page_map(shown: AttributionLike, site: str) -> Markup:
    values, names = _columns(shown, site)
    width, height, parts = _map(values, names, site, paper=False)
    label = f"{site} by layer: {_scale(values):.3g} is the strongest"
    title = html.line(f"{_title(site, shown)}; the strongest has {_scale(values):.3g}")
    picture = svg.picture(width, height, parts, label=label)
    return Markup(f'{title}<div style="overflow-x:auto">{picture}</div>')


def _title(site: str, shown: AttributionLike) -> str:
    columns = "heads" if _has_heads(site) else "tokens"
    return f"{site}: layers by {columns}" + (", summed over tokens" if columns == "heads" else "")


def _has_heads(site: str) -> bool:
    return site in ("heads", "q", "k", "v")


def _columns(shown: AttributionLike, site: str) -> tuple[NDArray[np.float32], list[str]]:
    """Return a site's map and the names of its columns: of tokens, at most the last ones that have room."""
    values = shown.map(site)
    if _has_heads(site):
        return values, [str(head) for head in range(values.shape[1])]
    return values[:, -COLUMNS:], [visible(text) for text in shown.texts[-COLUMNS:]]


def _map(
    values: NDArray[np.float32], names: Sequence[str], site: str, *, paper: bool
) -> tuple[float, float, list[Markup]]:
    """Return the width, the height and the parts of a map: the last layer on top."""
    layers, columns = values.shape
    scale, left = _scale(values), 30.0
    lean = any(len(name) > 2 for name in names)
    top = 10.0 + (0.87 * max(map(_pixels, names), default=0.0) if lean else 12.0)
    parts = []
    for column, name in enumerate(names):
        x = left + CELL * (column + 0.5)
        if lean:
            parts.append(svg.words(x + 3, top - 4, name, size=10, transform=f"rotate(-60 {x + 3:.1f} {top - 4:.1f})"))
        elif column % (1 if columns <= 20 else 5) == 0:
            parts.append(svg.words(x, top - 4, name, anchor="middle", size=9))
    for layer in range(layers):
        y = top + CELL * (layers - 1 - layer)
        if layer % (1 if layers <= 12 else 5) == 0 or layer == layers - 1:
            parts.append(svg.words(left - 5, y + CELL - 4, layer, anchor="end", size=9))
    for layer, column, share in _cells(values, scale):
        place = left + CELL * column, top + CELL * (layers - 1 - layer), CELL, CELL
        what = f"{site} {column}" if _has_heads(site) else f"{site} at {names[column]}"
        hint = "" if paper else f"layer {layer}, {what}: {values[layer, column]:+.3g}"
        parts.append(svg.rect(*place, colour(share, paper=paper), title=hint, shape_rendering="crispEdges"))
    edge: dict[str, Any] = {"stroke": "currentColor", "stroke_opacity": 0.4, "stroke_width": 0.5}
    parts.append(svg.rect(left, top, CELL * columns, CELL * layers, "none", **edge))
    width = left + CELL * columns + (max(map(_pixels, names), default=0.0) / 2 if lean else 0) + 4
    return width, top + CELL * layers + 4, parts


def _cells(values: NDArray[np.float32], scale: float) -> Iterator[tuple[int, int, float]]:
    for layer, column in np.argwhere(np.abs(values) > LEAST * scale).tolist():
        yield layer, column, float(values[layer, column]) / scale


def _pixels(name: str) -> float:
    """Return the most pixels that a token's name can take."""
    return sum(11.0 if unicodedata.east_asian_width(letter) in "WF" else 6.5 for letter in name)


def colour(share: float, *, paper: bool) -> str:
    """Return the colour of a share of the strongest score: blue above zero, orange below, stronger the larger."""
    sign, strength = (1 if share > 0 else -1), min(1.0, abs(share))
    if not paper:
        return f"rgba({','.join(map(str, _ACCENTS[sign]))},{strength:.2f})"
    return "#" + "".join(f"{round(255 + (channel - 255) * strength):02x}" for channel in _DARKEST[sign])


def save(shown: AttributionLike, path: str | Path) -> Path:
    """Write an SVG file: the text in colours, its scale, and the maps of the sites. Return its path."""
    target = checked_path("path", path)
    width, height, parts = _text(shown)
    for site in shown.sites:
        values, names = _columns(shown, site)
        wide, high, own = _map(values, names, site, paper=True)
        title = f"{_title(site, shown)}; the strongest has {_scale(values):.3g}"
        parts.append(svg.words(0, height + 22, title, size=10))
        parts.append(svg.group(own, transform=f"translate(0 {height + 28:.1f})"))
        width, height = max(width, wide, _LETTER * len(title)), height + 28 + high
    title = f"Attribution of {readable(shown.number, 60)}"
    target.write_text(svg.document(width, height + 4, parts, title=title), encoding="utf-8")
    return target


def _text(shown: AttributionLike) -> tuple[float, float, list[Markup]]:
    """Return the width, the height and the parts of a text in plain colours, in lines of at most `WIDTH`."""
    scores = shown.scores[-SHOWN:]
    scale, x, line = _scale(scores), 0.0, 0
    parts = []
    for text, score in zip(shown.texts[-SHOWN:], scores.tolist(), strict=True):
        name = visible(text, 24)
        wide = _pixels(name) + 6
        if x and x + wide > WIDTH:
            x, line = 0.0, line + 1
        y = ROW * line
        strength = 0.5 * score / scale  # dark words stay readable
        parts.append(svg.rect(x, y + 1, wide - 1, ROW - 2, colour(strength, paper=True)))
        lower = {"text_decoration": "underline"} if score < -0.05 * scale else {}
        parts.append(svg.words(x + 3, y + 13, name, size=10, **lower))
        x += wide
        if "\n" in text:
            x, line = 0.0, line + 1
    bottom = ROW * (line + 1) + 10
    words_before = f"lowers it by {scale:.3g}"
    at = _LETTER * len(words_before)
    parts.append(svg.words(0, bottom + 9, words_before, size=10))
    steps = 20
    for step in range(steps):
        share = (step + 0.5) / steps * 2 - 1
        parts.append(svg.rect(at + 5 * step, bottom, 5.2, 10, colour(0.5 * share, paper=True)))
    after = f"raises it by {scale:.3g}"
    parts.append(svg.words(at + 5 * steps + 6, bottom + 9, after, size=10))
    count = words.count(len(shown.texts), "token")
    if len(scores) < len(shown.texts):
        after += f"; the last {len(scores):,} of {count}"
    return max(WIDTH, at + 5 * steps + 6 + _LETTER * len(after)), bottom + 14, parts
