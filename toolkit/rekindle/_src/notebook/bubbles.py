"""A conversation as bubbles: yours to the right, the model's to the left with its Markdown as safe static HTML.

A text is escaped first, and only known elements of Markdown are rendered: headings, paragraphs, lists, quotes, rules,
fenced and inline code, tables, bold, italic, and links to web pages. HTML in the text stays text. Images are not shown,
since loading one tells its server that the text was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from rekindle._src.core import html
from rekindle._src.core.reply import Reply

_BUBBLE = "width:fit-content;max-width:min(80ch,92%);padding:4px 12px;border-radius:10px;overflow-x:auto;"
_LOOKS = {
    "user": "margin:2px 0 2px auto;background-color:rgba(61,139,205,.18)",
    "assistant": "margin:2px auto 2px 0;background-color:rgba(128,128,128,.12)",
}
_OTHER = "margin:2px 0;border:1px dashed rgba(128,128,128,.5)"  # system prompts and results of tools

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
_DEEPEST = 8  # nesting of quotes and lists
_SIZES = ("130%", "120%", "110%", "100%", "100%", "100%")


def bubble(role: str, content: str) -> html.Markup:
    """Return one message with a text in HTML. A page with scripts adds a copy button behind `data-said`."""
    side = "right" if role == "user" else "left"
    name = f'<div style="font-size:80%;opacity:.65;text-align:{side}">{html.escape(role)}</div>'
    inner = f'<div data-said="{html.escape(role)}" style="{_BUBBLE}{_LOOKS.get(role, _OTHER)}">{content}</div>'
    return html.Markup(f'<div style="margin:6px 0">{name}{inner}</div>')


def message(role: str, content: str, reply: Reply | None = None, *, key: str = "") -> html.Markup:
    """Return a complete message: Markdown if the model wrote it, else the text as it was typed.

    A model's `reply` with reasoning or calls is shown by its parts; an unfolded part stays so under the same `key`.
    """
    if reply is not None:
        return bubble(role, _parts(reply, key))
    return bubble(role, _rendered(content) if role == "assistant" else html.text(content))


def answer(
    pieces: Iterable[tuple[str, int]], *, marked: int | None, complete: bool, reply: Reply | None = None, key: str = ""
) -> html.Markup:
    """Return the last answer with clickable tokens, from its texts and the number of tokens of each.

    A complete answer with Markdown is rendered, with the tokens folded below it. A `reply` with reasoning or calls is
    shown by its parts from the beginning.
    """
    pieces = list(pieces)
    text = "".join(piece for piece, _ in pieces)
    tokens = "".join(_clickable(pieces, marked, complete))
    if reply is not None:
        body = _parts(reply, key) + ("" if complete else " ▌")
    elif complete and has_markup(text):
        body = render(text)
    else:
        hint = html.line("Click a token to write something else there, and go on from it") if complete and text else ""
        return html.block(bubble("assistant", tokens), hint)
    return html.block(bubble("assistant", body), html.details("tokens: click one to fork there", tokens, key="tokens"))


def _parts(reply: Reply, key: str) -> str:
    """Return a reply's parts: the reasoning, folded, then the content, then the tool calls."""
    reasoning = html.details("reasoning", html.text(reply.reasoning), key=key) if reply.reasoning else ""
    content = _rendered(reply.content) if reply.content.strip() else ""
    return f"{reasoning}{content}{''.join(html.code(str(call)) for call in reply.tool_calls)}"


def _rendered(content: str) -> str:
    return render(content) if has_markup(content) else html.text(content)


def _clickable(pieces: list[tuple[str, int]], marked: int | None, complete: bool) -> Iterator[str]:
    yield '<div style="white-space:pre-wrap;max-width:80ch;margin:4px 0">'
    index = 0
    for text, tokens in pieces:
        highlighted = marked is not None and 0 <= marked - index < tokens
        style = ' style="background:rgba(128,128,128,.45);border-radius:2px"' if highlighted else ""
        yield f'<span data-token="{index}"{style}>{html.escape(text)}</span>'
        index += tokens
    yield "</div>" if complete else " ▌</div>"


def has_markup(text: str) -> bool:
    """True if the text has Markdown to render. Plain text is shown as it is."""
    if any(mark.fullmatch(line) for line in text.split("\n") for mark in _MARKS):
        return True
    return any(mark.search(text) for mark in (_CODE, _LINK, _BOLD, _ITALIC))


def render(text: str) -> html.Markup:
    """Return the text as HTML with inline styles, without scripts."""
    return html.Markup("".join(_blocks(text.split("\n"), 0)))


