"""Markdown of an answer as safe static HTML, in time that grows with the answer's length.

A text is escaped first, and only known elements of Markdown are rendered: headings, paragraphs, lists, quotes, rules,
fenced and inline code, tables, bold, italic, formulas, and links to web pages. HTML in the text stays text. Images are
not shown, since loading one tells its server that the text was read. A formula is shown as it was written.

A model writes the text, so no pattern that could backtrack reads it: a line is looked at from its beginning and from
its end, and within a line each reader passes over the characters once.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rekindle._src.core import html, style
from rekindle._src.notebook.highlight import highlighted

_BLANK = " \t"
_RUN = 2000  # characters at most of inline code, bold, italic, and a link's target
_LABEL = 500  # of a link's text
_DEEPEST = 8  # nesting of quotes and lists
_ROWS = 200  # of a table that are shown
_SIZES = ("130%", "120%", "110%", "100%", "100%", "100%")
_NO_TARGET = re.compile(r"[\s()<>\"'`]")  # one character that no link's target has


def has_markup(text: str) -> bool:
    """True if the text has Markdown to render. Plain text is shown as it is."""
    return any(_is_marked(line) or _has_inline(line) for line in text.split("\n"))


def render(text: str) -> html.Markup:
    """Return the text as HTML with inline styles, without scripts."""
    return html.Markup("".join(_blocks(text.split("\n"), 0)))


def _blocks(lines: list[str], depth: int) -> Iterator[str]:
    index = 0
    while index < len(lines):
        line = lines[index]
        if (fence := _fence(line)) is not None:
            end = _end_of_fence(lines, index + 1, fence)
            yield _code(lines[index + 1 : end], line.strip(_BLANK).lstrip(fence[0]).strip())
            index = end + 1
        elif (closing := _DISPLAYED.get(line.strip())) is not None:
            end = _while(lines, index + 1, lambda line: line.strip() != closing)
            yield f'<div style="{_MATHS};text-align:center;margin:8px 0">{_joined(lines[index + 1 : end])}</div>'
            index = end + 1
        elif not line.strip():
            index += 1
        elif (heading := _heading(line)) is not None:
            size = _SIZES[heading.level - 1]
            yield f'<div style="font-weight:600;font-size:{size};margin:8px 0 4px">{_inline(heading.text)}</div>'
            index += 1
        elif _is_rule(line):
            yield f'<hr style="border:none;border-top:1px solid {style.HAIR};margin:12px 0">'
            index += 1
        elif depth < _DEEPEST and _quoted(line) is not None:
            end = _while(lines, index, lambda line: _quoted(line) is not None)
            inner = [_quoted(line) or "" for line in lines[index:end]]
            yield f'<div style="border-left:3px solid {style.HAIR};padding-left:12px;margin:4px 0">'
            yield from _blocks(inner, depth + 1)
            yield "</div>"
            index = end
        elif depth < _DEEPEST and _item(line) is not None:
            end = _while(lines, index, lambda line: line.startswith("  ") or _item(line) is not None)
            yield from _list(lines[index:end], depth)
            index = end
        elif _begins_table(lines, index):
            end = _while(lines, index, lambda line: "|" in line)
            yield _table([lines[index], *lines[index + 2 : end]])
            index = end
        else:
            end = _while(lines, index + 1, _goes_on)
            yield f'<div style="margin:4px 0">{"<br>".join(map(_inline, lines[index:end]))}</div>'
            index = end


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


def _code(lines: list[str], language: str) -> str:
    """Return code in a box; a page with scripts adds a button that copies it."""
    look = f"background-color:{style.WASH};padding:8px 12px;margin:0;border-radius:6px;overflow-x:auto;white-space:pre"
    name = language.partition(" ")[0]
    shown = highlighted("\n".join(lines), name)
    copy = '<span data-press="copy" data-label="Copy"></span>'
    code = f'<pre style="{look}"><code>{shown}</code></pre>'
    return f'<div class="rekindle-code" style="position:relative;margin:8px 0">{code}{copy}</div>'


_DISPLAYED = {"$$": "$$", "\\[": "\\]"}
_MATHS = "font-family:math,serif;font-style:italic;white-space:pre-wrap"


def _joined(lines: list[str]) -> str:
    return str(html.escape("\n".join(lines)))


def _list(lines: list[str], depth: int) -> Iterator[str]:
    """Yield items with the lines indented below them. Bullets are text, so the page's list styles don't apply."""
    outer_indent = len(lines[0]) - len(lines[0].lstrip(" "))
    index = 0
    while index < len(lines):
        item = _item(lines[index])
        head, mark = (
            (lines[index].strip(), "") if item is None else (item.text, f"{item.number}." if item.number else "•")
        )
        end = _while(lines, index + 1, lambda line: len(line) - len(line.lstrip(" ")) > outer_indent)
        yield f'<div style="display:flex;margin:2px 0"><span style="min-width:1.6em">{mark}</span><div>{_inline(head)}'
        children = lines[index + 1 : end]
        margin = min((len(line) - len(line.lstrip(" ")) for line in children if line.strip()), default=0)
        yield from _blocks([line[margin:] for line in children], depth + 1)
        yield "</div></div>"
        index = end


def _begins_table(lines: list[str], index: int) -> bool:
    """True if a line and the dashes below it begin a table.

    Rows are filled up to the width of the first one, so a table that would mostly consist of such cells is none.
    """
    if "|" not in lines[index] or index + 1 == len(lines) or not _is_dashes(lines[index + 1]):
        return False
    rows = [*itertools.takewhile(lambda line: "|" in line, lines[index + 2 : index + 2 + _ROWS])]
    width = len(_cells(lines[index]))
    return width * len(rows) <= 64 + 2 * sum(min(width, 1 + row.count("|")) for row in rows)


def _table(lines: list[str]) -> str:
    heads, shown = _cells(lines[0]), lines[1 : 1 + _ROWS]
    body = [(cells + [""] * len(heads))[: len(heads)] for cells in map(_cells, shown)]
    rows = [[html.Markup(_inline(cell)) for cell in row] for row in (heads, *body)]
    return html.table(rows[0], rows[1:] + [rows[0]] * (len(lines) - 1 - len(shown)), limit=_ROWS)


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
    """Return what a line quotes."""
    line = _unindented(line)
    return line[1:].removeprefix(" ") if line.startswith(">") else None


def _is_dashes(line: str) -> bool:
    """True for the line below a table's heads, such as "|---|:-:|"."""
    if "|" not in line:
        return False
    cells = line.strip(_BLANK).removeprefix("|").removesuffix("|").split("|")
    dashes = (cell.strip(_BLANK).removeprefix(":").removesuffix(":") for cell in cells)
    return all(cell and not cell.strip("-") for cell in dashes)


