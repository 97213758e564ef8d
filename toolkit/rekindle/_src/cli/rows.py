"""Rows of a terminal: text with styles of prompt_toolkit, wrapped between words, and Markdown drawn in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.utils import get_cwidth

from rekindle._src.cli.controls import PICTURES
from rekindle._src.core import words
from rekindle._src.views import style
from rekindle._src.views.highlight import Kind, pieces
from rekindle._src.views.markdown import ItemBlock, read

Row = StyleAndTextTuples  # fragments of one line: a style and a text each
BlockRows = Callable[[int], list[Row]]  # the rows of a block in so many columns

QUIET: Final = f"fg:{style.GREY}"
_CODE: dict[Kind, str] = {
    "": "",
    "keyword": f"bold fg:{style.BLUE}",
    "string": f"fg:{style.ORANGE}",
    "number": f"fg:{style.BLUE}",
    "comment": f"italic {QUIET}",
}


def markdown(text: str, columns: int) -> list[tuple[list[Row], int]]:
    """Return the rows of each block of a text, and the line at which it begins."""
    return [(block.drawn(columns), block.start) for block in read(text, _LOOK)]


def plain(text: str, columns: int, look: str = "") -> list[Row]:
    """Return the rows of a text without markup."""
    return [row for line in text.split("\n") for row in wrapped([(look, line)], columns)]


def width_of(row: Row) -> int:
    return sum(get_cwidth(fragment[1]) for fragment in row)


def wrapped(row: Row, columns: int, *, whole_words: bool = True) -> list[Row]:
    """Return a line as rows of at most so many columns. A word longer than a row is broken."""
    rows: list[list[tuple[str, str]]] = [[]]
    used = last = 0  # columns of the row, and the place after its last space
    for look, character in _characters(row):
        width = get_cwidth(character)
        if character == " " and used + width > columns:
            rows.append([])
            used = last = 0
            continue
        while used and used + width > columns:  # a second time where a word's beginning leaves too little
            now = rows[-1]
            word = now[last:] if whole_words and last else []
            if word:
                del now[last:]
            rows.append(word)
            used, last = sum(get_cwidth(one) for _, one in word), 0
        rows[-1].append((look, character))
        used += width
        if character == " " or width == 2:
            last = len(rows[-1])
    return [_joined(cells) for cells in rows]


def _characters(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the characters of a line with their styles; no character can steer the terminal."""
    place = 0
    for look, text, *_ in row:
        for character in text:
            if character == "\t":
                spaces = 8 - place % 8
                yield from [(look, " ")] * spaces
                place += spaces
            else:
                yield look, PICTURES.get(ord(character), character)
                place += 1


def _joined(cells: Iterable[tuple[str, str]]) -> Row:
    """Join neighbouring fragments of the same style."""
    joined: Row = []
    for look, text in cells:
        if joined and joined[-1][0] == look:
            joined[-1] = (look, joined[-1][1] + text)
        else:
            joined.append((look, text))
    return joined


def _with(row: Row, look: str) -> Row:
    return [(f"{fragment[0]} {look}".strip(), fragment[1]) for fragment in row]


def indented(rows: Iterable[Row], first: Row, rest: Row) -> list[Row]:
    """Return rows after a mark, and what stands below it."""
    return [[*(rest if place else first), *row] for place, row in enumerate(rows)]


