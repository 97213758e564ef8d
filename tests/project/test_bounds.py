"""Every bound is in the table, and what its dearest units cost together stays within its promise."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from project.bounds import page
from project.bounds.measure import ROOM, SPEED, measured
from project.bounds.table import BOUNDS, OTHERS

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "toolkit/rekindle/_src"
NAME = re.compile(r"(^|_)(MOST|MAX|LONGEST|LARGEST|DEEPEST|LIMITS?)(_|$)")


@cache
def constants() -> frozenset[tuple[str, str]]:
    """The constants of modules whose names say that they are bounds, by their files."""
    found = set[tuple[str, str]]()
    for path in SOURCES.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else ()
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            found |= {(path.relative_to(SOURCES).as_posix(), one.id) for one in names if NAME.search(one.id)}
    return frozenset(found)


def rows() -> set[tuple[str, str]]:
    of_bounds = {
        (row.constants.split(": ")[0], name) for row in BOUNDS for name in row.constants.split(": ")[1].split(", ")
    }
    return of_bounds | {(file, name) for file, names in OTHERS.items() for name in names}


def test_every_bound_has_a_row() -> None:
    missing = sorted(constants() - rows())
    assert not missing, f"say in a section of tests/project/bounds what these count, and feed them: {missing}"


def test_every_row_has_a_constant() -> None:
    for file, name in sorted(rows()):
        text = (SOURCES / file).read_text() if (SOURCES / file).exists() else ""
        assert re.search(rf"\b{name}\b", text), f"there is no {name} in {file} any more"
    twice = {(file, name) for row in BOUNDS for file, name in [tuple(row.constants.split(": "))]} & {
        (file, name) for file, names in OTHERS.items() for name in names
    }
    assert not twice, f"these have two kinds of rows: {twice}"


def test_rows_are_whole() -> None:
    for row in BOUNDS:
        assert row.counts and row.unit and row.seconds > 0 and row.mib > 0, row
        assert 0 < row.count <= row.most, row
        assert row.most / row.count <= 64, f"{row.name}: too few units are fed for what they are multiplied by"
    names = [row.name for row in BOUNDS]
    assert len({*names}) == len(names)
    assert all(other.why for names in OTHERS.values() for other in names.values())


def test_the_page_is_that_of_the_table() -> None:
    """What was measured stands there; `python -m project.bounds.page` writes it."""
    figures = page.figures()
    assert [*figures] == [row.name for row in BOUNDS]
    assert page.PATH.read_text() == page.text(figures)
    for row in BOUNDS:
        cost = figures[row.name]
        assert cost.seconds <= row.seconds and cost.mib <= row.mib, f"{row.name}: what was measured is over the promise"


@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
@pytest.mark.parametrize("number", range(len(BOUNDS)), ids=[row.counts for row in BOUNDS])
def test_the_dearest_units_cost_no_more_than_the_promise(number: int) -> None:
    row = BOUNDS[number]
    cost = measured(number)
    assert cost.seconds <= SPEED * row.seconds, f"{row.most:,.0f} {row.counts} would take {cost.seconds:.1f} s"
    assert cost.mib <= ROOM * row.mib, f"{row.most:,.0f} {row.counts} would take {cost.mib:,.0f} MiB"
