"""Readers of calls for the families that no table describes: what follows a mark, to the end of a call or of several.

A reader begins after its opener (a bare one is still unread), reads whole calls, and raises `MalformedCall` if there is
none; text read since the last whole call is then part of the answer.
"""

from __future__ import annotations

import re

from rekindle._src.text.replies.blocks import ReadOne
from rekindle._src.text.replies.call import (
    MAX_NAME,
    Calls,
    MalformedCall,
    Reading,
    ahead,
    close,
    named_call,
    peek,
    skip_space,
    take,
)
from rekindle._src.text.replies.gemma_reader import read_gemma_call
from rekindle._src.text.replies.json_reader import read_arguments, read_json_call, read_keyed_objects, read_objects
from rekindle._src.text.replies.python_reader import read_call, read_python_list
from rekindle._src.text.replies.tag_reader import CallTags, read_elements, read_tagged, read_to

QWEN_TAGS = CallTags(
    name_ends=">", argument="<parameter=", key_ends=">", value_ends="</parameter>", ends="</function>", trims=True
)
_MISTRAL_NAME = re.compile(r"[\w./-]")


def objects(calls: Calls, only_known: bool) -> Reading[None]:
    """Read a JSON object that describes a call, or an array of them."""
    yield from read_objects(calls)


def keyed_objects(calls: Calls, only_known: bool) -> Reading[None]:
    """Read an array of JSON objects with a tool's name as their only key."""
    yield from read_keyed_objects(calls)


def tagged(tags: CallTags) -> ReadOne:
    """Return the reader of a call in tags."""

    def read(calls: Calls, only_known: bool) -> Reading[None]:
        calls.emit((yield from read_tagged(calls, tags, only_known=only_known)))

    return read


def elements(mark: str) -> ReadOne:
    """Return the reader of a call with arguments as elements."""

    def read(calls: Calls, only_known: bool) -> Reading[None]:
        calls.emit((yield from read_elements(calls, mark)))

    return read


def python_list(calls: Calls, only_known: bool) -> Reading[None]:
    """Read a list of calls in Python's notation."""
    if (yield from take(calls.source, "[")):
        yield from read_python_list(calls)
    else:
        calls.emit((yield from read_call(calls, only_known=False)))


def gemma(calls: Calls, only_known: bool) -> Reading[None]:
    """Read a call of Gemma's."""
    calls.emit((yield from read_gemma_call(calls, only_known=only_known)))


def named(*ends: str) -> ReadOne:
    """Return the reader of a name that ends with one of these texts after another, and of arguments as JSON."""

    def read(calls: Calls, only_known: bool) -> Reading[None]:
        name = ""
        for end in ends:  # what stands before the name, such as an id, ends first
            name = (yield from read_to(calls.source, end, MAX_NAME)).strip()
        if not name or (only_known and name not in calls.known):
            raise MalformedCall
        calls.emit(named_call(name, (yield from read_arguments(calls, name))))

    return read


def kimi(calls: Calls, only_known: bool) -> Reading[None]:
    """Read `functions.f:0<|tool_call_argument_begin|>{…}`. What names the call is its id as well."""
    head = (yield from read_to(calls.source, "<|tool_call_argument_begin|>", MAX_NAME)).strip()
    name, _, number = head.rpartition(":")
    if not name or not (number.isascii() and number.isdigit()):
        name = head
    id = head if name != head and name.startswith("functions.") else ""
    name = name.removeprefix("functions.")
    if not name or (only_known and name not in calls.known):
        raise MalformedCall
    calls.emit(named_call(name, (yield from read_arguments(calls, name, id=id)), id))