class _Rows:
    """How the elements of Markdown are drawn in rows; see `Look`."""

    def text(self, text: str) -> Row:
        return [("", text)]

    def code(self, text: str) -> Row:
        return [(f"fg:{style.BLUE}", text)]

    def formula(self, text: str) -> Row:
        return [("italic", text)]

    def italic(self, text: str) -> Row:
        return [("italic", text)]

    def bold(self, inner: Row) -> Row:
        return _with(inner, "bold")

    def link(self, shown: Row, target: str) -> Row:
        return [*_with(shown, "underline"), (QUIET, f" ({target})")]

    def joined(self, parts: Sequence[Row]) -> Row:
        return [fragment for part in parts for fragment in part]

    def paragraph(self, lines: Sequence[Row]) -> BlockRows:
        return lambda columns: [row for line in lines for row in wrapped(line, columns)]

    def heading(self, level: int, text: Row) -> BlockRows:
        look = f"bold fg:{style.BLUE}" if level < 3 else "bold"
        return lambda columns: wrapped(_with(text, look), columns)

    def rule(self) -> BlockRows:
        return lambda columns: [[(QUIET, "─" * min(columns, 40))]]

    def quote(self, inner: Sequence[BlockRows]) -> BlockRows:
        bar: Row = [(QUIET, "│ ")]
        return lambda columns: indented(_stacked(inner, max(1, columns - 2)), bar, bar)

    def items(self, items: Sequence[ItemBlock[Row, BlockRows]]) -> BlockRows:
        def drawn(columns: int) -> Iterator[Row]:
            margin = max((get_cwidth(item.mark) for item in items), default=0) + 1
            for item in items:
                room = max(1, columns - margin)
                rows = [*wrapped(item.text, room), *(row for block in item.inner for row in block(room))]
                yield from indented(rows, [(QUIET, item.mark.ljust(margin))], [("", " " * margin)])

        return lambda columns: [*drawn(columns)]

    def table(self, rows: Sequence[Sequence[Row]], left_out: int) -> BlockRows:
        return lambda columns: [*_table(rows, columns), *_more(left_out)]

    def listing(self, code: str, language: str) -> BlockRows:
        """Return code without a frame at its sides, so that it can be copied."""

        def drawn(columns: int) -> list[Row]:
            lines: list[Row] = [[]]
            for text, kind in pieces(code, language):
                first, *rest = text.split("\n")
                lines[-1].append((_CODE[kind], first))
                lines += [[(_CODE[kind], line)] for line in rest]
            rows = [row for line in lines for row in wrapped(line, columns, whole_words=False)]
            edge = min(columns, max([8 + len(language), *map(width_of, rows)]))
            name = f"── {language} " if language else ""
            return [[(QUIET, name.ljust(edge, "─")[:edge])], *rows, [(QUIET, "─" * edge)]]

        return drawn

    def display(self, formula: str) -> BlockRows:
        return lambda columns: indented(plain(formula, max(1, columns - 4), "italic"), [("", "    ")], [("", "    ")])


_LOOK = _Rows()


def _stacked(blocks: Sequence[BlockRows], columns: int) -> list[Row]:
    """Return blocks one below the other, with an empty row between two."""
    rows: list[Row] = []
    for block in blocks:
        rows += [[], *block(columns)] if rows else block(columns)
    return rows


def _more(left_out: int) -> list[Row]:
    return [[(QUIET, f"… {words.count(left_out, 'more row')}")]] if left_out else []


def _table(rows: Sequence[Sequence[Row]], columns: int) -> Iterator[Row]:
    """Yield a table's rows. Where it is too wide, its widest columns wrap."""
    widths = [max(1, *(width_of(row[place]) for row in rows)) for place in range(len(rows[0]))]
    room = max(len(widths), columns - 3 * (len(widths) - 1))
    while sum(widths) > room:
        widest = max(range(len(widths)), key=widths.__getitem__)
        others = max((width for place, width in enumerate(widths) if place != widest), default=0)
        # As narrow as the next one, or as is needed.
        least = widths[widest] - (sum(widths) - room)
        widths[widest] = max(1, least, min(others, widths[widest] - 1))
    for number, row in enumerate(rows):
        look = "bold" if not number else ""
        cells = [wrapped(_with(cell, look), width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            drawn: Row = []
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
                text = cell[line] if line < len(cell) else []
                last = place == len(widths) - 1
                drawn += [*text, ("", "" if last else " " * (width - width_of(text))), (QUIET, "" if last else " │ ")]
            yield [fragment for fragment in drawn if fragment[1]]
        if not number:
            yield [(QUIET, "─┼─".join("─" * width for width in widths))]
