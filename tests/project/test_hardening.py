"""The page about hardening names tests that exist, and has a row for each defect of the audit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / ".github" / "docs" / "pages" / "hardening.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda text: str(text))
def test_every_test_that_it_names_exists(path: str, name: str) -> None:
    assert re.search(rf"^\s*(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_every_defect_has_a_row_with_a_test() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0].strip("| ")) for row in rows] == list(range(1, 25))
    for row in rows:
        assert re.fullmatch(r"(`[\w/.:]+`(, )?)+", row[2]), row[0]
