"""trust.md has a row for each sentence about trust in SECURITY.md, and the tests that it names exist."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (Path(__file__).parent / "trust.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def brief(sentence: str) -> str:
    """Shorten a sentence of more than ten words to its first four, its last two, and a digest of all of them."""
    words = sentence.split(" ")
    digest = hashlib.sha256(sentence.encode()).hexdigest()[:6]
    return sentence if len(words) <= 10 else " ".join((*words[:4], "…", *words[-2:], f"({digest})"))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda text: str(text))
def test_every_test_that_it_names_exists(path: str, name: str) -> None:
    assert re.search(rf"^\s*(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_every_sentence_about_trust_has_its_tests_or_promises_nothing() -> None:
    """The sentences of SECURITY.md's list, and of the paragraph below it, are those of the page, in their order."""
    security = (ROOT / ".github" / "SECURITY.md").read_text()
    trusted = security[security.index("## What is trusted") : security.index("## What counts as")]
    listed, below, *_ = trusted.partition("\n\n")[2].split("\n\n")
    items = [" ".join(item.split()) for item in listed.removeprefix("- ").split("\n- ")]
    cells = [item.partition(": ")[2] for item in items] + [" ".join(below.split())]
    assert all(item.startswith("**") for item in items)
    sentences = [one for cell in cells for one in re.split(r"(?<=[.])\s+(?=[A-Z`])", cell)]
    table = PAGE[PAGE.index("| sentence | tests |") :].splitlines()[2:]
    rows = [line.strip("| ").rsplit(" | ", 1) for line in table if line.startswith("| ")]
    assert [row[0] for row in rows] == [*map(brief, sentences)]
    for sentence, tests in rows:
        assert tests == "No promise" or re.fullmatch(r"(`tests/[\w/]+\.py::\w+`(, )?)+", tests), sentence
