"""The prefix cache as an icicle: a bar for each run of pages, as wide as its tokens, as tall as all that share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from rekindle._src.core import html, style, svg
from rekindle._src.core.html import Markup
from rekindle._src.core.labels import readable

WIDTH, MOST = 620, 480  # pixels: of the picture, and of its height unless that makes lines thinner than the thinnest
THICK, THIN = 24.0, 3.0  # pixels of a line
LETTER = 6.5  # pixels, about
ROWS = 50  # of the table
# How strong a bar's shade is when it was used that many seconds ago. Text on the strongest one can be read.
AGES = ((60.0, 1.0), (600.0, 0.7), (3600.0, 0.45), (float("inf"), 0.25))


class RunLike(Protocol):
    """A run of pages of the prefix tree; see `NodeView`."""

    @property
    def depth(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def tier(self) -> str: ...
    @property
    def visits(self) -> int: ...
    @property
    def age(self) -> float: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def left_out(self) -> int: ...


class Bar(NamedTuple):
    """The lines of a run of pages; those from `more` on are of branches without bars of their own."""

    first: int
    more: int
    stop: int


def icicle(
    nodes: Sequence[RunLike],
    *,
    pressed: bool = False,
    marked: int | None = None,
    hits: Mapping[int, int] = MappingProxyType({}),
) -> Markup:
    """Return the picture of a tree, its nodes depth first. With `pressed`, its bars are buttons of a panel.

    `hits` are the tokens of each bar that a prompt would hit, from the bar's beginning.
    """
    if not nodes:
        return Markup("")
    bars = _bars(nodes)
    lines = max(bar.stop for bar in bars)
    line = min(THICK, max(THIN, MOST / lines))
    most = max(node.start + node.tokens for node in nodes)
    parts = [
        part
        for index, (node, bar) in enumerate(zip(nodes, bars, strict=True))
        for part in _drawn(node, bar, index if pressed else None, line, WIDTH / most, marked == index)
    ]
    for index, tokens in hits.items():
        parts.append(_hit(nodes[index], bars[index], tokens, line, WIDTH / most))
    parts += _axis(most, line * lines)
    label = f"the prefix cache: {html.count(len(nodes), 'run')} of pages, {html.count(most, 'token')} at most"
    role = "group" if pressed else "img"  # parts of an image are nothing that can be pressed
    return Markup(svg.picture(WIDTH, line * lines + 18, parts, label=label, role=role) + _legend(nodes, bool(hits)))


def _bars(nodes: Sequence[RunLike]) -> list[Bar]:
    """Return the lines of each node: those of its branches, or one of its own."""
    bars = [Bar(0, 0, 0)] * len(nodes)
    above: list[tuple[int, int]] = []  # of the branch so far: node and its first line
    line = 0

    def close(depth: int) -> None:
        nonlocal line
        while above and nodes[above[-1][0]].depth >= depth:
            index, first = above.pop()
            more = line
            if line == first or nodes[index].left_out:
                line += 1
            bars[index] = Bar(first, more if nodes[index].left_out else line, line)

    for index, node in enumerate(nodes):
        close(node.depth)
        above.append((index, line))
    close(-1)
    return bars


def _drawn(node: RunLike, bar: Bar, index: int | None, line: float, scale: float, marked: bool) -> Iterator[Markup]:
    x, width = node.start * scale, max(2.0, node.tokens * scale)
    y, height = bar.first * line, (bar.stop - bar.first) * line
    colour = style.TIERS[node.tier]
    gap = 1.0 if line > 6 else 0.3
    shade = style.shade(colour, strength(node.age)) if colour.startswith("#") else "none"
    edge: dict[str, object] = (
        {"stroke": "currentColor", "stroke_width": 2} if marked else {"stroke": colour, "stroke_width": 0.8}
    )
    if line < 6 and not marked:  # outlines would be all that is seen
        edge, shade = {}, style.WASH if shade == "none" else shade
    elif node.tier == "gone":
        edge = {"stroke": "currentColor", "stroke_dasharray": "3 2", "stroke_width": 2 if marked else 0.8}
    frame: dict[str, object] = {"x": x + 0.5, "y": y + gap / 2, "width": max(1.0, width - 1), "height": height - gap}
    name = readable(node.text, 48)
    act: dict[str, object] = {}
    if index is not None:
        act = {
            "data_row": "bar",
            "data_token": index,
            "tabindex": 0,
            "role": "button",
            "aria_label": f"{name}, {facts(node)}",
        }
    yield svg.shape("rect", title=f"{name}\n{facts(node)}", fill=shade, rx=2, **frame, **edge, **act)
    if height >= 11:
        marks = " ".join(("pin",) * node.pinned + (f"×{node.visits}",) * (node.visits > 0))
        room = int((width - 8) / LETTER) - len(marks) - 2 * bool(marks)
        middle, size = y + height / 2 + 3.5, 10.5
        still = "pointer-events:none"  # the pointer means the bar
        if room >= 3:
            yield svg.words(x + 5, middle, readable(node.text, room), size=size, style=still)
        if marks and width > LETTER * len(marks) + 8:
            yield svg.words(x + width - 5, middle, marks, anchor="end", size=size, style=still)
    if bar.more < bar.stop:
        place = min(x + width, WIDTH - 90.0), bar.more * line + gap / 2, 10.0, line - gap
        hint = f"{html.count(node.left_out, 'more page')} in branches after this one"
        yield svg.rect(*place, style.WASH, title=hint, stroke=style.HAIR, rx=2)
        if line >= 11:
            words = f"+{node.left_out:,} pages"
            yield svg.words(place[0] + 14, place[1] + line / 2 + 3.5, words, size=10.5, opacity=style.QUIET)


def _hit(node: RunLike, bar: Bar, tokens: int, line: float, scale: float) -> Markup:
    """Return the mark of what a prompt would hit: a line below its part of a bar."""
    height = min(4.0, line)
    y = bar.stop * line - height
    title = f"the typed prompt hits {html.count(tokens, 'token')} here"
    return svg.rect(node.start * scale, y, max(2.0, tokens * scale), height, style.ORANGE, title=title)


def strength(age: float) -> float:
    """Return how strong the shade of pages is that were used so many seconds ago."""
    return next(share for most, share in AGES if age < most or most == float("inf"))


def facts(node: RunLike) -> str:
    """Return a run's figures in words."""
    hits = html.count(node.visits, "hit") if node.visits else "not hit yet"
    parts = [
        f"{html.count(node.tokens, 'token')} from {node.start:,} on", html.count(node.pages, "page"), node.tier, hits,
        f"{ago(node.age)} ago", "pinned" if node.pinned else "",
    ]  # fmt: skip
    return ", ".join(filter(None, parts))


