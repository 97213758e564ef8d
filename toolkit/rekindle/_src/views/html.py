"""HTML for rich reprs: static, without scripts or style sheets, readable on light and dark backgrounds.

Styles are inline, text inherits the colours of the theme, and shades are translucent. So an output saved in a notebook
reads the same in JupyterLab, VS Code, Colab and on a web page that strips scripts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rekindle._src.core import words
from rekindle._src.views import style

_TABLE = f'<table style="border-collapse:collapse;font-size:{style.SMALL};margin:4px 0">'
_CELL = "padding:2px 12px 2px 0;text-align:{align};vertical-align:top;border:none;background:none"
_HEAD = "padding:2px 12px 2px 0;text-align:{align};border:none;font-weight:600;border-bottom:1px solid " + style.HAIR
_QUIET = f"font-size:{style.SMALL};opacity:{style.QUIET}"


class Markup(str):
    """Text that is HTML already, which `escape` leaves as it is.

    For use inside this package. A notebook gets `str(markup)`, since encoders such as msgspec, which marimo
    uses, take no subclasses of `str`.
    """

    __slots__ = ()


ALTERNATIVES = 20  # of a token that are shown; a request may ask for all of a vocabulary


class Token(NamedTuple):
    """A token for the display by `tokens`."""

    text: str
    logprob: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()  # text and log-probability, most likely first
    forced: bool = False  # a grammar left no choice
    note: str = ""  # shown on hover


class ImageLike(Protocol):
    """A picture of a prompt or a message, as it is shown."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def thumbnail(self) -> str:
        """A small picture as a `data:` URI; empty if there is none."""
        ...


def escape(value: object) -> str:
    """Return a value as text that is safe inside HTML."""
    return value if isinstance(value, Markup) else html.escape(str(value))


_RUNNING = "white-space:pre-wrap;overflow-wrap:anywhere"  # of text as it is; a long word is broken


def line(*parts: object) -> Markup:
    """Return a line of small text with its parts separated by dots."""
    content = " · ".join(escape(part) for part in parts if part != "")
    return Markup(f'<div style="{_QUIET};margin:2px 0">{content}</div>')


PAGES = (
    "A page has the keys and values of a few tokens. Requests that run hold pages; those that have ended leave theirs "
    "cached, so that a prompt which begins the same is not computed again"
)
SLOTS = "Each request that runs has a slot of the batch; others wait"


def with_hint(text: str, meaning: str) -> Markup:
    """Return text that shows its meaning on hover."""
    return Markup(f'<span title="{escape(meaning)}">{escape(text)}</span>')


def block(*parts: str, title: str = "") -> Markup:
    """Return parts below each other, with a title."""
    head = f'<div style="font-weight:600;margin:2px 0">{escape(title)}</div>' if title else ""
    return Markup(f'<div style="margin:4px 0">{head}{"".join(parts)}</div>')


def details(summary: str, *parts: str, key: str = "", opened: bool = False) -> Markup:
    """Return parts that a click on their summary unfolds; it needs no script.

    A view that is redrawn under the same `key` stays unfolded.
    """
    mark = f' data-fold="{escape(key)}"' if key else ""
    head = f'<summary style="{_QUIET};cursor:pointer">{escape(summary)}</summary>'
    return Markup(f'<details{mark}{" open" * opened} style="margin:4px 0">{head}{"".join(parts)}</details>')


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, limit: int = 50) -> Markup:
    """Return a table. Numbers are aligned right; rows beyond `limit` are counted, not shown."""
    rows = list(rows)
    numeric = [
        bool(rows) and all(isinstance(row[column], (int, float)) for row in rows) for column in range(len(headers))
    ]
    align = ["right" if number else "left" for number in numeric]
    head = "".join(
        f'<th style="{_HEAD.format(align=where)}">{escape(name)}</th>'
        for name, where in zip(headers, align, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_CELL.format(align=where)}">{escape(number(value))}</td>'
            for value, where in zip(row, align, strict=True)
        )
        + "</tr>"
        for row in rows[:limit]
    )
    more = line(f"and {len(rows) - limit:,} more") if len(rows) > limit else ""
    return Markup(f"{_TABLE}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}")


def pairs(values: Mapping[str, object], titles: Mapping[str, str] | None = None) -> Markup:
    """Return names and values as a table of two columns; hovering over a name shows its title."""
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values.values())
    name_style, value_style, hints = (
        _CELL.format(align="left"),
        _CELL.format(align="right" if numeric else "left"),
        titles or {},
    )
    rows = "".join(
        f'<tr><td style="{name_style};opacity:{style.QUIET}" title="{escape(hints.get(name, ""))}">{escape(name)}</td>'
        f'<td style="{value_style}">{escape(number(value))}</td></tr>'
        for name, value in values.items()
    ).replace(' title=""', "")
    return Markup(f"{_TABLE}<tbody>{rows}</tbody></table>")


def tiles(values: Mapping[str, object]) -> Markup:
    """Return a few figures next to each other, each above its name; nothing without figures."""
    if not values:
        return Markup("")
    small, shown = f"font-size:{style.TINY};opacity:{style.QUIET}", []
    for name, value in values.items():
        figure = f'<div style="font-size:130%;font-weight:600;line-height:1.3">{escape(number(value))}</div>'
        shown.append(f'<div data-tile="">{figure}<div style="{small}">{escape(name)}</div></div>')
    return Markup(f'<div style="display:flex;flex-wrap:wrap;gap:8px 24px;margin:8px 0">{"".join(shown)}</div>')


