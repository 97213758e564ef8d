"""Markdown as models write it, as safe static HTML: text is escaped first, and only known elements are made of it.

Headings, paragraphs, lists, quotes, rules, fenced and inline code, tables, bold, italic, and links to web pages. HTML
in the text stays text. Images are not shown, since loading one tells its server that it was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from rekindle._src.core import html

_FENCE = re.compile(r" {0,3}(```+|~~~+)[ \t]*([^`\n]*)")
_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(\S.*?)[ \t]*#*[ \t]*")
_ITEM = re.compile(r"( *)(?:[-*+]|(\d{1,9})[.)])[ \t]+(.*)")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*")
_QUOTE = re.compile(r" {0,3}> ?(.*)")
_DASHES = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*")
_CODE = re.compile(r"(`+)(?!`)([^\n]{1,2000}?)(?<!`)\1(?!`)")
_LINK = re.compile(r"\[([^\[\]\n]{1,500})\]\((https?://[^\s()<>\"'`]{1,2000})\)")
_BOLD = re.compile(r"\*\*(?=\S)([^\n]{1,2000}?)(?<=\S)\*\*")
_ITALIC = re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]{1,2000}?)(?<=[^\s*])\*(?![\w*])")
_MARKS = (_FENCE, _HEADING, _ITEM, _RULE, _QUOTE)
_DEEPEST = 8  # quotes and lists inside each other
_SIZES = ("130%", "120%", "110%", "100%", "100%", "100%")


def has_markup(text: str) -> bool:
    """Whether there is anything to render: plain text is shown as it is."""
    if any(mark.fullmatch(line) for line in text.split("\n") for mark in _MARKS):
        return True
    return any(mark.search(text) for mark in (_CODE, _LINK, _BOLD, _ITALIC))


def render(text: str) -> html.Markup:
    """The text as HTML with inline styles, without scripts."""
    return html.Markup("".join(_blocks(text.split("\n"), 0)))


def _blocks(lines: list[str], depth: int) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if found := _FENCE.fullmatch(line):
            end = _end_of_fence(lines, at + 1, found[1])
            yield _code(lines[at + 1 : end])
            at = end + 1
        elif not line.strip():
            at += 1
        elif found := _HEADING.fullmatch(line):
            size = _SIZES[len(found[1]) - 1]
            yield f'<div style="font-weight:600;font-size:{size};margin:8px 0 4px">{_inline(found[2])}</div>'
            at += 1
        elif _RULE.fullmatch(line):
            yield '<hr style="border:none;border-top:1px solid rgba(128,128,128,.5)">'
            at += 1
        elif depth < _DEEPEST and _QUOTE.fullmatch(line):
            end = _while(lines, at, lambda line: bool(_QUOTE.fullmatch(line)))
            inner = [_QUOTE.fullmatch(line)[1] for line in lines[at:end]]  # type: ignore[index]
            yield '<div style="border-left:3px solid rgba(128,128,128,.5);padding-left:10px;margin:4px 0">'
            yield from _blocks(inner, depth + 1)
            yield "</div>"
            at = end
        elif depth < _DEEPEST and _ITEM.fullmatch(line):
            end = _while(lines, at, lambda line: bool(_ITEM.fullmatch(line)) or line.startswith("  "))
            yield from _list(lines[at:end], depth)
            at = end
        elif "|" in line and at + 1 < len(lines) and "|" in lines[at + 1] and _DASHES.fullmatch(lines[at + 1]):
            end = _while(lines, at, lambda line: "|" in line)
            yield _table([lines[at], *lines[at + 2 : end]])
            at = end
        else:
            end = _while(lines, at + 1, _goes_on)
            yield f'<div style="margin:4px 0">{"<br>".join(map(_inline, lines[at:end]))}</div>'
            at = end


def _goes_on(line: str) -> bool:
    return bool(line.strip()) and not any(mark.fullmatch(line) for mark in _MARKS)


def _while(lines: list[str], at: int, holds: Callable[[str], bool]) -> int:
    """The index of the first line from `at` on for which it does not hold."""
    return next((index for index in range(at, len(lines)) if not holds(lines[index])), len(lines))


def _end_of_fence(lines: list[str], at: int, fence: str) -> int:
    """The line that closes a fence; the end of the text while an answer is being made."""

    def open_(line: str) -> bool:
        closing = line.strip()
        return not (closing.startswith(fence) and set(closing) == {fence[0]})

    return _while(lines, at, open_)


def _code(lines: list[str]) -> str:
    style = "background-color:rgba(128,128,128,.12);padding:6px 10px;margin:4px 0;overflow-x:auto;white-space:pre"
    return f'<pre style="{style}"><code>{html.escape(chr(10).join(lines))}</code></pre>'


def _list(lines: list[str], depth: int) -> Iterator[str]:
    """Items with what is indented below them. Bullets are text, so that the page's own lists don't restyle them."""
    own = len(lines[0]) - len(lines[0].lstrip(" "))
    at = 0
    while at < len(lines):
        found = _ITEM.fullmatch(lines[at])
        head, mark = (found[3], f"{found[2]}." if found[2] else "•") if found else (lines[at].strip(), "")
        end = _while(lines, at + 1, lambda line: len(line) - len(line.lstrip(" ")) > own)
        yield f'<div style="display:flex;margin:2px 0"><span style="min-width:1.6em">{mark}</span><div>{_inline(head)}'
        below = lines[at + 1 : end]
        margin = min((len(line) - len(line.lstrip(" ")) for line in below if line.strip()), default=0)
        yield from _blocks([line[margin:] for line in below], depth + 1)
        yield "</div></div>"
        at = end


def _table(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    heads = rows[0]
    body = [(row + [""] * len(heads))[: len(heads)] for row in rows[1:]]
    shown = [[html.Markup(_inline(cell)) for cell in row] for row in (heads, *body)]
    return html.table(shown[0], shown[1:], limit=200)


def _inline(text: str) -> str:
    """Code first, whose inside is not looked at again; then links, bold and italic in the escaped rest."""
    parts, last = [], 0
    for found in _CODE.finditer(text):
        parts += [_emphasis(text[last : found.start()]), f"<code>{html.escape(found[2].strip())}</code>"]
        last = found.end()
    return "".join([*parts, _emphasis(text[last:])])


def _emphasis(text: str) -> str:
    parts, last = [], 0
    for found in _LINK.finditer(text):
        target = html.escape(found[2])
        shown = f'<a href="{target}" target="_blank" rel="noopener noreferrer" title="{target}">{_strong(found[1])}</a>'
        parts += [_strong(text[last : found.start()]), shown]
        last = found.end()
    return "".join([*parts, _strong(text[last:])])


def _strong(text: str) -> str:
    parts, last = [], 0
    for found in _BOLD.finditer(text):  # nothing reaches into it from outside, so that elements don't cross
        parts += [_italic(text[last : found.start()]), f"<b>{_italic(found[1])}</b>"]
        last = found.end()
    return "".join([*parts, _italic(text[last:])])


def _italic(text: str) -> str:
    return _ITALIC.sub(r"<i>\1</i>", str(html.escape(text)))
