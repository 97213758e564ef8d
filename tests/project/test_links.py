"""Every link in the repository's prose leads somewhere: files, headings, and functions that a link names.

Links to other hosts are only checked for their form: tests run without network.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PROSE = sorted(
    [
        ROOT / "README.md",
        ROOT / "tutorials" / "README.md",
        *(ROOT / ".github").rglob("*.md"),
        *(ROOT / "tests").rglob("*.md"),
        *(ROOT / "tutorials/guide").rglob("*.md"),
        *(ROOT / "tutorials/source").glob("[0-9]*.py"),
    ]
)
_MARKDOWN = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_HTML = re.compile(r'(?:src|srcset|href)="([^"]+)"')
_BARE = re.compile(r"(?<![(\"<`])https?://[^\s)>\"`]+")
_NAME = re.compile(r"`([A-Za-z_]\w*(?:\.(?!py`)[A-Za-z_]\w*)?)`")  # a function, not a file


class Link(NamedTuple):
    """A link: its words, where it leads, and the file that it stands in."""

    words: str
    target: str
    source: Path


def prose(path: Path) -> str:
    """The text of a file without its code blocks; of a tutorial, its Markdown cells."""
    text = path.read_text()
    if path.suffix == ".py":
        text = "\n".join(re.findall(r"^# ?(.*)$", text, re.MULTILINE))
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(path: Path) -> Iterator[Link]:
    text = prose(path)
    if path.suffix == ".py":  # links of a page are those of its notebook
        path = ROOT / "tutorials/course" / f"{path.stem}.ipynb"
    for words, target in _MARKDOWN.findall(text):
        yield Link(words, target, path)
    for target in [*_HTML.findall(text), *_BARE.findall(_MARKDOWN.sub("", text))]:
        yield Link("", target, path)


def anchors(path: Path) -> set[str]:
    """The anchors of a Markdown file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def defined(path: Path) -> set[str]:
    """Functions, classes and `Class.method`s that a Python file defines at its top."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def wrong(link: Link) -> str | None:
    """What is wrong with a link; None if it is right."""
    if re.match(r"[a-z][a-z+.-]*:", link.target):
        parts = urlsplit(link.target)
        if parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc):
            return None
        return "is no https address of a host"
    if link.target == "../../issues" and link.source.name == "README.md":
        return None  # of the repository's own host, which shows README.md two folders below its issues
    path, _, anchor = link.target.partition("#")
    target = (link.source.parent / path).resolve() if path else link.source
    if not target.is_relative_to(ROOT):
        return "leaves the repository"
    if not target.exists():
        return "leads to a file that is not there"
    if anchor and anchor not in anchors(target):
        return f"names a heading that {target.name} does not have: it has {', '.join(sorted(anchors(target)))}"
    named = _NAME.fullmatch(link.words)
    if named and target.suffix == ".py" and target.name != "__init__.py" and named[1] not in defined(target):
        return f"names {named[1]}, which {target.relative_to(ROOT)} does not define"
    return None


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    found = [f"{link.target!r} {problem}" for link in links(path) if (problem := wrong(link))]
    assert not found, "\n".join(found)


def test_files_that_prose_names_are_there() -> None:
    """A path in backticks, such as `tests/project/test_links.py`, is one from the root."""
    named = re.compile(r"`((?:\.ci|\.github|kernels|tests|toolkit|tutorials)/[\w./-]+)`")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PROSE
        for name in named.findall(prose(path))
        if "NN" not in name and not (ROOT / name).exists()
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("words", "target", "problem"),
    [
        ("x", "nowhere.md", "not there"),
        ("x", "#no-such-heading", "heading"),
        ("x", "http:/broken", "no https"),
        ("x", "http://example.org", "no https"),
        ("x", "../../etc/passwd", "leaves"),
        ("`PagePool.forget`", "toolkit/rekindle/_src/kvcache/pool.py", "does not define"),
    ],
)
def test_the_check_finds_what_is_wrong(words: str, target: str, problem: str) -> None:
    assert problem in (wrong(Link(words, target, ROOT / "README.md")) or "")


def test_a_newcomer_finds_the_way_in_three_hops() -> None:
    """Each answer of "Find your way" leads through at most three files; a request's map names the first."""
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    questions = re.findall(r"^- \*\*(Where .+?)\*\*(.+?)(?=^- \*\*|^`tests)", text, re.MULTILINE | re.DOTALL)
    assert [question for question, _ in questions] == [
        "Where is a page freed?",
        "Where is a sampling option applied?",
        "Where is a kernel chosen?",
    ]
    way = (ROOT / ".github/docs/pages/inside.md").read_text().partition("\n## ")[0]
    for question, answer in questions:
        hops = [target for words, target in _MARKDOWN.findall(answer) if _NAME.fullmatch(words)]
        assert 1 <= len(set(hops)) <= 3, question
        assert f"(../../{hops[0]})" in way, f"{question} The map of a request does not name {hops[0]}"