def gauge(share: float, *, words: str = "", colour: str = style.BLUE, width: int = 96) -> Markup:
    """Return a share of one as a bar, with its percentage or other words."""
    filled = f'<span style="width:{100 * min(1.0, max(0.0, share)):.1f}%;background:{colour}"></span>'
    look = f"display:inline-flex;width:{width}px;height:.7em;border-radius:2px;overflow:hidden;background:{style.WASH}"
    return Markup(f'<span style="{look}">{filled}</span> {escape(words or f"{share:.0%}")}')


def number(value: object) -> object:
    """Return a number in short form with its thousands separated; other values unchanged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def bar(
    parts: Mapping[str, float],
    *,
    rest: str = "",
    width: int = 320,
    named: bool = True,
    colours: Sequence[str] = style.SERIES,
) -> Markup:
    """Return shares of a whole as one bar with a legend; names are in the tooltips too. `rest` is drawn in grey."""
    total = sum(parts.values()) or 1.0
    colours = [style.GREY if name == rest else colours[index % len(colours)] for index, name in enumerate(parts)]
    cells = "".join(
        f'<span title="{escape(name)}: {escape(number(value))}" style="height:10px;'
        f'width:{100 * value / total:.2f}%;background:{colour};opacity:{0.3 if name == rest else 1}"></span>'
        for (name, value), colour in zip(parts.items(), colours, strict=True)
    )
    names = {f"{name} {number(value)}": colour for (name, value), colour in zip(parts.items(), colours, strict=True)}
    look = (
        f"display:flex;gap:1px;width:{width}px;max-width:100%;border-radius:3px;overflow:hidden;background:{style.WASH}"
    )
    outer = f'<div style="{look}">{cells}</div>'
    return Markup(outer + legend(names) if named else outer)


def legend(names: Mapping[str, str]) -> Markup:
    """Return the names of colours on one line."""
    entries = "".join(
        f'<span style="white-space:nowrap">{swatch(colour)} {escape(name)}</span>' for name, colour in names.items()
    )
    look = f"display:flex;flex-wrap:wrap;gap:2px 12px;font-size:{style.TINY};margin:2px 0"
    return Markup(f'<div style="{look}">{entries}</div>')


def swatch(colour: str) -> Markup:
    """Return a square of a colour."""
    return Markup(f'<span aria-hidden="true" style="color:{colour}">■</span>')


IMAGES = 8  # thumbnails in one output, of 36 kB each at most


def images(entries: Sequence[ImageLike], *, limit: int = IMAGES) -> Markup:
    """Return thumbnails of pictures, each with its size on hover. Those beyond `limit` are counted, not shown."""
    if not entries:
        return Markup("")
    more = len(entries) - max(0, limit)
    shown = "".join(map(_image, entries[: max(0, limit)]))
    rest = (
        line(words.count(more, "picture") if not shown else f"and {words.count(more, 'more picture')}")
        if more > 0
        else ""
    )
    return Markup(f'<div style="display:flex;flex-wrap:wrap;gap:4px;align-items:end;margin:4px 0">{shown}{rest}</div>')


def _image(entry: ImageLike) -> str:
    size = f"{entry.width:,} × {entry.height:,}" if entry.width else "a picture"
    source = entry.thumbnail
    if not source:
        return f'<span style="border:1px dashed {style.EDGE};padding:2px 8px;font-size:{style.TINY}">{size}</span>'
    look = f"max-width:160px;max-height:160px;border:1px solid {style.HAIR};border-radius:4px"
    return f'<img src="{escape(source)}" alt="{size}" title="{size}" style="{look}">'


def code(value: str) -> Markup:
    """Return a line of code."""
    return Markup(f'<div style="margin:4px 0"><code style="{_RUNNING}">{escape(value)}</code></div>')


def text(value: str) -> Markup:
    """Return running text with its line breaks."""
    return Markup(f'<div style="{_RUNNING};max-width:80ch;margin:4px 0">{escape(value)}</div>')


def tokens(entries: Iterable[Token]) -> Markup:
    """Return text with a background that shows how unlikely each token was: clear where it was sure, orange where it
    surprises. Hovering tells more; forced ones are underlined.
    """
    return Markup(f'<div style="{_RUNNING};max-width:80ch;margin:4px 0">{"".join(map(_token, entries))}</div>')


def _token(token: Token) -> str:
    line = f"border-bottom:2px solid {style.EDGE};" if token.forced else ""
    if token.logprob is None:
        hint, text = token.note or ("forced" if line else ""), escape(token.text)
        return f'<span title="{escape(hint)}" style="{line}">{text}</span>' if hint else text
    probability = math.exp(token.logprob)
    title = [f"{token.note or repr(token.text)} {probability:.1%}"]
    title += [f"{other!r} {math.exp(logprob):.1%}" for other, logprob in token.alternatives]
    title += ["forced by the grammar"] * token.forced
    look = f"{line}background:{style.surprise(probability)};border-radius:2px"
    return f'<span title="{escape(chr(10).join(title))}" style="{look}">{escape(token.text)}</span>'