def deepseek(calls: Calls, only_known: bool) -> Reading[None]:
    """Read `f<｜tool▁sep｜>{…}`, or `function<｜tool▁sep｜>f` with a fence of JSON on the next line."""
    source = calls.source
    name = (yield from read_to(source, "<｜tool▁sep｜>", MAX_NAME)).strip()
    fenced = False
    if name == "function" and not (yield from ahead(source, "{")):
        name = (yield from read_to(source, "\n", MAX_NAME)).strip()
        fenced = yield from take(source, "```json")
    if not name or (only_known and name not in calls.known):
        raise MalformedCall
    calls.emit(named_call(name, (yield from read_arguments(calls, name))))
    if fenced and (yield from close(source, "```")):
        calls.keep()


def command(calls: Calls) -> Reading[None]:
    """Read a fence with an array of JSON objects, after `Action:`."""
    if not (yield from take(calls.source, "```json")):
        raise MalformedCall
    yield from read_objects(calls)
    yield from close(calls.source, "```")


def gigachat(calls: Calls) -> Reading[None]:
    """Read a message with the role "function call"."""
    if not (yield from take(calls.source, "function call", "<|role_sep|>")):
        raise MalformedCall
    yield from read_objects(calls)


def recipient(calls: Calls) -> Reading[None]:
    """Read a tool's name on a line of its own and its arguments as JSON; text follows `all`."""
    name = (yield from read_to(calls.source, "\n", MAX_NAME)).strip()
    if name == "all":
        calls.keep()
        return
    if name not in calls.known:
        raise MalformedCall
    calls.emit(named_call(name, (yield from read_arguments(calls, name))))


def hermes(calls: Calls) -> Reading[None]:
    """Read `<tool_call>{"name": …, "arguments": {…}}</tool_call>` or an array of objects; its end may be missing."""
    if (yield from take(calls.source, "<function=")):
        calls.emit((yield from read_tagged(calls, QWEN_TAGS)))
    else:
        yield from read_objects(calls)
    yield from close(calls.source, "</tool_call>")


def untagged(calls: Calls) -> Reading[None]:
    """Read `<function=…>` without the `<tool_call>` before it: only a tool's name counts."""
    calls.emit((yield from read_tagged(calls, QWEN_TAGS, only_known=True)))
    yield from close(calls.source, "</tool_call>")


def bare_json(calls: Calls) -> Reading[None]:
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


def marked_json(calls: Calls) -> Reading[None]:
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


def mistral(calls: Calls) -> Reading[None]:
    """Read `[TOOL_CALLS]` with a JSON array, or with `name[ARGS]{…}` as newer models write it."""
    source = calls.source
    yield from skip_space(source)
    char = yield from peek(source)
    if char in ("[", "{"):
        yield from read_objects(calls)
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


def phi(calls: Calls) -> Reading[None]:
    """Read `functools[{"name": …, "arguments": {…}}]`, or such an array in `<|tool_call|>` and `<|/tool_call|>`."""
    yield from read_objects(calls)
    yield from close(calls.source, "<|/tool_call|>")


def bare_list(calls: Calls) -> Reading[None]:
    """Read `[name(key="value"), …]` at the beginning of a line, where the first name is a tool's."""
    calls.source.at += 1
    yield from read_python_list(calls, only_known=True)


def python_block(calls: Calls) -> Reading[None]:
    """Read a list between `<|python_start|>` and `<|python_end|>`, or JSON there: Llama 4 writes both."""
    if (yield from take(calls.source, "[")):
        yield from read_python_list(calls, only_known=False)
    elif (yield from ahead(calls.source, "{")):
        yield from marked_json(calls)
    else:
        calls.emit((yield from read_call(calls, only_known=False)))
    yield from close(calls.source, "<|python_end|>")


def function_calls(calls: Calls) -> Reading[None]:
    """Read `<function_calls>` with one call in Python's notation on each line, and `</function_calls>`."""
    while True:
        calls.emit((yield from read_call(calls, only_known=False)))
        yield from take(calls.source, ",")
        if (yield from close(calls.source, "</function_calls>")):
            return
        yield from skip_space(calls.source)
        if (yield from peek(calls.source)) == "":
            return
