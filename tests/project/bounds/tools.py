"""Bounds on the messages of tool servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

from project.bounds.records import OURS, SERVER, SHOWN, SMALL, Bound, Other, within
from rekindle._src.integrations.mcp import limits

MESSAGE = limits.MOST_MESSAGE >> 20


def messages(count: int) -> Callable[[], object]:
    """A line of so many mebibytes, counted."""
    data = b"[" + b"[]," * ((count << 20) // 3) + b"[]]"
    return lambda: limits.unparsed_problem(data)


def parsed(count: int) -> Callable[[], object]:
    """A message of so many marks, parsed by the protocol's library, and refused by it."""
    data = b'{"jsonrpc":"1","id":1,"result":[' + b"[]," * (count // 2) + b"[]]}"

    def work() -> object:
        from mcp.types.jsonrpc import jsonrpc_message_adapter

        try:
            value = jsonrpc_message_adapter.validate_json(data, by_name=False)
        except ValueError as error:
            value = error
        return value, limits.problem_of(json.loads(data))

    return work


def results(count: int) -> Callable[[], object]:
    """Results of the most texts, made into one."""
    size = limits.MOST_MESSAGE // limits.MOST_BLOCKS
    content = [SimpleNamespace(type="text", text="a" * size)] * limits.MOST_BLOCKS
    return lambda: [limits.text_of(content) for _ in range(count)]


BOUNDS: list[Bound] = [
    SERVER(
        "integrations/mcp/limits.py: MOST_MESSAGE", counts="MiB of a tool server's message",
        most=MESSAGE, unit="one of empty lists", feed=messages, count=MESSAGE, seconds=1.0, mib=64,
    ),
    SERVER(
        "integrations/mcp/limits.py: MOST_MARKS, MOST_VALUES, MOST_DEEP",
        counts="commas, colons and brackets of a tool server's message", most=limits.MOST_MARKS, unit="an empty list",
        feed=parsed, count=limits.MOST_MARKS, seconds=1.0, mib=64,
    ),
    SERVER(
        "integrations/mcp/limits.py: MOST_RESULT, MOST_BLOCKS", counts="results of a tool", most=16,
        unit="one of the most texts", feed=results, count=16, seconds=1.0, mib=16,
    ),
]  # fmt: skip

LISTED = within("MiB of a tool server's message")
OTHERS: dict[str, dict[str, Other]] = {
    "integrations/mcp/limits.py": {
        "MOST_LISTED": LISTED, "MOST_PAGES": LISTED, "MOST_TOOLS": LISTED, "MOST_TOOL": LISTED, "MOST_NAME": SMALL,
        "MOST_ASKED": LISTED, "MOST_SERVER_NAME": SMALL, "MOST_SAID": SHOWN,
    },
    "integrations/mcp/tools.py": {"LONGEST": OURS},
}  # fmt: skip
