"""The call syntaxes of the families Qwen, SmolLM, Llama, Mistral, Phi, OLMo and gpt-oss.

A reader begins behind its opener (a bare one is still unread), reads whole calls, and raises `Malformed` where there
is none; text read since the last whole call is then part of the answer.
"""

from __future__ import annotations

import re

from rekindle._src.text.replies.call import MAX_NAME, Calls, CallSyntax, Opener, named_call
from rekindle._src.text.replies.call_reader import read_arguments, read_call, read_function, read_json_call
from rekindle._src.text.replies.harmony import HARMONY
from rekindle._src.text.replies.source import Malformed, Reading, ahead, close, peek, skip_space, take

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
            raise Malformed
        calls.emit(call)
        if not (yield from _another(calls)):
            return


def _marked_json(calls: Calls) -> Reading[None]:
    """Read JSON objects behind `<|python_tag|>`, where any name counts."""
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
            raise Malformed
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


HERMES = CallSyntax(
    "hermes",
    (Opener("<tool_call>", _tagged), Opener("<function=", _untagged)),
    markers=("<tool_call>", "</tool_call>"),
)
LLAMA3_JSON = CallSyntax(
    "llama3_json",
    (Opener("<|python_tag|>", _marked_json), Opener("{", _bare_json, bare=True)),
    markers=("<|python_tag|>",),
)
PYTHONIC = CallSyntax(
    "pythonic",
    (
        Opener("<|python_start|>", _python_block),
        Opener("<|python_tag|>", _python_block),
        Opener("[", _bare_list, bare=True),
        Opener("{", _bare_json, bare=True),
    ),
    markers=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
)
MISTRAL = CallSyntax(
    "mistral", (Opener("[TOOL_CALLS]", _mistral),), markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_length=9
)
PHI4MINI = CallSyntax(
    "phi4mini",
    (Opener("<|tool_call|>", _phi), Opener("functools", _phi)),
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
OLMO = CallSyntax(
    "olmo",
    (Opener("<function_calls>", _function_calls),),
    markers=("<function_calls>", "</function_calls>"),
)
SYNTAXES = {syntax.name: syntax for syntax in (HERMES, LLAMA3_JSON, PYTHONIC, MISTRAL, PHI4MINI, OLMO, HARMONY)}
