"""The call syntaxes of the families Qwen, SmolLM, Llama, Mistral, Phi, OLMo and gpt-oss.

A reader begins after its opener (a bare one is still unread), reads whole calls, and raises `MalformedCall` where there
is none; text read since the last whole call is then part of the answer.

Replies of gpt-oss are in harmony: messages, each with a channel, and perhaps a tool as its recipient.

    <|channel|>analysis<|message|>…<|end|>                                                 reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                               the answer

A prompt ends with `<|start|>assistant`, or within a message that the reply goes on with. What a model says to the user
between calls, on the channel "commentary" without a recipient, is part of the answer. Text without channels is, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rekindle._src.core.reply import ContentDelta, ReasoningDelta, ToolCallStarted
from rekindle._src.text.replies.call import (
    KEYWORDS,
    MAX_NAME,
    OBJECT,
    CallForm,
    Calls,
    CallSyntax,
    Known,
    MalformedCall,
    NamedArguments,
    Opener,
    Reading,
    Token,
    ahead,
    close,
    named_call,
    peek,
    skip_space,
    take,
)
from rekindle._src.text.replies.call_grammar import literal, mark, object_call
from rekindle._src.text.replies.call_reader import read_arguments, read_call, read_function, read_json_call
from rekindle._src.text.replies.scanner import ReplyScanner

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CLOSES = ("<|end|>", "<|call|>", "<|return|>")
NAMESPACE = "functions."
_HEADER_BEGINS = (CHANNEL, " to=", CONSTRAIN, MESSAGE)
_HEADER_ENDS = (MESSAGE, START, *CLOSES)
_BODY_ENDS = (START, CHANNEL, *CLOSES)
_LONGEST = 400  # characters of a header
_NO_ROLE = re.compile(r"[^\w.]")
_CHANNEL_OF = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BETWEEN = "\n\n"  # two messages of one kind

Kind = type[ContentDelta] | type[ReasoningDelta]


class _Message(NamedTuple):
    """A message by its header: the kind of its text, and the tool that it calls."""

    kind: Kind = ContentDelta
    call: str = ""  # a tool's name


class HarmonyScanner(ReplyScanner):
    """Reads one reply. `calls` says that messages to tools are calls; otherwise their channel decides."""

    def __init__(self, *, calls: bool, known: Known, new_id: Callable[[int], str], pieces: bool = False) -> None:
        super().__init__(syntax=None, tags=None, reasoning_open=False, known=known, new_id=new_id, pieces=pieces)
        self._reads_calls = calls
        self._said: set[Kind] = set()
        self._fresh = True  # nothing of this message was emitted

    def go_on_from(self, prompt: str, continued: str) -> None:
        """Take the text before the reply: the prompt from its last message on. Its events count for an open call."""
        before = prompt if prompt.endswith(continued) else prompt + continued
        events = self.feed(before[before.rfind(START) :] if START in before else continued)
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
            if message.call and (yield from ahead(self.source, "{")):
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
        """Read a header up to its message. One that is cut is dropped, and what is none is left unread."""
        source = self.source
        while (match := self._first(_HEADER_ENDS)) is None:
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
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_OF.search(header)
        if recipient is not None and self._reads_calls:
            return _Message(call=recipient[1].removeprefix(NAMESPACE))
        return _Message(ReasoningDelta if channel is not None and channel[1] == "analysis" else ContentDelta)

    def _call(self, name: str) -> Reading[None]:
        """Read the arguments of a call. Text that is no JSON object is content."""
        self.source.mark()
        try:
            self.emit(named_call(name, (yield from read_arguments(self, name))))
        except MalformedCall:
            self._give_back(self.source.since_mark())
            self._said.add(ContentDelta)
            self._fresh = False

    def _body(self, kind: Kind) -> Reading[str]:
        """Emit the text of a message; return the marker that ends it, which is read, or "" at the end."""
        source = self.source
        while (yield from peek(source)):
            source.mark()
            match = self._first(_BODY_ENDS)
            end = len(source.text) - self._undecided(_BODY_ENDS) if match is None else match[0]
            self._write_message(kind, source.text[source.at : end])
            source.at = end
            if match is not None:
                source.at += len(match[1])
                return match[1]
            if not source.ended:
                yield
        return ""

    def _write_message(self, kind: Kind, text: str) -> None:
        if text:
            self._emit(kind, _BETWEEN + text if self._fresh and kind in self._said else text)
            self._said.add(kind)
            self._fresh = False


_MISTRAL_NAME = re.compile(r"[\w./-]")


def _objects(calls: Calls) -> Reading[None]:
    """Read one JSON object, or an array of them whose end may be missing; each is a call as soon as it is whole."""
    source = calls.source
    if not (yield from take(source, "[")):
        calls.emit((yield from read_json_call(calls)))
        return
    while True:
        calls.emit((yield from read_json_call(calls)))
        more = yield from take(source, ",")
        if (yield from take(source, "]")) or not more:
            return


def _tagged(calls: Calls) -> Reading[None]:
    """Read `<tool_call>{"name": …, "arguments": {…}}</tool_call>` or an array of objects; its end may be missing."""
    if (yield from take(calls.source, "<function=")):
        calls.emit((yield from read_function(calls, only_known=False)))
    else:
        yield from _objects(calls)
    yield from close(calls.source, "</tool_call>")


def _untagged(calls: Calls) -> Reading[None]:
    """Read `<function=…>` whose `<tool_call>` the model forgot: only a tool's name counts."""
    calls.emit((yield from read_function(calls, only_known=True)))
    yield from close(calls.source, "</tool_call>")


