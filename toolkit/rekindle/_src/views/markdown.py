"""Reads the Markdown of an answer, in time that grows with the answer's length. Drawing is done elsewhere.

Known elements are headings, paragraphs, lists, quotes, rules, fenced and inline code, tables, bold, italic, formulas,
and links to web pages. All else is text. A `Look` draws them: in HTML for a notebook, in rows for a terminal.

A model writes the text, so no pattern that could backtrack reads it: a line is looked at from its beginning and from
its end, and within a line each reader passes over the characters once.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

_BLANK = " \t"
_RUN = 2000  # characters at most of inline code, bold, italic, and a link's target
_LABEL = 500  # of a link's text
_DEEPEST = 8  # nesting of quotes and lists
ROWS = 200  # of a table that are drawn
_NO_TARGET = re.compile(r"[\s()<>\"'`]")  # one character that no link's target has
_DISPLAYED = {"$$": "$$", "\\[": "\\]"}
P = TypeVar("P")  # the drawing of a part of a line
B = TypeVar("B")  # the drawing of a block


class Look(Protocol[P, B]):
    """How each element is drawn."""

    # Within a line.
    def text(self, text: str) -> P: ...
    def code(self, text: str) -> P: ...
    def formula(self, text: str) -> P: ...
    def italic(self, text: str) -> P: ...
    def bold(self, inner: P) -> P: ...
    def link(self, shown: P, target: str) -> P: ...
    def joined(self, parts: Sequence[P]) -> P: ...

    # Blocks.
    def paragraph(self, lines: Sequence[P]) -> B: ...
    def heading(self, level: int, text: P) -> B: ...
    def rule(self) -> B: ...
    def quote(self, inner: Sequence[B]) -> B: ...
    def items(self, items: Sequence[ItemBlock[P, B]]) -> B: ...
    def table(self, rows: Sequence[Sequence[P]], left_out: int) -> B: ...
    def listing(self, code: str, language: str) -> B: ...
    def display(self, formula: str) -> B: ...


class ItemBlock(NamedTuple, Generic[P, B]):
    """An item of a list: its mark, such as "•" or "1.", its line, and the blocks below it."""

    mark: str
    text: P
    inner: tuple[B, ...]


class MarkdownBlock(NamedTuple, Generic[B]):
    """A block as it is drawn, and its lines [start, stop)."""

    drawn: B
    start: int
    stop: int


def has_markup(text: str) -> bool:
    """True if the text has Markdown to draw. Plain text is shown as it is."""
    return any(_is_marked(line) or _has_inline(line) for line in text.split("\n"))


def read(text: str, look: Look[P, B]) -> Iterator[MarkdownBlock[B]]:
    """Yield the blocks of a text."""
    return _Reader(look).blocks(text.split("\n"), 0)


class _Reader(Generic[P, B]):
    def __init__(self, look: Look[P, B]) -> None:
        self._look = look

    def blocks(self, lines: list[str], depth: int) -> Iterator[MarkdownBlock[B]]:
        index, look = 0, self._look
        while index < len(lines):
            line = lines[index]
            if not line.strip():
                index += 1
                continue
            start = index
            if (fence := _fence(line)) is not None:
                end = _end_of_fence(lines, index + 1, fence)
                language = line.strip(_BLANK).lstrip(fence[0]).strip().partition(" ")[0]
                drawn, index = look.listing("\n".join(lines[index + 1 : end]), language), end + 1
            elif (closing := _DISPLAYED.get(line.strip())) is not None:
                end = _while(lines, index + 1, lambda line: line.strip() != closing)
                drawn, index = look.display("\n".join(lines[index + 1 : end])), end + 1
            elif (heading := _heading(line)) is not None:
                drawn, index = look.heading(heading.level, self._inline(heading.text)), index + 1
            elif _is_rule(line):
                drawn, index = look.rule(), index + 1
            elif depth < _DEEPEST and _quoted(line) is not None:
                end = _while(lines, index, lambda line: _quoted(line) is not None)
                inner = self.blocks([_quoted(line) or "" for line in lines[index:end]], depth + 1)
                drawn, index = look.quote([block.drawn for block in inner]), end
            elif depth < _DEEPEST and _item(line) is not None:
                end = _while(lines, index, lambda line: line.startswith("  ") or _item(line) is not None)
                drawn, index = look.items([*self._items(lines[index:end], depth)]), end
            elif _begins_table(lines, index):
                end = _while(lines, index, lambda line: "|" in line)
                drawn, index = self._table([lines[index], *lines[index + 2 : end]]), end
            else:
                end = _while(lines, index + 1, _goes_on)
                drawn, index = look.paragraph([self._inline(line) for line in lines[index:end]]), end
            yield MarkdownBlock(drawn, start, min(index, len(lines)))

    def _items(self, lines: list[str], depth: int) -> Iterator[ItemBlock[P, B]]:
        """Yield items with the lines indented below them."""
        outer_indent = len(lines[0]) - len(lines[0].lstrip(" "))
        index = 0
        while index < len(lines):
            item = _item(lines[index])
            text = lines[index].strip() if item is None else item.text
            mark = "" if item is None else f"{item.number}." if item.number else "•"
            end = _while(lines, index + 1, lambda line: len(line) - len(line.lstrip(" ")) > outer_indent)
            children = lines[index + 1 : end]
            margin = min((len(line) - len(line.lstrip(" ")) for line in children if line.strip()), default=0)
            inner = tuple(block.drawn for block in self.blocks([line[margin:] for line in children], depth + 1))
            yield ItemBlock(mark, self._inline(text), inner)
            index = end

    def _table(self, lines: list[str]) -> B:
        width, shown = len(_cells(lines[0])), lines[: 1 + ROWS]
        rows = [(cells + [""] * width)[:width] for cells in map(_cells, shown)]
        return self._look.table([[*map(self._inline, row)] for row in rows], len(lines) - len(shown))

    # Code is drawn first, without markup inside it, then formulas, links, bold and italic in the rest.

    def _inline(self, text: str) -> P:
        return self._replaced(text, _codes(text), self._mathematics, lambda code: self._look.code(code.text.strip()))

    def _mathematics(self, text: str) -> P:
        return self._replaced(text, _formulas(text), self._emphasis, lambda span: self._look.formula(span.text))

    def _emphasis(self, text: str) -> P:
        def linked(link: InlineSpan) -> P:
            return self._look.link(self._strong(link.text), link.target)

        return self._replaced(text, _links(text), self._strong, linked)

    def _strong(self, text: str) -> P:
        # No element crosses its bounds, so elements nest.
        return self._replaced(text, _bolds(text), self._italic, lambda span: self._look.bold(self._italic(span.text)))

    def _italic(self, text: str) -> P:
        return self._replaced(text, _italics(text), self._look.text, lambda span: self._look.italic(span.text))

    def _replaced(
        self, text: str, spans: Iterator[InlineSpan], rest: Callable[[str], P], element: Callable[[InlineSpan], P]
    ) -> P:
        """Return a line with its `spans` as elements, and the `rest` between them."""
        parts: list[P] = []
        end = 0
        for span in spans:
            if end < span.start:
                parts.append(rest(text[end : span.start]))
            parts.append(element(span))
            end = span.stop
        if not parts:
            return rest(text)
        return self._look.joined([*parts, rest(text[end:])] if end < len(text) else parts)


def _goes_on(line: str) -> bool:
    return bool(line.strip()) and not _is_marked(line)


def _while(lines: list[str], start: int, holds: Callable[[str], bool]) -> int:
    """Return the index of the first line from `start` on for which `holds` is False."""
    return next((index for index in range(start, len(lines)) if not holds(lines[index])), len(lines))


def _end_of_fence(lines: list[str], start: int, fence: str) -> int:
    """Return the index of the line that closes a fence, or of the text's end in an unfinished answer."""

    def open_(line: str) -> bool:
        closing = line.strip()
        return not (closing.startswith(fence) and set(closing) == {fence[0]})

    return _while(lines, start, open_)


