"""A conversation as static HTML: your messages to the right, the model's Markdown to the left, a quiet line below it.

An element with `data-press` has no content of its own: a page with scripts makes it a button. So what is saved shows
nothing that could not be pressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rekindle._src.core import words
from rekindle._src.core.reply import Reply
from rekindle._src.notebook.markdown import has_markup, render
from rekindle._src.views import html, replies, style
from rekindle._src.views.branches import Place

_SHADED = "width:fit-content;max-width:min(80ch,85%);padding:6px 14px;border-radius:12px;overflow-x:auto"
_LOOKS = {
    "user": f"{_SHADED};background-color:{style.shade(style.BLUE, 0.4)}",
    "assistant": f"max-width:{style.WIDE};overflow-x:auto",
}
_FOLDED = {"system": "system prompt", "tool": "result of a tool", "developer": "instructions"}
_ONE_AND_ONLY = Place(1, 1)


class Action(NamedTuple):
    """Something that can be done with a message; a page with scripts shows it as a button."""

    name: str
    label: str
    title: str = ""
    look: str = "quiet"  # "quiet" has no outline until it is pointed at, "plain" has one

    def draw(self, at: int) -> str:
        facts = f'data-press="{self.name}" data-at="{at}" data-label="{html.escape(self.label)}"'
        facts += "" if self.look == "quiet" else f' data-look="{self.look}"'
        return f'<span {facts} title="{html.escape(self.title)}"></span>'


COPY = Action("copy", "Copy")
EDIT = Action("edit", "Edit", "Write it anew; this version and its answers stay")
AGAIN = Action("again", "Again", "Another answer; this one stays")
FORK = Action("pick", "Fork", "Click a token, and go on from there with something else")
CONTINUE = Action("continue", "Continue", "Go on with the answer where it ends")
_BACK, _ON = Action("earlier", "‹", "The version before"), Action("later", "›", "The next version")


def turn(
    role: str,
    content: str,
    *,
    at: int = 0,
    actions: Sequence[Action] = (COPY,),
    quiet: Sequence[object] = (),
    place: Place = _ONE_AND_ONLY,
) -> html.Markup:
    """Return one message with a text in HTML, its versions, what can be done with it, and a quiet line below it."""
    shown = f'<div data-said="{html.escape(role)}" style="{_LOOKS.get(role, "")}">{content}</div>'
    if role in _FOLDED:
        shown = html.details(_FOLDED[role], shown, key=f"{role} {at}")
    facts = " · ".join(html.escape(part) for part in quiet if part)
    versions = f"{_BACK.draw(at)}<span>{place}</span>{_ON.draw(at)}" if place.total > 1 else ""
    look = f"display:flex;flex-wrap:wrap;gap:2px 8px;align-items:center;font-size:{style.TINY}"
    below = f'{versions}<span style="opacity:{style.QUIET}">{facts}</span>' if facts else versions
    acts = f'<div class="rekindle-acts" style="{look}">{below}{"".join(action.draw(at) for action in actions)}</div>'
    whole, parts = "margin:16px 0", f"{shown}{acts}"
    if role == "user":  # what can be done stands at its side, where it takes no room of its own
        whole, parts = f"{whole};display:flex;justify-content:flex-end;align-items:center;gap:8px", f"{acts}{shown}"
    return html.Markup(
        f'<div class="rekindle-turn" role="article" aria-label="{html.escape(_speaker(role))}" style="{whole}">'
        f"{parts}</div>"
    )


def head(title: str, *facts: str) -> html.Markup:
    """Return a conversation's title, with quiet facts next to it."""
    looks = "display:flex;flex-wrap:wrap;gap:0 12px;align-items:baseline;max-width:52em;margin:4px 0"
    name = f'<span role="heading" aria-level="3" style="font-weight:600">{html.escape(words.shorten(title, 60))}</span>'
    return html.Markup(f'<div style="{looks}">{name}{html.line(*facts)}</div>')


def lost(at: int, place: Place) -> html.Markup:
    """Return a line that leads back to the versions of an edited message."""
    if not place.total:
        return html.Markup("")
    line = f"{words.count(place.total, 'earlier version')} of this message"
    back = Action("earlier", "‹ Back", "Show the version before").draw(at)
    look = f"display:flex;justify-content:flex-end;gap:8px;font-size:{style.TINY}"
    return html.Markup(f'<div style="{look}"><span style="opacity:{style.QUIET}">{line}</span>{back}</div>')


def _speaker(role: str) -> str:
    return {"user": "You", "assistant": "Answer"}.get(role, _FOLDED.get(role, role))


