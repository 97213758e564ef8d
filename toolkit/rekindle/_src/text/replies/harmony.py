"""Replies of gpt-oss in harmony: messages, each with a channel, and perhaps a tool as its recipient.

    <|channel|>analysis<|message|>…<|end|>                                                 reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                               the answer

A prompt ends with `<|start|>assistant`, or within a message that the reply goes on with. What a model says to the user
between calls, on the channel "commentary" without a recipient, is part of the answer. Text without channels is, too.
A message to somebody else than the user and the tools, such as `python`, is left out.

Muse's messages have recipients alone: `to=self` for reasoning, `to=user`, and a tool, with a call in tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rekindle._src.core.reply import ContentDelta, ReasoningDelta, ToolCallStarted
from rekindle._src.text.replies.blocks import CallBlock, CallText
from rekindle._src.text.replies.call import (
    OBJECT,
    TAGGED,
    CallForm,
    CallSyntax,
    Known,
    MalformedCall,
    NamedArguments,
    Reading,
    Token,
    ahead,
    named_call,
    peek,
    take,
)
from rekindle._src.text.replies.call_grammar import literal, mark
from rekindle._src.text.replies.json_reader import read_arguments
from rekindle._src.text.replies.marks import Thoughts
from rekindle._src.text.replies.readers import tagged
from rekindle._src.text.replies.scanner import ReplyScanner
from rekindle._src.text.replies.tag_reader import CallTags

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CLOSES = ("<|end|>", "<|call|>", "<|return|>")
NAMESPACE = "functions."
_HEADER_BEGINS = (CHANNEL, " to=", CONSTRAIN, MESSAGE)
_LONGEST = 400  # characters of a header
_NO_ROLE = re.compile(r"[^\w.]")
_CHANNEL_OF = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TO_USER = ("assistant", "user")
_BETWEEN = "\n\n"  # two messages of one kind

Kind = type[ContentDelta] | type[ReasoningDelta]


class _Message(NamedTuple):
    """A message by its header: the kind of its text, or None if it is left out, and the tool that it calls."""

    kind: Kind | None = ContentDelta
    call: str = ""  # a tool's name


class HarmonyScanner(ReplyScanner):
    """Reads one reply. `calls` says that messages to tools are calls; otherwise their channel decides."""

    _closes: tuple[str, ...] = CLOSES

    def __init__(self, *, calls: bool, known: Known, new_id: Callable[[int], str], pieces: bool = False) -> None:
        super().__init__(syntax=None, tags=None, reasoning_open=False, known=known, new_id=new_id, pieces=pieces)
        self._reads_calls = calls
        self._header_ends = (MESSAGE, START, *self._closes)
        self._body_ends = (START, CHANNEL, *self._closes)
        self._said: set[Kind] = set()
        self._fresh = True  # nothing of this message was emitted

    def go_on_from(self, prompt: str, continued: str) -> None:
        """Take the text before the reply: the prompt from its last message on. Its events count for an open call."""
        before = prompt if prompt.endswith(continued) else prompt + continued
        events = self.feed(before[before.rfind(START) :] if START in before else continued)
        self._begin_here()
        self._said.clear()
        if self._writing:
            first = max(at for at, event in enumerate(events) if isinstance(event, ToolCallStarted))
            self._events = events[first:]

    def _read(self) -> Reading[None]:
        marker = START if (yield from self._comes(START)) else ""
        self.source.at += len(marker)
        while True:
            message = _Message()
            if marker == START:
                yield from self._role()
            if marker == CHANNEL:
                message = yield from self._header(CHANNEL)
            elif marker in (START, "") and (yield from self._header_comes()):
                message = yield from self._header("")
            self._fresh = True
            if message.call:
                yield from self._call(message.call)
            marker = yield from self._body(message.kind)
            if not marker:
                return

    def _role(self) -> Reading[None]:
        """Read the role after the beginning of a message, unless it is part of a text."""
        source = self.source
        while (match := _NO_ROLE.search(source.text, source.at)) is None and not source.ended:
            if len(source.text) - source.at > _LONGEST:
                return
            yield
        if match is not None and match.end() - source.at > _LONGEST:
            return
        role = source.text[source.at : None if match is None else match.start()]
        if role == "assistant" or (yield from self._header_comes(len(role))):
            source.at += len(role)

    def _comes(self, *literals: str, after: int = 0) -> Reading[bool]:
        """True if one of these texts comes next, or `after` so many characters."""
        source = self.source
        while True:
            if source.text.startswith(literals, source.at + after):
                return True
            rest = source.text[source.at + after : source.at + after + _LONGEST]
            if source.ended or not any(literal.startswith(rest) for literal in literals):
                return False
            yield

    def _header_comes(self, after: int = 0) -> Reading[bool]:
        return self._comes(*_HEADER_BEGINS, after=after)

    def _header(self, begin: str) -> Reading[_Message]:
        """Read a header up to its message. A cut header is dropped; other text is left unread."""
        source = self.source
        while (match := self._first(self._header_ends)) is None:
            if source.ended and (begin or "<|" in source.text[source.at :]):
                source.at = len(source.text)
                return _Message()
            if source.ended or len(source.text) - source.at > _LONGEST:
                return _Message()
            yield
        if match[0] + len(match[1]) - source.at > _LONGEST:
            return _Message()
        header = begin + source.text[source.at : match[0]]
        source.at = match[0] + (len(MESSAGE) if match[1] == MESSAGE else 0)
        return self._meant(header)

    def _meant(self, header: str) -> _Message:
        channel = ""
        for match_of_channel in _CHANNEL_OF.finditer(header):  # one that was begun anew counts no more
            channel = match_of_channel[1]
        kind: Kind = ReasoningDelta if channel == "analysis" else ContentDelta
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1] in _TO_USER:
            return _Message(kind)
        if self._reads_calls:
            foreign = not recipient[1].startswith(NAMESPACE) and recipient[1] not in self.known
            return _Message(None if foreign else ContentDelta, recipient[1].removeprefix(NAMESPACE))
        return _Message(kind if recipient[1].startswith(NAMESPACE) else None)

    def _call(self, name: str) -> Reading[None]:
        """Read the arguments of a call. Text that is no JSON object is content."""
        if not (yield from ahead(self.source, "{")):
            return
        self.source.mark()
        try:
            self.emit(named_call(name, (yield from read_arguments(self, name))))
        except MalformedCall:
            self._no_call()

    def _no_call(self) -> None:
        self._give_back(self.source.since_mark())
        self._said.add(ContentDelta)
        self._fresh = False

    def _body(self, kind: Kind | None) -> Reading[str]:
        """Emit the text of a message; return the marker that ends it, which is read, or "" at the end."""
        source = self.source
        while (yield from peek(source)):
            source.mark()
            match = self._first(self._body_ends)
            end = len(source.text) - self._undecided(self._body_ends) if match is None else match[0]
            self._write_message(kind, source.text[source.at : end])
            source.at = end
            if match is not None:
                source.at += len(match[1])
                return match[1]
            if not source.ended:
                yield
        return ""

    def _write_message(self, kind: Kind | None, text: str) -> None:
        if text and kind is not None:
            if kind is ReasoningDelta:
                self._note_thoughts(self.source.place, len(text))
            self._emit(kind, _BETWEEN + text if self._fresh and kind in self._said else text)
            self._said.add(kind)
            self._fresh = False


class MuseScanner(HarmonyScanner):
    """Reads one reply of Muse's. Its messages have a recipient in place of a channel."""

    _closes = ("<|eom|>", "<|eot|>")

    def _meant(self, header: str) -> _Message:
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1] in _TO_USER:
            return _Message()
        if recipient[1] == "self":
            return _Message(ReasoningDelta)
        return _Message(call=recipient[1] if self._reads_calls else "")

    def _call(self, name: str) -> Reading[None]:
        """Read the block of calls that a message to a tool has. Other text is content."""
        if not (yield from ahead(self.source, _ATEM.begins)):
            return
        self.source.mark()
        yield from take(self.source, _ATEM.begins)
        try:
            yield from _ATEM.openers()[0].read(self)
        except MalformedCall:
            self._no_call()