def _begins_table(lines: list[str], index: int) -> bool:
    """True if a line and the dashes below it begin a table.

    Rows are filled up to the width of the first one, so a table that would mostly consist of such cells is read as
    text.
    """
    if "|" not in lines[index] or index + 1 == len(lines) or not _is_dashes(lines[index + 1]):
        return False
    rows = [*itertools.takewhile(lambda line: "|" in line, lines[index + 2 : index + 2 + ROWS])]
    width = len(_cells(lines[index]))
    return width * len(rows) <= 64 + 2 * sum(min(width, 1 + row.count("|")) for row in rows)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


# Lines.


class Heading(NamedTuple):
    """A line "## text"."""

    level: int
    text: str


class Item(NamedTuple):
    """A line "- text" or "1. text"; its number is empty for a bullet."""

    number: str
    text: str


def _is_marked(line: str) -> bool:
    """True if a line begins a block that is no paragraph and no table."""
    return (
        _fence(line) is not None
        or _heading(line) is not None
        or _item(line) is not None
        or _is_rule(line)
        or _quoted(line) is not None
    )


def _unindented(line: str) -> str:
    """Return a line without the up to three spaces that any mark may have before it."""
    return line[min(3, len(line) - len(line.lstrip(" "))) :]


def _fence(line: str) -> str | None:
    """Return the run of a line's fence, such as "```"."""
    line = _unindented(line)
    sign = line[:1]
    if sign not in ("`", "~"):
        return None
    rest = line.lstrip(sign)
    length = len(line) - len(rest)
    return None if length < 3 or "`" in rest else line[:length]


