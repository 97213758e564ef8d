"""Bounds on the messages of tool servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

from project.bounds.records import OURS, SERVER, SHOWN, SMALL, Bound, Other, within
from rekindle._src.integrations.mcp import limits

MESSAGE = limits.MOST_MESSAGE >> 20


def messages(count: int) -> Callable[[], object]:
    """A line of so many mebibytes, parsed and counted."""
    data = b"[" + b"[]," * ((count << 20) // 3) + b"[]]"

    def work() -> object:
        value = json.loads(data)
        return value, limits.problem_of(value)

    return work


def results(count: int) -> Callable[[], object]:
    """Results of the most texts, made into one."""
    size = limits.MOST_MESSAGE // limits.MOST_BLOCKS
    content = [SimpleNamespace(type="text", text="a" * size)] * limits.MOST_BLOCKS
    return lambda: [limits.text_of(content) for _ in range(count)]


BOUNDS: list[Bound] = [
    SERVER(
        "integrations/mcp/limits.py: MOST_MESSAGE, MOST_VALUES, MOST_DEEP", counts="MiB of a tool server's message",
        most=MESSAGE, unit="one of empty lists", feed=messages, count=MESSAGE, seconds=4.0, mib=256,
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
        "MOST_SERVER_NAME": SMALL, "MOST_SAID": SHOWN,
    },
    "integrations/mcp/tools.py": {"LONGEST": OURS},
}  # fmt: skip
