"""No text makes a pattern take more than linear time, and the table of patterns is the code's."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from project.backtracking import ambiguity
from project.patterns import CALLS, PATTERNS
from project.sources import package_files, parsed

ROOT = Path(__file__).parents[2]
SOURCES = package_files()
SCRIPTS = sorted((ROOT / "toolkit").rglob("static/*.js"))
_METHODS = ("match", "fullmatch", "search", "finditer", "findall", "split", "sub", "subn")


# Library calls whose time or memory depends on a text in ways of their own.
_COSTLY = (
    r"(?:ast|decimal|difflib|fnmatch|json|pickle|shlex|textwrap|unicodedata|urllib)(?:\.\w+)*"
    r"\.(?:loads?|Decimal|\w*match\w*|SequenceMatcher|\w*diff|fill|wrap|dedent|indent|shorten|split|normalize|"
    r"literal_eval|parse\w*|url\w+|unquote\w*)"
    r"|html\.unescape|inspect\.(?:cleandoc|getdoc)|ipaddress\.\w+|[\w.]*\.(?:fromisoformat|strptime|decompress)|eval|exec"
)


class Pattern(NamedTuple):
    """A pattern in the code."""

    file: str
    name: str
    texts: tuple[str | bytes, ...]  # none if it is put together when it is used
    flags: int
    uses: frozenset[str]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in SOURCES}


@cache
def tree(path: Path) -> ast.Module:
    return parsed(texts()[path], kept=True)


@cache
def patterns() -> tuple[Pattern, ...]:
    using = [path for path, text in texts().items() if re.search(r"\bre\.[a-z]+\(|from re import|import re as", text)]
    return (*(one for path in using for one in _in_python(path)), *_in_scripts())


def _in_python(path: Path) -> Iterator[Pattern]:
    file = path.relative_to(ROOT).as_posix()
    assert not re.search("from re import|import re as", texts()[path]), f"{file}: write `import re`"
    names: dict[ast.Call, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names |= {call: ast.unparse(target) for call in _calls(node.value) if call.func.attr == "compile"}
    for call in _calls(tree(path)):
        method, first = call.func.attr, call.args[0]
        try:
            text = ast.literal_eval(first)
        except ValueError:
            text = None
        name = names.get(call) or (text.decode() if isinstance(text, bytes) else text) or ast.unparse(first)
        uses = frozenset({method}) if method != "compile" else _uses(names.get(call), path)
        yield Pattern(file, name, () if text is None else (text,), _flags(call), uses)


def _calls(block: ast.AST) -> Iterator[ast.Call]:
    """The calls of functions of `re` that take a pattern."""
    for node in ast.walk(block):
        if (
            (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in (*_METHODS, "compile")
            )
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
        ):
            yield node


def _flags(call: ast.Call) -> int:
    names = [node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute) and node.attr.isupper()]
    return sum({int(getattr(re, name)) for name in names if hasattr(re, name)})


def _uses(name: str | None, path: Path) -> frozenset[str]:
    """The methods by which a pattern of this name is used; `search` if it is handed on."""
    if name is None or not name.isidentifier():
        return frozenset({"search"})
    importing = re.compile(rf"from [\w.]+\.{path.stem} import [^)]*\b{name}\b")
    importers = [tree(other) for other, text in texts().items() if name in text and importing.search(text)]
    used: set[str] = set()
    loads = 0
    for module in (tree(path), *importers):
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute):
                base = node.value.value if isinstance(node.value, ast.Subscript) else node.value
                if isinstance(base, ast.Name) and base.id == name and node.attr in _METHODS:
                    used.add(node.attr)
                    loads -= 1
            elif isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                loads += 1
    return frozenset(used if used and not loads else {*used, "search"})


def _in_scripts() -> Iterator[Pattern]:
    for path in SCRIPTS:
        script = re.sub(r"//.*|/\*(?s:.*?)\*/", "", path.read_text())
        assert "RegExp(" not in script, f"{path}: write the pattern as a literal"
        for text in re.findall(r"[(=,:]\s*/((?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+)/[dgimsuvy]*", script):
            yield Pattern(path.relative_to(ROOT).as_posix(), text, (text,), 0, frozenset({"search"}))


def test_every_pattern_has_a_row_and_every_row_a_pattern() -> None:
    code = {(pattern.file, pattern.name) for pattern in patterns()}
    table = {(file, name) for file, rows in PATTERNS.items() for name in rows}
    assert not code - table, "add who writes the text, and its bound, to tests/project/patterns.py"
    assert not table - code, "remove these rows from tests/project/patterns.py"


@cache
def calls() -> frozenset[tuple[str, str]]:
    """The calls whose time depends on a text, by their files."""
    return frozenset(
        (path.relative_to(ROOT).as_posix(), name)
        for path, text in texts().items()
        if re.search(rf"(?<![\w.])(?:{_COSTLY})\(", text)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and re.fullmatch(_COSTLY, name := ast.unparse(node.func))
    )


def test_every_call_has_a_row_and_every_row_a_call() -> None:
    table = {(file, name) for file, rows in CALLS.items() for name in rows}
    assert not calls() - table, "add who writes the text, and its bound, to tests/project/patterns.py"
    assert not table - calls(), "remove these rows from tests/project/patterns.py"


def test_digits_are_bounded_by_python() -> None:
    """So `int`, `str` and JSON need no rows: reading and writing a number takes time that grows with its square."""
    assert not [path for path, text in texts().items() if "set_int_max_str_digits" in text]
    assert 0 < sys.get_int_max_str_digits() <= 4_300


def test_bounds_are_constants_of_the_code() -> None:
    code = "\n".join(texts().values())
    bounds = {row.bound for table in (PATTERNS, CALLS) for rows in table.values() for row in rows.values()}
    missing = [bound for bound in bounds if bound.isupper() and not re.search(rf"(?m)^{bound}\b.* = ", code)]
    assert not missing, f"no constants: {missing}"


def test_no_pattern_takes_more_than_linear_time() -> None:
    """Whoever writes its text: a pattern that is linear needs no argument about its bound."""
    wrong: list[str] = []
    for pattern in patterns():
        row = PATTERNS.get(pattern.file, {}).get(pattern.name)
        examples = row.examples() if row is not None and row.examples is not None else ()
        assert pattern.texts or examples, f"{pattern} is put together: its row needs examples"
        for text in (*pattern.texts, *examples):
            reasons = {str(reason) for use in pattern.uses if (reason := ambiguity(text, pattern.flags, how=use))}
            wrong += [f"{pattern} {text!r}: {reason}" for reason in reasons]
    assert not wrong, "\n".join(
        [*wrong, "Use possessive repeats (*+), classes that exclude what follows, or a scanner"]
    )


@pytest.mark.parametrize(
    ("pattern", "use"),
    [
        (r"\{[{%](.*?)[%}]\}", "findall"),  # of chat templates
        (r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", "sub"),
        (r"\{[^{}]*:[^{}]*\d{6}", "search"),
        (r"%[^A-Za-z]*[0-9]{2}", "search"),
        (r" {0,3}(#{1,6})[ \t]+(\S.*?)[ \t]*#*[ \t]*", "fullmatch"),  # of Markdown
        (r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*", "fullmatch"),
        (r"(`+)(?!`)([^\n]{1,2000}?)(?<!`)\1(?!`)", "finditer"),
        (r"\*\*(?=\S)([^\n]{1,2000}?)(?<=\S)\*\*", "finditer"),
        (r"(?:.+\.)?layers\.(\d+)\..*\bexperts(?:\.base_layer)*", "fullmatch"),  # of adapters
        (r"(?:[a-z_.0-9]|[a-z_.0-9])*!", "match"),
        (r'"(?:\\.|[^"\\\n])*"', "sub"),  # of grammars
        (r"[ \t]*[?!]*([A-Za-z_][\w-]*)[^\n:=|]*?:(?::=)?(?!:)", "match"),
        (r"-?[0-9][-+.0-9eE]*\Z", "search"),  # of tokens
        (r"model='[^']*?([^'/\\]+)': has", "search"),  # of errors
        (r"(a*)*b", "match"),
        (r"(a+)+b", "match"),
        (r"a*a*b", "match"),
        (r"(?s)\(.*,.*\)", "match"),
        (r"(?i)[a-z]*K+\d", "match"),
        (r"(?:y(?=y*z))*w", "match"),
        (r"(?<!x)y+z", "search"),
        (r"(?m)^\s+x", "search"),
        (r"(\w+)\s\1", "match"),
        (r"\s+$", "sub"),
    ],
)  # fmt: skip
def test_patterns_that_may_take_longer_are_refused(pattern: str, use: str) -> None:
    assert ambiguity(pattern, how=use) is not None


@pytest.mark.parametrize(
    ("pattern", "use"),
    [
        (r'"(?:\\.|[^"\\])*+"', "match"),
        (r"a*+a*+b", "match"),
        (r"(?>a+)b+c", "match"),
        (r"[a-z]*+\d*+!", "fullmatch"),
        (r"a+", "search"),
        (r"x[^x]*y", "search"),
        (r"(?<!a)a+b", "search"),
        (r"(?m)^x+y", "search"),
        (r"^a*b", "search"),
        (r"(\w+)=([^;\w]*);", "match"),
        (r"(?:(?!-->).)*-->", "match"),
        (r"[0-9]{1,3}(,[0-9]{3})*(\.[0-9]+)?", "fullmatch"),
        (r"(?:ab|ac)*d", "match"),
    ],
)  # fmt: skip
def test_linear_patterns_pass(pattern: str, use: str) -> None:
    assert ambiguity(pattern, how=use) is None
