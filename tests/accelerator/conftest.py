"""The table of what the compilers said, printed at the end, and the reason where there is no compiler."""

from __future__ import annotations

import pytest

from helpers import compilers
from helpers.compilers import Row

ROWS: list[tuple[str, ...]] = []


@pytest.fixture
def row() -> Row:
    """Adds a line to the table that is printed when all tests have run."""

    def add(*cells: object) -> None:
        ROWS.append(tuple(map(str, cells)))

    return add


@pytest.fixture(params=["gpu", "tpu"])
def platform(request: pytest.FixtureRequest) -> str:
    """Each platform whose compiler is at hand."""
    name = str(request.param)
    if compilers.folder(name) is None:
        pytest.skip(f"there is no compiler for {name}: {compilers.FETCH}")
    return name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("what the compilers made")
        columns = max(map(len, ROWS))
        rows = [(*row, *[""] * (columns - len(row))) for row in ROWS]
        widths = [max(len(row[column]) for row in rows) for column in range(columns)]
        for row in rows:
            terminalreporter.write_line("  ".join(map(str.ljust, row, widths)).rstrip())
