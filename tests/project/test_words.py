"""Names and docstrings in plain words: participles are refused where the field has nouns.

Write `match`, `fields`, `request`, `reason` or `message` for what was found, given, asked, told or said. A docstring
begins with a verb, or with "True if". A class is named by a noun, and no other module's class is named so: one
word, one thing.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from project.sources import package_files, parsed

ROOT = Path(__file__).parents[2]
NAMES = frozenset(("found", "given", "asked", "told", "said"))
BEGINNINGS = frozenset(("What", "Whether", "Who", "Both"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module

# Older ones, by their functions. The list may only shrink.
LEFT = """
    __init__(asked) _assembled(found) _bits(found) _check_own(found) _download(asked) _download_gguf(asked)
    _each(found) _reads(found) _shapes_of(found) _source(said)
    address(found) check_fits(found) compare(found) features_of_macos(told)
    fill(found) fitted(found) found listed(found) place(asked)
    said slot(asked) with_matrices(found)
"""


@cache
def tree(path: Path) -> ast.Module:
    return parsed(path.read_text(), kept=True)


@cache
def definitions() -> tuple[tuple[str, Definition], ...]:
    """All modules, classes and functions of the packages, with their names."""
    modules = [(path.parent.name if path.stem == "__init__" else path.stem, tree(path)) for path in package_files()]
    return (*modules, *((node.name, node) for _, module in modules for node in inside(module)))


def inside(block: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The definitions in a block of statements, and in the blocks inside of it."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(block, name, ()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node
            yield from inside(node)


def parameters(node: Definition) -> list[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    arguments = node.args
    several = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument.arg for argument in several if argument is not None]


def test_functions_and_parameters_have_nouns_for_names() -> None:
    names = {name for name, node in definitions() if name in NAMES and not isinstance(node, ast.Module)}
    names |= {f"{name}({arg})" for name, node in definitions() for arg in parameters(node) if arg in NAMES}
    assert not names - set(LEFT.split()), "use a noun: match, fields, request, reason, message"
    assert not set(LEFT.split()) - names, "renamed: take it off the list"


def test_docstrings_begin_with_a_verb() -> None:
    words = [(ast.get_docstring(node, clean=False) or "").split()[:5] for _, node in definitions()]
    beginnings = {
        " ".join(first)
        for first in words
        if first and (first[0].strip(",:.") in BEGINNINGS or first[:2] in (["The", "same"], ["The", "same,"]))
    }
    assert not beginnings, 'begin with a verb, or with "True if", and say what "the same" is'


@cache
def class_names() -> dict[str, set[str]]:
    """The modules that define classes, by the classes' names."""
    modules: dict[str, set[str]] = {}
    for package in ("toolkit/rekindle", "kernels/rekindle_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in inside(tree(path)):
                if isinstance(node, ast.ClassDef):
                    modules.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    return modules


def test_no_two_modules_have_a_class_of_the_same_name() -> None:
    doubled = {name: sorted(modules) for name, modules in class_names().items() if len(modules) > 1}
    assert not doubled, "one word, one thing: choose a noun that says which of them it is"


# The participles that don't end in -ed, and adjectives made of verbs.
PARTICIPLES = """
    Begun Behind Bound Brought Built Bought Caught Chosen Cut Done Drawn Driven Fed Found Given Gone Grown Held Hidden
    Kept Known Laid Left Lent Lost Made Meant Met Paid Put Read Said Seen Sent Set Shown Shut Spent Split Spread Stuck
    Taken Taught Thought Told Torn Understood Won Written
    Ahead Attending Existing Growing Incoming Missing Outgoing Pending Remaining Running Sleeping Waiting
"""
NOUNS = frozenset({"Need", "_Cut", "Cut"})  # a cut divides a checkpoint's tensor, or a program
PUBLIC_PARTICIPLES = frozenset({"Captured", "Placed", "Wanted"})  # names that users know


def test_a_class_is_named_by_a_noun() -> None:
    participles = {name for name in class_names() if re.fullmatch(r"_?[A-Z][a-z]*ed", name)}
    participles |= {name for name in class_names() if name.lstrip("_") in PARTICIPLES.split()}
    assert not participles - NOUNS - PUBLIC_PARTICIPLES, "say what it is: CheckpointPlan, not Described"
    assert not (NOUNS | PUBLIC_PARTICIPLES) - participles, "renamed: take it off the list"


# Clauses that pile up in a docstring's first paragraph: name the thing again, or make two sentences of one. "Return the
# picture reader", not "Return what reads pictures"; "the adapter's rows", not "those of the adapter".
CHAINS = re.compile(
    r"^Return what\b|\b(?:(?:of|by|in) which|whose|those (?:that|of|which)|that of|what (?:is|are|it|they)"
    r"|none (?:that|which))\b",
    re.IGNORECASE,
)
RELATIVES = re.compile(r"\b(?:that|which|who|whose)\b")  # one of them in a clause of the first sentence
NO_NOUN = re.compile(r"(?:[;,:]|\b(?:to|with|at|of|or|that is|which is|it is)) none\b(?! (?:is|are|has|have|of|can)\b)")


def unclear(docstring: str) -> bool:
    """True if a docstring's first paragraph has to be read twice."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"[.!?] (?=[A-Z`\"])", paragraph)[0]
    clauses = re.split(r"[.;:,()]", re.sub(r"`[^`]*`|\bso that\b", "", sentence))
    piled = any(len(RELATIVES.findall(clause)) > 1 for clause in clauses)
    return bool(CHAINS.search(paragraph)) or piled or bool(NO_NOUN.search(sentence))


@pytest.mark.parametrize(
    "docstring",
    [
        "Return what reads pictures; None for models that read text alone.",
        "The texts that all requests share, those of other sessions included.",
        "A model whose layers have states.",
        "Return the page that the node which a prompt continues has.",
        "Return the changes of a step; none without a plan.",
    ],
)
def test_a_docstring_that_is_read_twice_is_found(docstring: str) -> None:
    assert unclear(docstring)


def test_a_docstring_that_is_read_once_passes() -> None:
    assert not unclear("Return the picture reader, so that images can be read; None for text-only models.")
    assert not unclear("True if this identifies data that is stored with pages.\n\nA file whose header is read later.")


def test_docstrings_begin_with_a_sentence_that_is_read_once() -> None:
    found = set()
    for path in package_files():
        module = tree(path)
        for node in (module, *inside(module)):
            if unclear(ast.get_docstring(node) or ""):
                found.add((str(path.relative_to(ROOT)), getattr(node, "lineno", 1)))
    assert not found, "name the thing again"


# Places in a room. In text: after, following; next to, in addition to, along with, compared with, while it runs.
PLACES = re.compile(r"(?<![\w{-])(?:behind|beside)\b(?![\w}-])", re.IGNORECASE)
RIGHT = re.compile(
    r"\b(?:left|leaves?|lags?|falls?|fallen|versions|lived) (?:\S+ ){0,3}?(?:behind|beside)\b", re.IGNORECASE
)
NAMES_AND_DATA = ("before behind silu", "from behind", "they are behind one another", "beside it")
MOST = 20


def prose() -> Iterator[tuple[str, str]]:
    """Yield the lines of comments, strings and pages, without what is code in them."""
    for folder in ("toolkit", "kernels", "tests", "tutorials"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if path.name == "test_words.py" or path.parent.name == "tiny" or not PLACES.search(text):  # tiny: stories
                continue
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type in (tokenize.COMMENT, tokenize.STRING) and not token.string[1:-1].isidentifier():
                    yield from ((path.name, line) for line in token.string.splitlines())
    for folder in (".github", "tests", "tutorials", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.md")):
            yield from ((path.name, line) for line in path.read_text().splitlines())
    yield from (("README.md", line) for line in (ROOT / "README.md").read_text().splitlines())


def test_what_follows_is_not_behind_and_what_is_added_is_not_beside() -> None:
    lines = ((name, re.sub(r"`[^`]*(`|$)", "", line)) for name, line in prose())
    found = [
        (name, line.strip())
        for name, line in lines
        if PLACES.search(line) and not RIGHT.search(line) and not any(words in line for words in NAMES_AND_DATA)
    ]
    assert len(found) <= MOST, found