def _heading(line: str) -> Heading | None:
    line = _unindented(line)
    rest = line.lstrip("#")
    level = len(line) - len(rest)
    text = rest.lstrip(_BLANK)
    if not 1 <= level <= 6 or len(text) == len(rest) or not text or text[0].isspace():
        return None
    return Heading(level, text.rstrip(_BLANK).rstrip("#").rstrip(_BLANK) or "#")


def _item(line: str) -> Item | None:
    line = line.lstrip(" ")
    length = 1
    if line[:1] not in ("-", "*", "+"):
        length = next((at for at, sign in enumerate(line[:10]) if not sign.isdecimal()), 10)
        if not 1 <= length <= 9 or line[length] not in ".)":
            return None
        length += 1
    rest = line[length:]
    text = rest.lstrip(_BLANK)
    return None if len(text) == len(rest) else Item(line[: length - 1], text)


def _is_rule(line: str) -> bool:
    line = _unindented(line)
    sign = line[:1]
    return sign in ("-", "*", "_") and line.count(sign) >= 3 and not line.strip(sign + _BLANK)


def _quoted(line: str) -> str | None:
    """Return the quoted part of a line; None if it quotes nothing."""
    line = _unindented(line)
    return line[1:].removeprefix(" ") if line.startswith(">") else None


def _is_dashes(line: str) -> bool:
    """True for the line below a table's heads, such as "|---|:-:|"."""
    if "|" not in line:
        return False
    cells = line.strip(_BLANK).removeprefix("|").removesuffix("|").split("|")
    dashes = (cell.strip(_BLANK).removeprefix(":").removesuffix(":") for cell in cells)
    return all(cell and not cell.strip("-") for cell in dashes)


# Within a line. Each reader yields the places of its elements, from the left, without overlaps.


class InlineSpan(NamedTuple):
    """An element at [start, stop) of a line, its text, and where it leads."""

    start: int
    stop: int
    text: str
    target: str = ""


def _has_inline(line: str) -> bool:
    readers = (_codes, _formulas, _links, _bolds, _italics)
    return line.strip() in _DISPLAYED or any(next(read(line), None) is not None for read in readers)


class _Run(NamedTuple):
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def _backticks(text: str) -> Iterator[_Run]:
    """Yield the runs of backticks."""
    stop = 0
    while (start := text.find("`", stop)) >= 0:
        stop = start
        while text.startswith("`", stop):
            stop += 1
        yield _Run(start, stop)


def _codes(text: str) -> Iterator[InlineSpan]:
    """Yield code: between a run of backticks and the next one within reach that is as long.

    Where there is none, the end of a run may begin code, the longest such end first.
    """
    runs = [*_backticks(text)]
    ahead: dict[int, deque[int]] = {}  # the runs within reach, by length: at most 62 lengths have room there
    first = reached = 0
    while first < len(runs):
        opening = runs[first]
        while reached < len(runs) and runs[reached].start - opening.stop <= _RUN:
            ahead.setdefault(runs[reached].length, deque()).append(reached)
            reached += 1
        closing, length = first, 0
        for size, numbers in tuple(ahead.items()):
            while numbers and numbers[0] <= first:
                numbers.popleft()
            if not numbers:
                del ahead[size]
            elif length < size <= opening.length:
                closing, length = numbers[0], size
        if length:
            start, stop = runs[closing]
            yield InlineSpan(opening.stop - length, stop, text[opening.stop : start])
        first = closing + 1


