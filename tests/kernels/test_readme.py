"""The package's README: its example runs, and its table says which implementations there are."""

from __future__ import annotations

import re
from pathlib import Path

import rekindle_kernels

README = (Path(rekindle_kernels.__file__).parent / "README.md").read_text()


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert getattr(names["out"], "shape", None) == (1, 4, 64)


def test_the_table_names_every_implementation_in_order() -> None:
    lines = {line.split("|")[2]: line.split("|")[3] for line in README.splitlines() if line.count("|") == 4}
    for operation in rekindle_kernels.OPERATIONS:
        (found,) = (text for call, text in lines.items() if re.search(rf"`{_called(operation.operation)}\(", call))
        told = re.findall(r"`(\w+)`", found)
        assert told == [entry.name for entry in operation.entries if entry.platforms], operation.operation


def _called(operation: str) -> str:
    return {"attention": "paged_attention"}.get(operation, operation)


def test_links_lead_somewhere() -> None:
    folder = Path(rekindle_kernels.__file__).parent
    assert [link for link in re.findall(r"\]\(([^)#:]+)\)", README) if not (folder / link).exists()] == []
