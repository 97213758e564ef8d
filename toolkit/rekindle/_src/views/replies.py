"""The drawing of a reply by its parts: its reasoning, folded, its answer, and its calls as cards with their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from rekindle._src.core import words
from rekindle._src.core.records import Completion
from rekindle._src.core.reply import Reply, ToolCall
from rekindle._src.views import html, style

UNREAD: Final = "not read as a call"
_LONG = 400  # characters of a result that are not folded
_CARD = (
    f"border:1px solid {style.HAIR};border-radius:6px;padding:4px 12px;margin:4px 0;width:fit-content;"
    f"max-width:min({style.WIDE},100%);box-sizing:border-box;overflow-x:auto"
)
_GRID = (
    f"display:grid;grid-template-columns:max-content minmax(0,1fr);gap:2px 12px;font-size:{style.SMALL};margin:2px 0"
)
_VALUE = "white-space:pre-wrap;overflow-wrap:anywhere"


class ReasoningFigures(NamedTuple):
    """How much a model reasoned; zeros if that is not known, such as before the end of a reply."""

    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, done: Completion) -> ReasoningFigures:
        """Return the figures of a completion."""
        return cls(done.usage.reasoning_tokens, done.timings.reasoning)


NO_FIGURES: Final = ReasoningFigures()


def summary(reasoning: str, figures: ReasoningFigures = NO_FIGURES) -> str:
    """Return the line to which reasoning is folded: its seconds and tokens, or its words."""
    if not figures.tokens:
        return f"reasoning, {words.count(len(reasoning.split()), 'word')}"
    seconds = (words.seconds(figures.seconds),) if figures.seconds >= 0.001 else ()
    return ", ".join(("reasoning", *seconds, words.count(figures.tokens, "token")))


def reply(answer: Reply) -> html.Markup:
    """Draw a reply by its parts."""
    return html.block(parts(answer))


def parts(
    answer: Reply,
    figures: ReasoningFigures = NO_FIGURES,
    *,
    render: Callable[[str], str] = html.text,
    results: Mapping[str, str] | None = None,
    key: str = "",
) -> str:
    """Draw the parts of a reply in order, calls with their `results` by ids. `render` draws the answer's text.

    Unfolded reasoning stays unfolded under the same `key`.
    """
    shown = list[str]()
    if answer.reasoning:
        shown.append(html.details(summary(answer.reasoning, figures), html.text(answer.reasoning), key=key))
    shown += [unread(text) if marked else render(text) for text, marked in split(answer)]
    shown += [card(call.name, call.arguments, (results or {}).get(call.id)) for call in answer.tool_calls]
    return "".join(shown) or html.text("")


def split(answer: Reply) -> list[tuple[str, bool]]:
    """Return the texts of the content in order; True for one that begins as a call and could not be read as one."""
    texts, at = list[tuple[str, bool]](), 0
    for text in answer.unread:
        place = answer.content.find(text, at)
        if place >= 0:
            texts += [(answer.content[at:place], False), (text, True)]
            at = place + len(text)
    texts.append((answer.content[at:], False))
    return [(text, marked) for text, marked in texts if text.strip()]


def unread(text: str) -> html.Markup:
    """Draw text that begins as a call does, and could not be read as one."""
    look = f"border-left:3px solid {style.ORANGE};padding-left:12px;margin:4px 0"
    hint = "Its beginning is that of a call, but it breaks off, or breaks the syntax of the model's family"
    return html.Markup(
        f'<div role="note" aria-label="{UNREAD}" style="{look}">{html.text(text)}'
        f"{html.line(html.with_hint(UNREAD, hint))}</div>"
    )


def card(name: str, arguments: Mapping[str, object], result: str | None = None) -> html.Markup:
    """Draw a call: the tool's name, its arguments, and its result if there is one."""
    rows = [_row(key, value if isinstance(value, str) else _as_json(value)) for key, value in arguments.items()]
    head = f'<div style="font-size:{style.SMALL}">calls <code style="font-weight:600">{html.escape(name)}</code></div>'
    answer = "" if result is None else _result(result)
    grid = f'<div style="{_GRID}">{"".join(rows)}</div>' if rows else ""
    label = html.escape(f"Call of {name}")
    return html.Markup(f'<div role="group" aria-label="{label}" style="{_CARD}">{head}{grid}{answer}</div>')


def _row(key: str, value: str) -> str:
    name = f'<span style="opacity:{style.QUIET}">{html.escape(key)}</span>'
    return f'{name}<code style="{_VALUE};background:none">{html.escape(value)}</code>'


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # of a message that was written by hand
        return str(value)


def _result(text: str) -> str:
    look = f"border-top:1px solid {style.HAIR};margin-top:4px"
    shown = html.text(text)
    if len(text) > _LONG:
        shown = html.details(f"result, {words.count(len(text), 'character')}", shown)
    else:
        shown = html.Markup(html.line("result") + shown)
    return f'<div style="{look}">{shown}</div>'


def calls_of(message: Mapping[str, object]) -> list[ToolCall]:
    """Return the calls of a message. Other libraries keep arguments as text, which becomes one argument."""
    calls, listed = list[ToolCall](), message.get("tool_calls")
    for call in listed if isinstance(listed, list | tuple) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            given = function.get("arguments")
            arguments = given if isinstance(given, Mapping) else {} if given is None else {"arguments": given}
            calls.append(ToolCall(str(call.get("id", "")), str(function.get("name")), arguments))
    return calls


def reply_of(message: Mapping[str, object]) -> Reply | None:
    """Return the parts of a message that has reasoning or calls; None for any other."""
    calls, reasoning, content = calls_of(message), message.get("reasoning_content"), message.get("content")
    if not (calls or reasoning):
        return None
    return Reply(content if isinstance(content, str) else "", str(reasoning or ""), tuple(calls))


def results_of(messages: Sequence[Mapping[str, object]], at: int) -> dict[str, str]:
    """Return the results of a message's calls by their ids, from the following messages of tools."""
    results = dict[str, str]()
    for message in messages[at + 1 :]:
        if message.get("role") != "tool":
            break
        content = message.get("content")
        results[str(message.get("tool_call_id", ""))] = content if isinstance(content, str) else _as_json(content)
    return results