_FORMULAS = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}


class _SignSearch:
    """The next place of a sign in a text, from places that only grow; each character is looked at once."""

    def __init__(self, text: str, sign: str) -> None:
        self._text, self._sign, self._next = text, sign, -1

    def of(self, start: int) -> int:
        """Return the place at `start` or after it; the text's length if there is none."""
        if self._next < start:
            found = self._text.find(self._sign, start)
            self._next = len(self._text) if found < 0 else found
        return self._next


def _formulas(text: str) -> Iterator[InlineSpan]:
    """Yield formulas, between dollars or TeX's brackets. Amounts of dollars are text."""
    openings = {sign: _SignSearch(text, sign) for sign in _FORMULAS}
    closings = {sign: _SignSearch(text, sign) for sign in _FORMULAS.values()}
    start = 0
    while start < len(text):
        opening = min(openings, key=lambda sign: openings[sign].of(start))  # of "$$" and "$", the longer one
        inner = openings[opening].of(start) + len(opening)
        if inner >= len(text):
            return
        stop = closings[_FORMULAS[opening]].of(inner)
        after = stop + len(opening)
        fits = inner < stop < len(text) and stop - inner <= _RUN
        if fits and (opening != "$" or _is_formula(text[inner:stop], text[after : after + 1])):
            yield InlineSpan(inner - len(opening), after, text[inner:stop])
            start = after
        else:
            start = inner


def _is_formula(inner: str, after: str) -> bool:
    """True if a text between dollars is a formula: it has a sign of one, or is a letter."""
    bare = not inner[0].isspace() and not inner[-1].isspace() and not after.isdecimal()
    return bare and ((len(inner) == 1 and inner.isalpha()) or any(sign in inner for sign in "\\^_={}<>+"))


def _links(text: str) -> Iterator[InlineSpan]:
    """Yield the links of a text, each written as "[text](https://…)"."""
    end, middle = 0, text.find("](")
    while middle >= 0:
        least, target = max(end, middle - _LABEL - 1), middle + 2
        start = max(text.rfind("[", least, middle), text.rfind("]", least, middle))
        scheme = next((scheme for scheme in ("https://", "http://") if text.startswith(scheme, target)), "")
        if start >= 0 and text[start] == "[" and start + 1 < middle and scheme:
            host = target + len(scheme)
            stop = _NO_TARGET.search(text, host, host + _RUN + 1)
            if stop is not None and stop[0] == ")" and stop.start() > host:
                end = stop.end()
                yield InlineSpan(start, end, text[start + 1 : middle], text[target : end - 1])
        middle = text.find("](", max(end, middle + 1))


def _bolds(text: str) -> Iterator[InlineSpan]:
    """Yield "**text**", without a space at either end."""
    start, closing = text.find("**"), 0
    while start >= 0:
        if start + 2 < len(text) and not text[start + 2].isspace():
            if closing < start + 3:
                closing = text.find("**", start + 3)
                while closing >= 0 and text[closing - 1].isspace():
                    closing = text.find("**", closing + 1)
                if closing < 0:
                    return
            if closing - start - 2 <= _RUN:
                yield InlineSpan(start, closing + 2, text[start + 2 : closing])
                start = closing + 1
        start = text.find("**", start + 1)


def _italics(text: str) -> Iterator[InlineSpan]:
    """Yield "*text*" that touches neither a word nor another asterisk, without a space at either end."""
    start = text.find("*")
    while start >= 0 and (stop := text.find("*", start + 1)) >= 0:
        inner, beside = text[start + 1 : stop], text[max(0, start - 1) : start] + text[stop + 1 : stop + 2]
        fits = 1 <= len(inner) <= _RUN and not inner[0].isspace() and not inner[-1].isspace()
        if fits and not any(sign in "*_" or sign.isalnum() for sign in beside):
            yield InlineSpan(start, stop + 1, inner)
            stop = text.find("*", stop + 1)
        start = stop