# Within a line. Each reader yields the places of its elements, from the left, none of which overlap.


class InlineSpan(NamedTuple):
    """An element at [start, stop) of a line, its text, and where it leads."""

    start: int
    stop: int
    text: str
    target: str = ""


def _has_inline(line: str) -> bool:
    readers = (_codes, _formulas, _links, _bolds, _italics)
    return line.strip() in _DISPLAYED or any(next(read(line), None) is not None for read in readers)


def _inline(text: str) -> str:
    """Render code first, without markup inside it, then formulas, links, bold and italic in the escaped rest."""
    return _replaced(text, _codes(text), _mathematics, lambda code: f"<code>{html.escape(code.text.strip())}</code>")


def _mathematics(text: str) -> str:
    def shown(formula: InlineSpan) -> str:
        return f'<span style="{_MATHS}">{html.escape(formula.text)}</span>'

    return _replaced(text, _formulas(text), _emphasis, shown)


def _emphasis(text: str) -> str:
    def linked(link: InlineSpan) -> str:
        target = html.escape(link.target)
        looks = 'target="_blank" rel="noopener noreferrer"'
        return f'<a href="{target}" {looks} title="{target}">{_strong(link.text)}</a>'

    return _replaced(text, _links(text), _strong, linked)


def _strong(text: str) -> str:
    # No element crosses its bounds, so elements nest.
    return _replaced(text, _bolds(text), _italic, lambda bold: f"<b>{_italic(bold.text)}</b>")


def _italic(text: str) -> str:
    escaped = str(html.escape(text))
    return _replaced(escaped, _italics(escaped), str, lambda italic: f"<i>{italic.text}</i>")


def _replaced(
    text: str, spans: Iterator[InlineSpan], rest: Callable[[str], str], element: Callable[[InlineSpan], str]
) -> str:
    """Return a line with its `spans` as elements, and the `rest` between them."""
    parts, end = [], 0
    for span in spans:
        parts += [rest(text[end : span.start]), element(span)]
        end = span.stop
    return "".join([*parts, rest(text[end:])])


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
    """Yield formulas, between dollars or TeX's brackets. Amounts of dollars are none."""
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
