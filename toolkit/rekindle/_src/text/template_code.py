"""The variables that a chat template's code reads, apart from the text that it writes."""

from __future__ import annotations

import functools
import re

_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_STRING = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_TOOLS_OF_MESSAGE = re.compile(r"\w\[\s*['\"]tools['\"]\s*\]|\w\.tools\b")


def reads(template: str, name: str) -> bool:
    """True if a template uses a variable."""
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", _without_strings(template)) is not None


def reads_tools_of_messages(template: str) -> bool:
    """True if a template takes tools from a message rather than from a variable, as Phi-4-mini's does."""
    return _TOOLS_OF_MESSAGE.search(_code(template)) is not None


def takes_tools(template: str) -> bool:
    """True if a template shows tools to the model."""
    return reads(template, "tools") or reads(template, "xml_tools") or reads_tools_of_messages(template)


def reads_calls(template: str) -> bool:
    """True if a template shows the calls in an assistant's message."""
    return "tool_calls" in _code(template)


@functools.lru_cache(maxsize=64)
def _code(template: str) -> str:
    return "\n".join(_CODE.findall(template))


@functools.lru_cache(maxsize=64)
def _without_strings(template: str) -> str:
    return _STRING.sub('""', _code(template))