def _blocks(lines: list[str], depth: int) -> Iterator[str]:
    index = 0
    while index < len(lines):
        line = lines[index]
        if match := _FENCE.fullmatch(line):
            end = _end_of_fence(lines, index + 1, match[1])
            yield _code(lines[index + 1 : end])
            index = end + 1
        elif not line.strip():
            index += 1
        elif match := _HEADING.fullmatch(line):
            size = _SIZES[len(match[1]) - 1]
            yield f'<div style="font-weight:600;font-size:{size};margin:8px 0 4px">{_inline(match[2])}</div>'
            index += 1
        elif _RULE.fullmatch(line):
            yield '<hr style="border:none;border-top:1px solid rgba(128,128,128,.5)">'
            index += 1
        elif depth < _DEEPEST and _QUOTE.fullmatch(line):
            end = _while(lines, index, lambda line: bool(_QUOTE.fullmatch(line)))
            inner = [_QUOTE.fullmatch(line)[1] for line in lines[index:end]]  # type: ignore[index]
            yield '<div style="border-left:3px solid rgba(128,128,128,.5);padding-left:10px;margin:4px 0">'
            yield from _blocks(inner, depth + 1)
            yield "</div>"
            index = end
        elif depth < _DEEPEST and _ITEM.fullmatch(line):
            end = _while(lines, index, lambda line: bool(_ITEM.fullmatch(line)) or line.startswith("  "))
            yield from _list(lines[index:end], depth)
            index = end
        elif "|" in line and index + 1 < len(lines) and "|" in lines[index + 1] and _DASHES.fullmatch(lines[index + 1]):
            end = _while(lines, index, lambda line: "|" in line)
            yield _table([lines[index], *lines[index + 2 : end]])
            index = end
        else:
            end = _while(lines, index + 1, _goes_on)
            yield f'<div style="margin:4px 0">{"<br>".join(map(_inline, lines[index:end]))}</div>'
            index = end


def _goes_on(line: str) -> bool:
    return bool(line.strip()) and not any(mark.fullmatch(line) for mark in _MARKS)


def _while(lines: list[str], start: int, holds: Callable[[str], bool]) -> int:
    """Return the index of the first line from `start` on for which `holds` is False."""
    return next((index for index in range(start, len(lines)) if not holds(lines[index])), len(lines))


def _end_of_fence(lines: list[str], start: int, fence: str) -> int:
    """Return the index of the line that closes a fence, or of the text's end in an unfinished answer."""

    def open_(line: str) -> bool:
        closing = line.strip()
        return not (closing.startswith(fence) and set(closing) == {fence[0]})

    return _while(lines, start, open_)


def _code(lines: list[str]) -> str:
    style = "background-color:rgba(128,128,128,.12);padding:6px 10px;margin:4px 0;overflow-x:auto;white-space:pre"
    return f'<pre style="{style}"><code>{html.escape(chr(10).join(lines))}</code></pre>'


def _list(lines: list[str], depth: int) -> Iterator[str]:
    """Yield items with the lines indented below them. Bullets are text, so the page's list styles don't apply."""
    outer_indent = len(lines[0]) - len(lines[0].lstrip(" "))
    index = 0
    while index < len(lines):
        match = _ITEM.fullmatch(lines[index])
        head, mark = (match[3], f"{match[2]}." if match[2] else "•") if match else (lines[index].strip(), "")
        end = _while(lines, index + 1, lambda line: len(line) - len(line.lstrip(" ")) > outer_indent)
        yield f'<div style="display:flex;margin:2px 0"><span style="min-width:1.6em">{mark}</span><div>{_inline(head)}'
        children = lines[index + 1 : end]
        margin = min((len(line) - len(line.lstrip(" ")) for line in children if line.strip()), default=0)
        yield from _blocks([line[margin:] for line in children], depth + 1)
        yield "</div></div>"
        index = end


def _table(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    heads = rows[0]
    body = [(row + [""] * len(heads))[: len(heads)] for row in rows[1:]]
    cells = [[html.Markup(_inline(cell)) for cell in row] for row in (heads, *body)]
    return html.table(cells[0], cells[1:], limit=200)


def _inline(text: str) -> str:
    """Render code first, without markup inside it, then links, bold and italic in the escaped rest."""
    parts, end = [], 0
    for match in _CODE.finditer(text):
        parts += [_emphasis(text[end : match.start()]), f"<code>{html.escape(match[2].strip())}</code>"]
        end = match.end()
    return "".join([*parts, _emphasis(text[end:])])


def _emphasis(text: str) -> str:
    parts, end = [], 0
    for match in _LINK.finditer(text):
        target = html.escape(match[2])
        link = f'<a href="{target}" target="_blank" rel="noopener noreferrer" title="{target}">{_strong(match[1])}</a>'
        parts += [_strong(text[end : match.start()]), link]
        end = match.end()
    return "".join([*parts, _strong(text[end:])])


def _strong(text: str) -> str:
    parts, end = [], 0
    for match in _BOLD.finditer(text):  # no element crosses its bounds, so elements nest
        parts += [_italic(text[end : match.start()]), f"<b>{_italic(match[1])}</b>"]
        end = match.end()
    return "".join([*parts, _italic(text[end:])])


def _italic(text: str) -> str:
    return _ITALIC.sub(r"<i>\1</i>", str(html.escape(text)))
