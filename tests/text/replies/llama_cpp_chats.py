"""The chats of llama.cpp's `tests/test-chat.cpp`: an interpreter of the few statements of C++ that they are written in.

The file is read from the package's source and is no part of this project. Each chat has a template, tools, the text
of a reply and its parts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)|R"(?P<mark>\w*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<text>(?:\\.|[^"\\])*)\""""
    r"""|(?P<number>\d+)|(?P<name>[A-Za-z_][\w:]*)|(?P<sign>.)""",
    re.DOTALL,
)
_SIGNATURE = re.compile(
    r"^static void (test_lfm2_parser|test_template_output_peg_parsers)\(([^)]*)\) \{$", re.MULTILINE
)


class Text(str):
    """A text of the program, as against a name or a sign."""

    __slots__ = ()


class LlamaCase(NamedTuple):
    """One reply of the file with its parts; calls are names with arguments as JSON text."""

    template: str
    text: str
    content: str
    reasoning: str
    calls: list[tuple[str, str, str]]  # name, arguments, id
    settings: dict[str, Any]
    looped: bool  # one text for several templates

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools as JSON schemas."""
        return [
            {"type": "function", "function": {"name": name, "description": about, "parameters": json.loads(schema)}}
            for name, about, schema in self.settings.get("tools", ())
        ]

    @property
    def is_whole(self) -> bool:
        """True for a whole reply to a message, that is split into parts."""
        return not any(map(self.settings.get, ("is_partial", "continue_final_message", "json_schema")))

    @property
    def keeps_reasoning(self) -> bool:
        """True if the reasoning is asked for as content."""
        return str(self.settings.get("reasoning_format", "")).endswith("_NONE")


def tokens(source: str) -> list[str]:
    """The tokens of a piece of C++: texts that follow each other are one."""
    found: list[str] = []
    for match in _TOKEN.finditer(source):
        if match["space"] is not None:
            continue
        text = match["raw"]
        if match["text"] is not None:
            text = ast.literal_eval(f'"{match["text"]}"'.replace("\n", "\\n"))
        if text is None:
            found.append(match.group())
        elif found and isinstance(found[-1], Text):
            found[-1] = Text(found[-1] + text)
        else:
            found.append(Text(text))
    return found


def _message(
    content: str = "", reasoning: str = "", name: str = "", arguments: str = "", id: str = ""
) -> dict[str, Any]:
    calls = [[name, arguments, id]] if name or id else []
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _several(reasoning: str, content: str, calls: list[list[str]]) -> dict[str, Any]:
    return {**_message(content, reasoning), "tool_calls": [[*call, ""] for call in calls]}


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "simple_assist_msg": _message,
    "message_with_tool_calls": lambda name, arguments: _message("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, why: _message("", why, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": _several,
    "message_with_content_and_tool_call": lambda content, name, arguments: _message(content, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda why, name, arguments: _message("", why, name, arguments),
    "peg_tester": lambda path, *_: path,
    "std::string": lambda text: text,
}


class _Program:
    """Runs statements: those that it does not know are skipped."""

    def __init__(self, source: str) -> None:
        self.cases: list[LlamaCase] = []
        self._functions: dict[str, tuple[list[str], list[str]]] = {}
        first = min(match.start() for match in _SIGNATURE.finditer(source))
        for match in _SIGNATURE.finditer(source):
            body = source[match.end() : source.index("\n}\n", match.end())]
            names = [part.split()[-1] for part in match[2].split(",")]
            self._functions[match[1]] = (names, tokens(body))
        self._names: dict[str, Any] = {}
        self._loops = 0
        self._run(tokens(source[:first]), self._names)

    def call(self, name: str, *arguments: Any) -> None:
        names, body = self._functions[name]
        self._run(body, {**self._names, **dict(zip(names, arguments, strict=False))})

    def _run(self, code: list[str], names: dict[str, Any]) -> None:
        at = 0
        while at < len(code):
            try:
                at = self._statement(code, at, names)
            except (LookupError, TypeError, ValueError, SyntaxError):
                at = _after(code, at)

    def _statement(self, code: list[str], at: int, names: dict[str, Any]) -> int:
        word = code[at]
        if word == "{":
            end = _closing(code, at)
            self._run(code[at + 1 : end], dict(names))
            return end + 1
        if word == "for" and code[at + 1] == "(":
            end = _closing(code, at + 1)
            colon = code.index(":", at, end)
            values, _ = self._value(code, colon + 1, names)
            stop = _closing(code, end + 1)
            self._loops += 1
            for value in values:
                self._run(code[end + 2 : stop], {**names, code[colon - 1]: value})
            self._loops -= 1
            return stop + 1
        if word in self._functions and code[at + 1] == "(":
            arguments, at = self._values(code, at + 2, ")", names)
            self.call(word, *arguments)
            return at + 1
        if code[at + 1] == "." and code[at + 2] == "test":
            return self._case(code, at, names)
        if code[at + 1] == "." and code[at + 3] == "=":
            names[word][code[at + 2]], at = self._value(code, at + 4, names)
            return at + 1
        while isinstance(code[at], str) and (code[at] in ("static", "const", "*") or _is_type(code, at)):
            at += 1
        if code[at + 1] == "=":
            names[code[at]], end = self._value(code, at + 2, names)
            return end + 1
        if code[at + 1] == "{":
            names[code[at]], end = self._value(code, at + 1, names)
            return end + 1
        if code[at + 1] == ";":
            names[code[at]] = _message()
            return at + 2
        raise ValueError(code[at])

    def _case(self, code: list[str], at: int, names: dict[str, Any]) -> int:
        template = names[code[at]]
        (text, *_), at = self._values(code, at + 4, ")", names)
        settings: dict[str, Any] = {}
        expected = _message()
        while code[at] == ".":
            method = code[at + 1]
            arguments, at = self._values(code, at + 3, ")", names)
            value = arguments[0] if arguments else None
            if method == "expect":
                expected = {**value}
            elif method.startswith("expect_") and method != "expect_reconstruction":
                key = {"content": "content", "reasoning": "reasoning_content", "tool_calls": "tool_calls"}
                expected[key[method.removeprefix("expect_")]] = value
            elif method != "run":
                settings[method] = True if value is None else value
        calls = [(name, arguments, id or "") for name, arguments, id in expected["tool_calls"]]
        content, reasoning, looped = expected["content"], expected["reasoning_content"], self._loops > 0
        self.cases.append(LlamaCase(Path(template).name, text, content, reasoning, calls, settings, looped))
        return at + 1

    def _values(self, code: list[str], at: int, end: str, names: dict[str, Any]) -> tuple[list[Any], int]:
        values = []
        while code[at] != end:
            value, at = self._value(code, at, names)
            values.append(value)
            if code[at] == ",":
                at += 1
        return values, at + 1

    def _value(self, code: list[str], at: int, names: dict[str, Any]) -> tuple[Any, int]:
        value, at = self._one(code, at, names)
        while at < len(code) and (code[at] == "+" or (isinstance(code[at], Text) and isinstance(value, str))):
            more, at = self._one(code, at + (code[at] == "+"), names)
            value += more
        return value, at

    def _one(self, code: list[str], at: int, names: dict[str, Any]) -> tuple[Any, int]:
        word = code[at]
        if isinstance(word, Text):
            return str(word), at + 1
        if word == "{":
            return self._values(code, at + 1, "}", names)
        if word in ("true", "false"):
            return word == "true", at + 1
        if word.startswith("COMMON_"):
            return word, at + 1
        if code[at + 1] == "(":
            arguments, at = self._values(code, at + 2, ")", names)
            return _FUNCTIONS[word](*arguments), at
        return names[word], at + 1


def _is_type(code: list[str], at: int) -> bool:
    return code[at][:1].isalpha() and (code[at + 1][:1].isalpha() or code[at + 1] in ("*", "&"))


def _closing(code: list[str], at: int) -> int:
    pairs, depth = {"{": 1, "(": 1, "}": -1, ")": -1}, 0
    for place in range(at, len(code)):
        if not isinstance(code[place], Text):
            depth += pairs.get(code[place], 0)
        if depth == 0:
            return place
    raise ValueError("brackets that do not close")


def _after(code: list[str], at: int) -> int:
    """The place after a statement that is skipped."""
    while at < len(code) and code[at] not in (";", "}"):
        at = _closing(code, at) + 1 if code[at] in ("{", "(") and not isinstance(code[at], Text) else at + 1
        if at < len(code) and code[at - 1] == "}" and code[at] not in (";", ",", ".", ")"):
            return at
    return at + 1


def llama_cases(source: Path) -> Iterator[LlamaCase]:
    """Every chat of the tests, from the folder of llama.cpp's source."""
    program = _Program((source / "tests" / "test-chat.cpp").read_text())
    program.call("test_template_output_peg_parsers", False)
    yield from program.cases