def body(
    role: str, content: str, reply: Reply | None = None, *, figures: replies.ReasoningFigures = replies.NO_FIGURES,
    results: Mapping[str, str] | None = None, key: str = "", attached: str = "",
) -> str:  # fmt: skip
    """Return a complete message: Markdown if the model wrote it, else the text as it was typed.

    HTML of what is `attached` comes first. A model's `reply` with reasoning or calls is shown by its parts, its calls
    with their `results`; an unfolded part stays so under the same `key`.
    """
    if reply is not None:
        return replies.parts(reply, figures, render=_rendered, results=results, key=key)
    text = _rendered(content) if role == "assistant" else html.text(content)
    return f"{attached}{text}"


def answer(
    pieces: Iterable[tuple[str, int]],
    *,
    marked: int | None,
    complete: bool,
    picking: bool = False,
    reply: Reply | None = None,
    figures: replies.ReasoningFigures = replies.NO_FIGURES,
    key: str = "",
) -> str:
    """Return the last answer with clickable tokens, from its texts and the number of tokens of each.

    A complete answer with Markdown is rendered, with the tokens folded below it, unless one is picked or marked. A
    `reply` with reasoning or calls is shown by its parts from the beginning.
    """
    pieces = list(pieces)
    text = "".join(piece for piece, _ in pieces)
    tokens = "".join(_clickable(pieces, marked, complete))
    if reply is not None:
        shown = replies.parts(reply, figures, render=_rendered, key=key) + ("" if complete else _CARET)
    elif complete and has_markup(text):
        shown = render(text)
    else:
        return tokens
    opened = picking or marked is not None
    return f"{shown}{html.details('tokens: click one to fork there', tokens, key='tokens', opened=opened)}"


_CARET = '<span aria-hidden="true"> ▌</span>'


def _rendered(content: str) -> str:
    return render(content) if has_markup(content) else html.text(content)


_MARK = f"background:{style.shade(style.ORANGE, 0.9)};outline:2px solid {style.ORANGE};border-radius:2px"


def _clickable(pieces: list[tuple[str, int]], marked: int | None, complete: bool) -> Iterator[str]:
    yield '<div data-tokens="" style="white-space:pre-wrap;overflow-wrap:anywhere;max-width:80ch;margin:4px 0">'
    index = 0
    for text, tokens in pieces:
        highlighted = marked is not None and 0 <= marked - index < tokens
        look = f' style="{_MARK}" aria-current="true"' if highlighted else ""
        yield f'<span data-token="{index}"{look}>{html.escape(visible(text) if highlighted else text)}</span>'
        index += tokens
    yield "</div>" if complete else f"{_CARET}</div>"


def visible(text: str) -> str:
    """Return a token's text with signs in place of the blanks at its ends, or that it consists of."""
    inner = text.strip()
    before, after = (
        text[: len(text) - len(text.lstrip())] if inner else text,
        text[len(text.rstrip()) :] if inner else "",
    )
    signs = str.maketrans({" ": "␣", "\t": "⇥", "\n": "⏎\n"})
    return f"{before.translate(signs)}{inner}{after.translate(signs)}"


class Alternative(NamedTuple):
    """A token that could stand at another one's place, and how likely it was there."""

    text: str
    probability: float
    chosen: bool = False


_PRESS = '<span class="rekindle-live" style="display:none"> · press one to write it into the field</span>'


def choices(entries: Sequence[Alternative]) -> html.Markup:
    """Return the alternatives at a token as bars. A page with scripts takes the text of one that is pressed."""
    rows = "".join(_choice(place, entry) for place, entry in enumerate(entries))
    look = "display:grid;grid-template-columns:max-content 12em max-content;gap:2px 8px;align-items:center"
    look += f";margin:4px 0 12px;font-size:{style.SMALL}"
    head = html.line(html.Markup(f"what could stand at the marked token, and how likely each was{_PRESS}"))
    return html.Markup(f'{head}<div aria-label="What could stand here" style="{look}">{rows}</div>')


def _choice(place: int, entry: Alternative) -> str:
    weight = "600" if entry.chosen else "400"
    name = html.escape(visible(words.shorten(entry.text, 24)).replace("\n", ""))
    label = f'data-row="use" data-at="{place}" title="Put this into the field"'
    bar = f'<span style="height:.8em;border-radius:2px;width:{max(0.5, 100 * entry.probability):.1f}%;'
    bar += f'background:{style.BLUE if entry.chosen else style.shade(style.BLUE, 1.0)}"></span>'
    return (
        f'<code {label} style="font-weight:{weight};background:none">{name}</code>{bar}'
        f'<span style="opacity:{style.QUIET}">{words.share(entry.probability)}</span>'
    )