def ago(seconds: float) -> str:
    """Return a time since something in words: `40 s`, `12 min`, `3 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


def _axis(most: int, y: float) -> Iterator[Markup]:
    """Yield the positions of tokens below the bars."""
    step = next(step * 10**power for power in range(12) for step in (1, 2, 5) if most / (step * 10**power) <= 6)
    scale = WIDTH / most
    for at in range(0, most + 1, step):
        yield svg.shape("line", x1=at * scale, x2=at * scale, y1=y, y2=y + 4, stroke="currentColor", stroke_opacity=0.5)
        anchor = "start" if not at else "end" if at * scale > WIDTH - 30 else "middle"
        words = f"{at:,}" if at else "token 0"
        yield svg.words(at * scale, y + 14, words, anchor=anchor, size=10, opacity=style.QUIET)


def _legend(nodes: Sequence[RunLike], hit: bool) -> Markup:
    tiers = {tier: style.shade(colour, 1.0) for tier, colour in style.TIERS.items() if colour.startswith("#")}
    tiers |= {"the typed prompt": style.ORANGE} if hit else {}
    gone = html.line("dashed: its payload is gone") if any(node.tier == "gone" for node in nodes) else ""
    words = html.line(
        "paler: not used for longer (1 min, 10 min, 1 h)", "×3: hit three times", "pin: stays on the device"
    )
    return Markup(f"{html.legend(tiers)}{words}{gone}")


def rows(nodes: Sequence[RunLike]) -> Markup:
    """Return the tree as a table that a click unfolds."""
    table = html.table(
        ["text", "tokens", "from", "where", "hits", "ago", ""],
        [
            ("\u2003" * node.depth + readable(node.text, 48), node.tokens, node.start, node.tier, node.visits,
             ago(node.age), "pinned" if node.pinned else "")
            for node in nodes
        ],
        limit=ROWS,
    )  # fmt: skip
    return html.details("as rows", table, key="rows") if nodes else Markup("")
