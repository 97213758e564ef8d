"""The page of the table: `python -m project.bounds.page`, run in tests/, measures every row and writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from project.bounds.measure import Cost, measured
from project.bounds.records import Bound
from project.bounds.table import SECTIONS

PATH = Path(__file__).parents[3] / ".github/docs/pages/bounds.md"
WHO = {
    "a stranger": "clients",
    "an author": "authors of models",
    "a peer": "processes with the secret",
    "a server": "tool servers",
}
HEAD = """\
# Bounds

What others send is counted before it costs anything. Each row is one such count: how many units may come, which unit
costs the most, and what so many of the dearest cost together: seconds of a processor, and memory at the highest. Of
those, some are fed to the code, measured on one core of a Xeon with AMX, and multiplied.

A test does the same, and fails where a product is over its promise: four times in seconds, since machines differ, and
by half in memory. `REKINDLE_CLOCKS=1 pytest -m clock tests/project/test_bounds.py` runs it, and
`python -m project.bounds.page` in `tests` writes this page. Another test fails for a constant with MOST, MAX, LONGEST,
LARGEST, DEEPEST or LIMIT in its name that has no row in `tests/project/bounds`. The rows there
also name the constants that bound nothing a stranger sends.
"""
_SHOWN = "counts", "at most", "the dearest", "measured on a Xeon", "promise", "from", "constants"
_ROW = re.compile(
    r"\| (?P<counts>[^|]+) \| [^|]+ \| [^|]+ \| (?P<seconds>[\d.,]+) s, (?P<mib>[\d.,]+) MiB \|"
    r"[^|]+\|[^|]+\| (?P<constants>[^|]+) \|"
)


def text(figures: Mapping[str, Cost]) -> str:
    """The page with these figures."""
    parts = [HEAD]
    for title, rows in SECTIONS.items():
        if rows:
            parts.append(f"\n## {title}\n\n| {' | '.join(_SHOWN)} |\n{'|---' * len(_SHOWN)}|\n")
            parts += [_line(row, figures[row.name]) for row in rows]
    return "".join(parts)


def _line(row: Bound, cost: Cost) -> str:
    file, names = row.constants.split(": ")
    shown = f"{', '.join(f'`{name}`' for name in names.split(', '))} in `{file}`"
    promise = f"{row.seconds:,.1f} s, {row.mib:,.0f} MiB"
    figures = f"{cost.seconds:,.2f} s, {cost.mib:,.1f} MiB"
    return f"| {row.counts} | {row.most:,.0f} | {row.unit} | {figures} | {promise} | {WHO[row.writer]} | {shown} |\n"


def figures() -> dict[str, Cost]:
    """The measured figures of the page, by the names of their rows."""
    found = {}
    for match in _ROW.finditer(PATH.read_text()):
        names, _, file = match["constants"].rpartition(" in ")
        name = f"{file.strip('`')}: {names.replace('`', '')}, {match['counts']}"
        found[name] = Cost(*(float(match[part].replace(",", "")) for part in ("seconds", "mib")))
    return found


if __name__ == "__main__":
    rows = [row for section in SECTIONS.values() for row in section]
    PATH.write_text(text({row.name: measured(number) for number, row in enumerate(rows)}))
