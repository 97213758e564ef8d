"""The syntaxes of the families: how Qwen, SmolLM, Llama, Mistral, Phi and OLMo write calls.

A reader begins behind the opener (a bare opener is still there), reads whole calls and raises `Malformed` where
there is none; what was read since the last whole call is then part of the answer's text.
"""

from __future__ import annotations

from rekindle._src.text.replies.call import json_calls
from rekindle._src.text.replies.json_reader import read_json
from rekindle._src.text.replies.source import Malformed, Reading, ahead, take
from rekindle._src.text.replies.syntax import Calls, CallSyntax, Opener


def _tagged(calls: Calls) -> Reading[None]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or an array of such objects; its end may be missing."""
    calls.found(*json_calls((yield from read_json(calls.source))))
    yield from take(calls.source, "</tool_call>")


def _bare_json(calls: Calls) -> Reading[None]:
    """`{"name": …, "parameters": {…}}` at the beginning of a line, several of them separated by `;` or nothing.

    Without a marker, only an object that names one of the tools and has arguments is a call.
    """
    while True:
        text = yield from read_json(calls.source)
        made = json_calls(text)
        if any(call.name not in calls.known for call in made) or not made or '"parameters"' not in text:
            raise Malformed
        calls.found(*made)
        if not (yield from _separated(calls)):
            return


def _marked_json(calls: Calls) -> Reading[None]:
    """The same behind `<|python_tag|>`, where any name counts."""
    while True:
        calls.found(*json_calls((yield from read_json(calls.source))))
        if not (yield from _separated(calls)):
            return


def _separated(calls: Calls) -> Reading[bool]:
    """Whether another object follows; what separates it is read."""
    for separator in (";", ",", "<|python_tag|>", ""):
        together = (separator, "{") if separator else ("{",)
        length = yield from ahead(calls.source, *together)
        if length:
            calls.source.at += length - 1
            return True
    return False


HERMES = CallSyntax("hermes", (Opener("<tool_call>", _tagged),), markers=("<tool_call>", "</tool_call>"))
LLAMA3_JSON = CallSyntax(
    "llama3_json",
    (Opener("<|python_tag|>", _marked_json), Opener("{", _bare_json, bare=True)),
    markers=("<|python_tag|>",),
)