def _bare_json(calls: Calls) -> Reading[None]:
    """Read `{"name": …, "parameters": {…}}` at the beginning of a line, several separated by `;` or nothing.

    Without a marker, only an object that names one of the tools and has arguments is a call.
    """
    while True:
        call = yield from read_json_call(calls, complete=True)
        if call.name not in calls.known:
            raise MalformedCall
        calls.emit(call)
        if not (yield from _another(calls)):
            return


def _marked_json(calls: Calls) -> Reading[None]:
    """Read JSON objects after `<|python_tag|>`, where any name counts."""
    while True:
        calls.emit((yield from read_json_call(calls)))
        if not (yield from _another(calls)):
            return


def _another(calls: Calls) -> Reading[bool]:
    """True if another object follows; its separator is read."""
    for between in ((";",), (",",), ("<|python_tag|>",), ()):
        length = yield from ahead(calls.source, *between, "{")
        if length:
            calls.source.at += length - 1
            return True
    return False


def _mistral(calls: Calls) -> Reading[None]:
    """Read `[TOOL_CALLS]` with a JSON array, or with `name[ARGS]{…}` as newer models write it."""
    source = calls.source
    yield from skip_space(source)
    char = yield from peek(source)
    if char in ("[", "{"):
        yield from _objects(calls)
        return
    name = yield from _mistral_name(calls)
    if (yield from take(source, "[CALL_ID]")):
        yield from _mistral_name(calls)
    yield from take(source, "[ARGS]")
    calls.emit(named_call(name, (yield from read_arguments(calls, name))))


def _mistral_name(calls: Calls) -> Reading[str]:
    name = ""
    yield from skip_space(calls.source)
    while (char := (yield from peek(calls.source))) and _MISTRAL_NAME.match(char):
        if len(name) == MAX_NAME:
            raise MalformedCall
        name += char
        calls.source.at += 1
    return name


def _phi(calls: Calls) -> Reading[None]:
    """Read `functools[{"name": …, "arguments": {…}}]`, or such an array in `<|tool_call|>` and `<|/tool_call|>`."""
    yield from _objects(calls)
    yield from close(calls.source, "<|/tool_call|>")


def _bare_list(calls: Calls) -> Reading[None]:
    """Read `[name(key="value"), …]` at the beginning of a line, where the first name is a tool's."""
    calls.source.at += 1
    yield from _python_list(calls, only_known=True)


def _python_list(calls: Calls, *, only_known: bool) -> Reading[None]:
    while True:
        calls.emit((yield from read_call(calls, only_known=only_known)))
        only_known = False
        more = yield from take(calls.source, ",")
        if (yield from take(calls.source, "]")) or not more:
            return


def _python_block(calls: Calls) -> Reading[None]:
    """Read a list between `<|python_start|>` and `<|python_end|>`, or JSON there: Llama 4 writes both."""
    if (yield from take(calls.source, "[")):
        yield from _python_list(calls, only_known=False)
    elif (yield from ahead(calls.source, "{")):
        yield from _marked_json(calls)
    else:
        calls.emit((yield from read_call(calls, only_known=False)))
    yield from close(calls.source, "<|python_end|>")


def _function_calls(calls: Calls) -> Reading[None]:
    """Read `<function_calls>` with one call in Python's notation on each line, and `</function_calls>`."""
    while True:
        calls.emit((yield from read_call(calls, only_known=False)))
        yield from take(calls.source, ",")
        if (yield from close(calls.source, "</function_calls>")):
            return
        yield from skip_space(calls.source)
        if (yield from peek(calls.source)) == "":
            return


# How calls are asked for, and how those of earlier replies are repeated.


def _in_object(key: str, call: NamedArguments) -> str:
    name, arguments = call
    return json.dumps({"name": name, key: dict(arguments)}, ensure_ascii=False)


def _in_python(call: NamedArguments) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in arguments.items())})"


def _in_list(calls: Sequence[NamedArguments]) -> str:
    return f"[{', '.join(_in_object('arguments', call) for call in calls)}]"


