"""The prefix cache as an icicle: a bar for each run of pages, as wide as its tokens, as tall as all that share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from rekindle._src.core import words
from rekindle._src.views import html, style, svg
from rekindle._src.views.html import Markup
from rekindle._src.views.labels import readable

WIDTH, MOST = 620, 480  # pixels: of the picture, and of its height unless that makes lines thinner than the thinnest
THICK, THIN = 24.0, 3.0  # pixels of a line
LETTER, SPACING = 6.5, 14.0  # pixels, about: of a letter, and between two lines of text
WORD = 24  # characters of a long word
ROWS = 50  # of the table
HOW = "what begins alike shares a bar, and parts to the right"
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


class HitCounts(Protocol):
    """Counts of a cache's hits so far; see `CacheStats`."""

    @property
    def page_size(self) -> int: ...
    @property
    def lookups(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def saved_tokens(self) -> int: ...


class Bar(NamedTuple):
    """The lines of a run of pages; those from `more` on are of branches without bars of their own."""

    first: int
    more: int
    stop: int


def summary(kept: Mapping[str, int], stats: HitCounts) -> Markup:
    """Return how many tokens are kept, by where, and how much was found; of an empty cache, what fills it."""
    if not any(kept.values()):
        size = words.count(stats.page_size, "token")
        return html.text(f"Nothing is cached now. What requests compute stays here, in whole pages of {size}.")
    if not stats.saved_tokens:
        return Markup(html.tiles(kept) + html.line("no prompt has found a whole page here yet"))
    found: dict[str, object] = {
        "prompt tokens found here, not computed again": stats.saved_tokens,
        "prompts found pages here": f"{stats.hits:,} of {stats.lookups:,}",
    }
    return html.tiles({**kept, **found})


def icicle(
    nodes: Sequence[RunLike],
    *,
    pressed: bool = False,
    marked: int | None = None,
    hits: Mapping[int, int] = MappingProxyType({}),
) -> Markup:
    """Return the picture of a tree, its nodes depth first. With `pressed`, a panel makes buttons of its bars.

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
    label = f"the prefix cache: {words.count(len(nodes), 'run')} of pages, {words.count(most, 'token')} at most"
    return Markup(svg.picture(WIDTH, line * lines + 18, parts, label=label) + _legend(nodes, bool(hits)))


def _bars(nodes: Sequence[RunLike]) -> list[Bar]:
    """Return the lines of each node: all lines of its branches, or one line for a leaf."""
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
            "aria_label": f"{name}, {facts(node)}",
        }
    yield svg.shape("rect", title=f"{name}\n{facts(node)}", fill=shade, rx=2, **frame, **edge, **act)
    if height >= 11:
        yield from _written(node, x, y, width, height)
    if bar.more < bar.stop:
        place = min(x + width, WIDTH - 90.0), bar.more * line + gap / 2, 10.0, line - gap
        hint = f"{words.count(node.left_out, 'more page')} in branches after this one"
        yield svg.rect(*place, style.WASH, title=hint, stroke=style.HAIR, rx=2)
        if line >= 11:
            label = f"+{node.left_out:,} pages"
            yield svg.words(place[0] + 14, place[1] + line / 2 + 3.5, label, size=10.5, opacity=style.QUIET)


def _written(node: RunLike, x: float, y: float, width: float, height: float) -> Iterator[Markup]:
    """Yield a bar's text, in as many lines as it has room for, and how often it was hit at the end of the last one."""
    marks = ", ".join(("pinned",) * node.pinned + (words.count(node.visits, "hit"),) * (node.visits > 0))
    room, lines = int((width - 10) / LETTER), max(1, int((height - 4) / SPACING))
    look: dict[str, Any] = {"size": 10.5, "style": "pointer-events:none"}  # the pointer means the bar
    last = room - len(marks) - 2 * bool(marks) if len(marks) <= room else room
    pieces = text_lines(node.text, room, lines, last)
    top = y + (height - SPACING * lines) / 2 + 9.5
    for at, piece in enumerate(pieces):
        yield svg.words(x + 5, top + SPACING * at, piece, **look)
    if marks and len(marks) <= room:
        yield svg.words(x + width - 5, top + SPACING * (lines - 1), marks, anchor="end", **look)


def text_lines(text: str, room: int, lines: int, last: int) -> list[str]:
    """Return the beginning of a text in lines of `room` characters; the last of them has room for `last`.

    Words stay whole. One that is longer than a line ends in an ellipsis, and so does the last line of a longer text.
    """
    pieces: list[str] = []
    rest = text
    while rest and room >= 3 and len(pieces) < lines - 1:
        end = len(rest) if len(rest) <= room else _whole(rest, room)
        pieces.append(readable(rest[:end].rstrip(" "), room))
        rest = rest[end:].removeprefix(" ")
    if not rest or last < 3:
        return pieces
    if len(rest) <= last:
        return [*pieces, readable(rest, last)]
    end = _whole(rest, last - 1)
    return [*pieces, readable(f"{rest[:end].rstrip(' ')}…" if end < last else rest, last)]


def _whole(text: str, room: int) -> int:
    """Return the end of the words at a text's beginning that have room; of its first word if that has none.

    What goes on for longer than a word is text without spaces, as Chinese is, and ends anywhere.
    """
    end = text.rfind(" ", 1, room + 1)
    if end < 0:
        end = text.find(" ", room, room + WORD)
    if end < 0 and len(text) <= WORD:
        end = len(text)
    return end if end > 0 else room


def _hit(node: RunLike, bar: Bar, tokens: int, line: float, scale: float) -> Markup:
    """Return the mark of a prompt's expected hit: a line below its part of a bar."""
    height = min(4.0, line)
    y = bar.stop * line - height
    title = f"the typed prompt hits {words.count(tokens, 'token')} here"
    return svg.rect(node.start * scale, y, max(2.0, tokens * scale), height, style.ORANGE, title=title)


def strength(age: float) -> float:
    """Return how strong the shade of pages is that were used so many seconds ago."""
    return next(share for most, share in AGES if age < most or most == float("inf"))


def facts(node: RunLike) -> str:
    """Return a run's figures in words."""
    hits = words.count(node.visits, "hit") if node.visits else "not hit yet"
    parts = [
        f"{words.count(node.tokens, 'token')} from {node.start:,} on", words.count(node.pages, "page"), node.tier, hits,
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
    """Return a legend of the colours in use."""
    present = [(tier, colour) for tier, colour in style.TIERS.items() if any(node.tier == tier for node in nodes)]
    tiers = {tier: style.shade(colour, 1.0) for tier, colour in present if colour.startswith("#")}
    tiers |= {"the typed prompt": style.ORANGE} if hit else {}
    paler = "paler: not used for longer (1 min, 10 min, 1 h)" if any(strength(node.age) < 1 for node in nodes) else ""
    gone = "dashed: its payload is gone" if any(node.tier == "gone" for node in nodes) else ""
    return Markup(html.legend(tiers) + (html.line(paler, gone) if paler or gone else ""))


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
