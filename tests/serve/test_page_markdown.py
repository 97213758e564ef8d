"""Markdown on the server's page: the elements of an answer, made without HTML of the model's, in bounded time."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rekindle._src.serve import page

SCRIPT = Path(page.__file__).parent / "static" / "markdown.js"
EVIL = "<img src=x onerror=alert(1)>"
COPY = ["button.quiet", "Copy"]


def elements(*texts: str) -> list[Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node runs the page's script")
    command = [node, str(Path(__file__).with_name("markdown.js")), SCRIPT.read_text()]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


CASES: dict[str, Any] = {
    "plain": [["p", "plain"]],
    "one\ntwo\n\nthree": [["p", "one", ["br"], "two"], ["p", "three"]],
    "# Head\ntext": [["div.h1", "Head"], ["p", "text"]],
    "#no head": [["p", "#no head"]],
    "a **b *c*** `d`": [["p", "a ", ["b", "b *c"], "* ", ["code", "d"]]],
    "*it* 2 * 3 * 4": [["p", ["i", "it"], " 2 * 3 * 4"]],
    "``a ` b``": [["p", ["code", "a ` b"]]],
    "- a\n- b\n  - c": [
        ["div.item", ["span", "•"], ["div", "a"]],
        ["div.item", ["span", "•"], ["div", "b", ["div.item", ["span", "•"], ["div", "c"]]]],
    ],
    "1. a\n2) b": [["div.item", ["span", "1."], ["div", "a"]], ["div.item", ["span", "2."], ["div", "b"]]],
    "> q\n> r": [["blockquote", ["p", "q", ["br"], "r"]]],
    "***": [["hr"]],
    "```py\na = *1*\n\n```\nend": [["div.code", ["pre", ["code", "a = *1*\n"]], COPY], ["p", "end"]],
    "````\n```\n````": [["div.code", ["pre", ["code", "```"]], COPY]],
    "```not``` a fence": [["p", ["code", "not"], " a fence"]],
    "```\nnot closed": [["div.code", ["pre", ["code", "not closed"]], COPY]],
    "|a|b|\n|-|-|\n|1|\nx": [
        ["div.wide", ["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]], ["tbody", ["tr", ["td", "1"], ["td"]]]]],
        ["p", "x"],
    ],
    "[a *b*](https://example.com/x)": [["p", ["a@https://example.com/x", "a ", ["i", "b"]]]],
    "[a](javascript:alert(1))": [["p", "[a](javascript:alert(1))"]],
    "[a](/local) ![p](https://example.com/p.png)": [
        ["p", "[a](/local) !", ["a@https://example.com/p.png", "p"]],
    ],
    EVIL: [["p", EVIL]],
    f"**{EVIL}** `{EVIL}`": [["p", ["b", EVIL], " ", ["code", EVIL]]],
    "": [],
}


def test_elements_are_those_of_a_notebooks_chat() -> None:
    for (text, expected), found in zip(CASES.items(), elements(*CASES), strict=True):
        assert found == expected, text


def test_nothing_of_a_text_is_lost() -> None:
    """Any answer shows all of its words, whatever marks are open in it."""
    marks = ["*", "**", "`", "[", "](", ")", "#", "- ", "> ", "```", "\n", "1. ", "word ", "_", "\n"]
    texts = ["".join(marks[(at * step + step) % len(marks)] for at in range(60)) for step in range(1, 15)]

    def words(parts: Any) -> int:
        return sum(one.count("word") if isinstance(one, str) else words(one[1:]) for one in parts)

    for text, found in zip(texts, elements(*texts), strict=True):
        lines = [line.lstrip(" -*>.0123456789") for line in text.split("\n")]
        fences = sum(line.count("word") for line in lines if line.startswith("```"))  # the name of a language
        assert text.count("word") - fences <= words(found) <= text.count("word"), text


def test_a_table_has_a_bounded_number_of_columns() -> None:
    (found,) = elements("|" * 1000 + "\n|-|\n|x|\n" + "|" * 1000)
    ((_, (_, (_, heads), (_, *rows))),) = found
    assert [len(row) - 1 for row in (heads, *rows)] == [64] * 3
    assert rows[0][1] == ["td", "x"]


def test_marks_without_an_end_are_read_in_bounded_time() -> None:
    """A long answer of open marks: each looks so many characters ahead, and nesting has a bound."""
    most = 60_000
    texts = [sign * (most // len(sign)) for sign in ("*", "`", "[", "[a](", "> ", "- ", "**a ", "|", "\n>", "  - a\n")]
    assert len(elements(*texts)) == len(texts)
