"""hardening.md names tests that exist, and has a row for each defect and each sentence about trust."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (Path(__file__).parent / "hardening.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda text: str(text))
def test_every_test_that_it_names_exists(path: str, name: str) -> None:
    assert re.search(rf"^\s*(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_every_defect_has_a_row_with_a_test() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0].strip("| ")) for row in rows] == list(range(1, len(rows) + 1)) and len(rows) > 30
    for row in rows:
        assert re.fullmatch(r"(`[\w/.:]+`(, )?)+", row[2]), row[0]


def test_what_could_freeze_a_process_is_tried_next_to_a_neighbour() -> None:
    rows = PAGE[PAGE.index("## A neighbour's longest turn") : PAGE.index("## The soak")]
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)` \|$", rows, re.MULTILINE)
    assert len(found) == 11
    for path, name in found:
        functions = ast.walk(ast.parse((ROOT / path).read_text()))
        (test,) = (one for one in functions if getattr(one, "name", "") == name)
        assert isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef)
        assert any(ast.unparse(mark) == "pytest.mark.usefixtures('short_turns')" for mark in test.decorator_list), name


def test_every_sentence_about_trust_has_its_tests_or_promises_nothing() -> None:
    """The sentences of SECURITY.md's table, and of the paragraph below it, are those of the page, word by word."""
    security = (ROOT / ".github" / "SECURITY.md").read_text()
    trusted = security[security.index("## What is trusted") : security.index("## What counts as")]
    cells = [line.strip("| ").split(" | ", 1)[1] for line in trusted.splitlines() if line.startswith("| **")]
    below = trusted[trusted.rindex("\n|") :].partition("\n\n")[2].partition("\n\n")[0]
    cells.append(" ".join(below.split()))
    sentences = [one for cell in cells for one in re.split(r"(?<=[.])\s+(?=[A-Z`])", cell)]
    table = PAGE[PAGE.index("| sentence | tests |") :].splitlines()[2:]
    rows = [line.strip("| ").rsplit(" | ", 1) for line in table if line.startswith("| ")]
    assert [row[0] for row in rows] == sentences
    for sentence, tests in rows:
        assert tests == "No promise" or re.fullmatch(r"(`tests/[\w/]+\.py::\w+`(, )?)+", tests), sentence