def _in_message(call: NamedArguments) -> str:
    name, arguments = call
    header = f"{CHANNEL}commentary to={NAMESPACE}{name} {CONSTRAIN}json{MESSAGE}"
    return f"{header}{json.dumps(dict(arguments), ensure_ascii=False)}<|call|>"


def _harmony_form(token: Token) -> CallForm:
    channel, constrain, message = (mark(marker, token) for marker in (CHANNEL, CONSTRAIN, MESSAGE))
    to = f"commentary to={NAMESPACE}"
    return CallForm(lambda name: (channel, literal(f"{to}{name} "), constrain, literal("json"), message, OBJECT))


HARMONY = CallSyntax(
    "harmony", (), _harmony_form,
    lambda calls: f"{START}assistant".join(map(_in_message, calls)),
    signs=(CHANNEL,), markers=(START, CHANNEL, CONSTRAIN, MESSAGE, *CLOSES), several=False, in_channels=True,
)  # fmt: skip
_ATEM = CallBlock(
    tagged(CallTags('"', '<atem:parameter name="', '"', "</atem:parameter>", "</atem:invoke>", ">")),
    "<atem:function_calls>", '<atem:invoke name="', "", "</atem:function_calls>",
)  # fmt: skip
_MUSE_TEXT = CallText(
    f' to={{name}}{MESSAGE}<atem:function_calls>\n<atem:invoke name="{{name}}">\n',
    "</atem:invoke>\n</atem:function_calls>", between=f"<|eom|>{START}assistant", arguments=TAGGED,
    value=('<atem:parameter name="{key}">', "</atem:parameter>\n"),
)  # fmt: skip
_MUSE_MARKERS = (START, MESSAGE, *MuseScanner._closes)
MUSE = CallSyntax(
    "muse", (), partial(_MUSE_TEXT.form, _MUSE_MARKERS), _MUSE_TEXT.write,
    signs=("<atem:function_calls>",), markers=_MUSE_MARKERS, several=False, in_channels=True,
)  # fmt: skip
SCANNERS: dict[str, type[HarmonyScanner]] = {"harmony": HarmonyScanner, "muse": MuseScanner}
# Tags around a message of reasoning that others follow.
THOUGHTS_OF = {
    "harmony": Thoughts(f"{CHANNEL}analysis{MESSAGE}", "<|end|>", f"{START}assistant", again=True),
    "muse": Thoughts(f" to=self{MESSAGE}", "<|eom|>", f"{START}assistant", again=True),
}
LEAD_OF = {"harmony": f"{CHANNEL}final{MESSAGE}", "muse": f" to=user{MESSAGE}"}  # of answers
