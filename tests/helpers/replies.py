"""Replies of every family as their models write them, with what they hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rekindle._src.text.replies import Reply, ReplyFormat
from rekindle._src.text.replies.families import SYNTAXES

THINK = ("<think>", "</think>")


def tool(name: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("weather", city="string", days="integer"), tool("time"), tool("write", path="string", text="string")]


class Example(NamedTuple):
    family: str
    text: str
    content: str
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    reasoning: str = ""
    opened: bool = False  # the prompt ends inside of reasoning

    @property
    def format(self) -> ReplyFormat:
        return ReplyFormat(SYNTAXES[self.family], THINK)


PARIS, ROME = ("weather", {"city": "Paris"}), ("weather", {"city": "Rome", "days": 3})
CODE = ("write", {"path": "a.py", "text": 'if x:\n    print("}]</tool_call>")\n'})
_P, _R = '{"city": "Paris"}', '{"city": "Rome", "days": 3}'

EXAMPLES = [
    Example("hermes", "Hello", "Hello"),
    Example("hermes", "  Hello \n", "  Hello \n"),
    Example("hermes", "", ""),
    Example("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {_P}}}\n</tool_call>', "", [PARIS]),
    Example(
        "hermes", f'Let me look.\n\n<tool_call>\n{{"name": "weather", "arguments": {_P}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "weather", "arguments": {_R}}}\n</tool_call>\n', "Let me look.", [PARIS, ROME]
    ),
    Example("hermes", f'<tool_call>{{"arguments": {_P}, "name": "weather"}}</tool_call> Done.', "Done.", [PARIS]),
    Example(
        "hermes",
        f'<tool_call>[{{"name": "weather", "arguments": {_P}}}, {{"name": "time", "arguments": {{}}}}]</tool_call>', "",
        [PARIS, ("time", {})]
    ),
    Example("hermes", f'<tool_call>{{"name": "write", "arguments": {json.dumps(CODE[1])}}}</tool_call>', "", [CODE]),
    Example(
        "hermes",
        f'<think>\nI should look.\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {_P}}}\n</tool_call>', "",
        [PARIS], "I should look."
    ),
    Example("hermes", "<think>\n\n</think>\n\nHi", "Hi"),
    Example("hermes", "Hm. Or </th not?\n</think>\n\nYes.", "Yes.", (), "Hm. Or </th not?", opened=True),
    Example("hermes", "still thinking", "", (), "still thinking", opened=True),
    Example("hermes", "<think>twice</think>once", "once", (), "twice", opened=True),
    Example(
        "hermes",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>", "", [ROME]
    ),
    Example("llama3_json", f'{{"name": "weather", "parameters": {_P}}}', "", [PARIS]),
    Example("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {_P}}}', "", [PARIS]),
    Example(
        "llama3_json",
        f'{{"type": "function", "name": "weather", "parameters": {_P}}}; {{"name": "time", "parameters": {{}}}}', "",
        [PARIS, ("time", {})]
    ),
    Example(
        "llama3_json", f'{{"name": "weather", "parameters": {_P}}}\n\nWould you like more?', "Would you like more?",
        [PARIS]
    ),
    Example("llama3_json", 'A user:\n{"name": "Alice", "age": 3}', 'A user:\n{"name": "Alice", "age": 3}'),
    Example("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_P}}}]', "", [PARIS]),
    Example(
        "mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {_P}}}, {{"name": "weather", "arguments": {_R}}}]',
        "", [PARIS, ROME]
    ),
    Example("mistral", f"Sure.[TOOL_CALLS]weather[ARGS]{_P}[TOOL_CALLS]time[ARGS]{{}}", "Sure.", [PARIS, ("time", {})]),
    Example("mistral", f"[TOOL_CALLS]weather{_R}", "", [ROME]),
    Example("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{_R}", "", [ROME]),
    Example("phi4mini", f'functools[{{"name": "weather", "arguments": {_P}}}]', "", [PARIS]),
    Example("phi4mini", f'<|tool_call|>[{{"name": "weather", "parameters": {_P}}}]<|/tool_call|>', "", [PARIS]),
    Example("phi4mini", "functools.partial binds arguments", "functools.partial binds arguments"),
    Example("pythonic", "[weather(city='Paris')]", "", [PARIS]),
    Example("pythonic", '[weather(city="Rome", days=3), time()]', "", [ROME, ("time", {})]),
    Example("pythonic", 'Sure:\n[weather("Rome", 3)]\nDone.', "Sure:\n\nDone.", [ROME]),
    Example("pythonic", '<|python_start|>[weather(city="Paris")]<|python_end|>', "", [PARIS]),
    Example("pythonic", f'<|python_start|>{{"name": "weather", "parameters": {_P}}}<|python_end|>', "", [PARIS]),
    Example("pythonic", "[1] is a reference", "[1] is a reference"),
    Example("pythonic", '[write(path="a.py", text=\'if x:\\n    print("}]</tool_call>")\\n\')]', "", [CODE]),
    Example("olmo", "<function_calls>\nweather(city=\"Paris\")\n</function_calls>", "", [PARIS]),
    Example(
        "olmo",
        '<function_calls>weather(city="Rome", days=3)\nwrite(path=null, text=["a", {"b": true}])</function_calls>', "",
        [ROME, ("write", {"path": None, "text": ["a", {"b": True}]})]
    ),
    Example("harmony", "<|channel|>final<|message|>Yes.\n", "Yes.\n"),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>Is it?\n<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Yes.", (), "Is it?\n"
    ),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_P}<|call|>",
        "One moment.", [PARIS], "Look."
    ),
    Example("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{_R}<|call|>", "", [ROME]),
    Example(
        "harmony", f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{json.dumps(CODE[1])}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>", "",
        [CODE, ("time", {})]
    ),
    Example(
        "harmony", "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
        "One.\n\nTwo."
    ),
    Example("harmony", "No channels at all.", "No channels at all."),
    Example("harmony", "<|channel|>final", ""),
    Example("harmony", "<|channel|>analysis<|message|>still thinking", "", (), "still thinking"),
    Example(
        "harmony", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Par',
        '{"city": "Par'
    ),
    Example("harmony", "<|channel|>commentary to=functions.time code<|message|>print(1)<|call|>", "print(1)"),
]  # fmt: skip

# What looks like a call and is none, or was cut: everything is content.
CONTENT = [
    (family, text)
    for family, texts in {
        "hermes": [
            "<tool_call>", "<tool_call", "<tool_call>weather</tool_call>",
            '<tool_call>{"name": "weather", "arguments": {"city": "Par',
            '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}</tool_call>',
            '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "<tool_call>{'name': 'weather'}</tool_call>",
            "<tool_call>[]</tool_call>", "<function=unknown></function>",
            '{"name": "weather", "arguments": {"city": "Paris"}}',
        ],
        "llama3_json": [
            '{"name": "unknown", "parameters": {}}', '{"name": "weather"}',
            'Use {"name": "weather", "parameters": {}} for that', "{", '{"a": [1, 2, {"b": null}], "c": -1.5e3}',
        ],
        "mistral": [
            "[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]weather[ARGS]",
        ],
        "phi4mini": [
            "functools", "functools[1, 2]",
        ],
        "pythonic": [
            "[weather(city=", "[weather(city=town)]", "[unknown()]", "[weather(city='Paris'",
        ],
        "olmo": [
            "<function_calls></function_calls>", "<function_calls>weather(city=f'x')</function_calls>",
        ],
    }.items()
    for text in texts
]  # fmt: skip


def said(reply: Reply) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    return reply.content, reply.reasoning, [(call.name, dict(call.arguments)) for call in reply.tool_calls]
