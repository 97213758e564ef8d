"""Markdown of an answer as safe static HTML, with inline styles and without scripts.

Text is escaped wherever it is drawn, so HTML in it stays text. Images are not shown, since loading one tells its server
that the text was read. A formula is shown as it was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rekindle._src.views import html, style
from rekindle._src.views.highlight import Kind, pieces
from rekindle._src.views.markdown import ROWS, ItemBlock, has_markup, read

__all__ = ["has_markup", "render"]
_SIZES = ("130%", "120%", "110%", "100%", "100%", "100%")
_MATHS = "font-family:math,serif;font-style:italic;white-space:pre-wrap"
_CODE: dict[Kind, str] = {
    "keyword": f"color:{style.BLUE_INK};font-weight:600",
    "string": f"color:{style.ORANGE_INK}",
    "number": f"color:{style.BLUE_INK}",
    "comment": f"opacity:{style.QUIET};font-style:italic",
}


def render(text: str) -> html.Markup:
    """Return the text as HTML."""
    return html.Markup("".join(block.drawn for block in read(text, _LOOK)))


class _Html:
    """How elements are drawn in HTML; see `Look`."""

    def text(self, text: str) -> str:
        return str(html.escape(text))

    def code(self, text: str) -> str:
        return f"<code>{html.escape(text)}</code>"

    def formula(self, text: str) -> str:
        return f'<span style="{_MATHS}">{html.escape(text)}</span>'

    def italic(self, text: str) -> str:
        return f"<i>{html.escape(text)}</i>"

    def bold(self, inner: str) -> str:
        return f"<b>{inner}</b>"

    def link(self, shown: str, target: str) -> str:
        where = html.escape(target)
        return f'<a href="{where}" target="_blank" rel="noopener noreferrer" title="{where}">{shown}</a>'

    def joined(self, parts: Iterable[str]) -> str:
        return "".join(parts)

    def paragraph(self, lines: Sequence[str]) -> str:
        return f'<div style="overflow-wrap:anywhere;margin:4px 0">{"<br>".join(lines)}</div>'

    def heading(self, level: int, text: str) -> str:
        return f'<div style="font-weight:600;font-size:{_SIZES[level - 1]};margin:8px 0 4px">{text}</div>'

    def rule(self) -> str:
        return f'<hr style="border:none;border-top:1px solid {style.HAIR};margin:12px 0">'

    def quote(self, inner: Sequence[str]) -> str:
        look = f"border-left:3px solid {style.HAIR};padding-left:12px;margin:4px 0"
        return f'<div style="{look}">{"".join(inner)}</div>'

    def items(self, items: Sequence[ItemBlock[str, str]]) -> str:
        """Return list items with bullets as text, so that the page's list styles don't apply."""
        return "".join(
            f'<div style="display:flex;margin:2px 0"><span style="min-width:1.6em">{item.mark}</span>'
            f"<div>{item.text}{''.join(item.inner)}</div></div>"
            for item in items
        )

    def table(self, rows: Sequence[Sequence[str]], left_out: int) -> str:
        heads, *body = [[html.Markup(cell) for cell in row] for row in rows]
        return html.table(heads, body + [heads] * left_out, limit=ROWS)

    def listing(self, code: str, language: str) -> str:
        """Return code in a box; a page with scripts adds a button that copies it."""
        look = f"background-color:{style.WASH};padding:8px 12px;margin:0;border-radius:6px;overflow-x:auto"
        shown = "".join(_coloured(text, kind) for text, kind in pieces(code, language))
        copy = '<span data-press="copy" data-label="Copy"></span>'
        box = f'<pre style="{look};white-space:pre"><code>{shown}</code></pre>'
        return f'<div class="rekindle-code" style="position:relative;margin:8px 0">{box}{copy}</div>'

    def display(self, formula: str) -> str:
        return f'<div style="{_MATHS};text-align:center;margin:8px 0">{html.escape(formula)}</div>'


_LOOK = _Html()


def _coloured(text: str, kind: Kind) -> str:
    shown = html.escape(text)
    return f'<span style="{_CODE[kind]}">{shown}</span>' if kind else str(shown)
