"""A conversation as bubbles: yours to the right, the model's to the left with its Markdown as safe static HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rekindle._src.core import html
from rekindle._src.core.reply import Reply
from rekindle._src.notebook.markdown import has_markup, render

_BUBBLE = "width:fit-content;max-width:min(80ch,92%);padding:4px 12px;border-radius:10px;overflow-x:auto;"
_LOOKS = {
    "user": "margin:2px 0 2px auto;background-color:rgba(61,139,205,.18)",
    "assistant": "margin:2px auto 2px 0;background-color:rgba(128,128,128,.12)",
}
_OTHER = "margin:2px 0;border:1px dashed rgba(128,128,128,.5)"  # system prompts and results of tools


def bubble(role: str, content: str) -> html.Markup:
    """Return one message with a text in HTML. A page with scripts adds a copy button after `data-said`."""
    side = "right" if role == "user" else "left"
    name = f'<div style="font-size:80%;opacity:.65;text-align:{side}">{html.escape(role)}</div>'
    inner = f'<div data-said="{html.escape(role)}" style="{_BUBBLE}{_LOOKS.get(role, _OTHER)}">{content}</div>'
    return html.Markup(f'<div style="margin:6px 0">{name}{inner}</div>')


def message(
    role: str,
    content: str,
    reply: Reply | None = None,
    *,
    key: str = "",
    images: Sequence[html.ImageLike] = (),
    most: int = html.IMAGES,
) -> html.Markup:
    """Return a complete message: Markdown if the model wrote it, else the text as it was typed.

    At most `most` of its pictures are drawn. A model's `reply` with reasoning or calls is shown by its parts; an
    unfolded part stays so under the same `key`.
    """
    if reply is not None:
        return bubble(role, _parts(reply, key))
    text = _rendered(content) if role == "assistant" else html.text(content)
    return bubble(role, f"{html.images(images, limit=most)}{text}")


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