def _in_message(call: NamedArguments) -> str:
    name, arguments = call
    header = f"{CHANNEL}commentary to={NAMESPACE}{name} {CONSTRAIN}json{MESSAGE}"
    return f"{header}{json.dumps(dict(arguments), ensure_ascii=False)}<|call|>"


def _hermes_form(token: Token) -> CallForm:
    opens, closes, newline = mark("<tool_call>", token), mark("</tool_call>", token), literal("\n")
    return CallForm(lambda name: (opens, newline, *object_call("arguments", name), newline, closes), between=newline)


def _bare_form(token: Token) -> CallForm:
    return CallForm(partial(object_call, "parameters"), between=literal("; "))


def _mistral_form(token: Token) -> CallForm:
    opens = mark("[TOOL_CALLS]", token)
    if token("[ARGS]") is not None:
        return CallForm(lambda name: (opens, literal(name), mark("[ARGS]", token), OBJECT))
    return _list_form(f"{opens} {literal('[')}", literal("]"))


def _phi_form(token: Token) -> CallForm:
    if token("<|tool_call|>") is None:
        return _list_form(literal("functools["), literal("]"))
    opens, closes = mark("<|tool_call|>", token), mark("<|/tool_call|>", token)
    return _list_form(f"{opens} {literal('[')}", f"{literal(']')} {closes}")


def _list_form(begins: str, ends: str) -> CallForm:
    return CallForm(partial(object_call, "arguments"), begins, literal(", "), ends)


def _olmo_form(token: Token) -> CallForm:
    newline = literal("\n")
    begins = f"{mark('<function_calls>', token)} {newline}"
    ends = f"{newline} {mark('</function_calls>', token)}"
    return CallForm(lambda name: (literal(f"{name}("), KEYWORDS, literal(")")), begins, newline, ends)


def _harmony_form(token: Token) -> CallForm:
    channel, constrain, message = (mark(marker, token) for marker in (CHANNEL, CONSTRAIN, MESSAGE))
    to = f"commentary to={NAMESPACE}"
    return CallForm(lambda name: (channel, literal(f"{to}{name} "), constrain, literal("json"), message, OBJECT))


# Templates show the signs of several: the most particular comes first.
HARMONY = CallSyntax(
    "harmony", (), _harmony_form,
    lambda calls: f"{START}assistant".join(map(_in_message, calls)),
    signs=(CHANNEL,), markers=(START, CHANNEL, CONSTRAIN, MESSAGE, *CLOSES), several=False, in_channels=True,
)  # fmt: skip
MISTRAL = CallSyntax(
    "mistral", (Opener("[TOOL_CALLS]", _mistral),), _mistral_form,
    lambda calls: f"[TOOL_CALLS]{_in_list(calls)}",
    signs=("[TOOL_CALLS]",), markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_length=9,
)  # fmt: skip
HERMES = CallSyntax(
    "hermes", (Opener("<tool_call>", _tagged), Opener("<function=", _untagged)), _hermes_form,
    lambda calls: "\n".join(f"<tool_call>\n{_in_object('arguments', call)}\n</tool_call>" for call in calls),
    signs=("<tool_call>", "<function="), markers=("<tool_call>", "</tool_call>"),
)  # fmt: skip
PHI4MINI = CallSyntax(
    "phi4mini", (Opener("<|tool_call|>", _phi), Opener("functools", _phi)), _phi_form,
    lambda calls: f"<|tool_call|>{_in_list(calls)}<|/tool_call|>",
    signs=("<|tool_call|>", "<|tool|>", "functools["), markers=("<|tool_call|>", "<|/tool_call|>"),
)  # fmt: skip
OLMO = CallSyntax(
    "olmo", (Opener("<function_calls>", _function_calls),), _olmo_form,
    lambda calls: "\n".join(["<function_calls>", *map(_in_python, calls), "</function_calls>"]),
    signs=("<function_calls>",), markers=("<function_calls>", "</function_calls>"),
)  # fmt: skip
PYTHONIC = CallSyntax(
    "pythonic",
    (
        Opener("<|python_start|>", _python_block),
        Opener("<|python_tag|>", _python_block),
        Opener("[", _bare_list, bare=True),
        Opener("{", _bare_json, bare=True),
    ),
    _bare_form,
    lambda calls: f"[{', '.join(map(_in_python, calls))}]",
    signs=("<|python_start|>", "[func_name(", "[func_name1("),
    markers=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
)
LLAMA3_JSON = CallSyntax(
    "llama3_json", (Opener("<|python_tag|>", _marked_json), Opener("{", _bare_json, bare=True)), _bare_form,
    lambda calls: "; ".join(_in_object("parameters", call) for call in calls),
    signs=("<|python_tag|>", '"parameters": dictionary'), markers=("<|python_tag|>",), several=False,
)  # fmt: skip
SYNTAXES = {syntax.name: syntax for syntax in (HARMONY, MISTRAL, HERMES, PHI4MINI, OLMO, PYTHONIC, LLAMA3_JSON)}
