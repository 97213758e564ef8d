"""Measured numbers in prose have a source: a cell that printed or asserted them, or a section that says on what.

A quantity is a number with a unit of time, size, rate or ratio. In the course it comes from its own page: an output
that is stored there, an assertion, or a value that a cell sets. So do larger counts, and all numbers of an answer. Its
tables and the comments in its cells are words, too. A picture belongs to its page. In the documentation, a section
names what its numbers were measured on, or links a page of the course that holds them; sizes that the packages hold are
bounds. README repeats what these pages hold.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import tokenize
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "tutorials/course").glob("[0-9]*.ipynb"))
PICTURES = sorted((ROOT / "tutorials/source/pictures").glob("*.svg"))
DOCS = sorted(path for folder in (".github/docs/pages", "tutorials/guide") for path in (ROOT / folder).glob("*.md"))

ALLOWED = {
    ("03", "0.1 s"): "what a person notices",
    ("06", "8 GB"): "a laptop's GPU",
    ("06", "10 times"): "memory of a laptop's GPU, some 250 GB/s, over PCIe 4.0 with 16 lanes",
    ("06", "50 times"): "memory of an H100, 3,350 GB/s, over PCIe 5.0 with 16 lanes",
    ("18", "0.5 GB"): "a condition of the exercise",
    ("checkpoints", "44 MiB"): "computed from a shape",
    ("checkpoints", "5 s"): "a bound of the code",
    ("checkpoints", "64 MB"): "a bound of the code",
    ("fleets", "15 seconds"): "a bound of the code",
    ("fleets", "2 seconds"): "a rule of the code",
    ("install", "1 minutes"): "an estimate for two cores of any kind; the bound is three minutes of each core",
    ("install", "2 minutes"): "an estimate for two cores of any kind; the bound is three minutes of each core",
    ("install", "15 MiB"): "a bound of the code",
    ("server", "5 s"): "a bound of the code",
    ("server", "60 s"): "a bound of the code",
    ("server", "4 times"): "a rule of the code",
    ("server", "90 %"): "an option's default",
    ("operations", "8 GiB"): "an option's default",
    ("operations", "2 ×"): "a factor of a formula",
    ("operations", "22.5 KiB"): "computed by the formula in its sentence",
    ("operations", "4 s"): "measured with the answer that its sentence names",
    ("operations", "30 s"): "an option's default",
    ("start", "5 minutes"): "a reader's time",
    ("taps", "10 s"): "a bound of the code",
}
"""Quantities that are neither measured on their page nor held by its cells, each with what it is."""

MEASURED_ON = re.compile(r"EPYC|Zen \d|Xeon|H100|v5e|two busy cores|simulated devices|toolkit/workshop/bench/")

ORDER = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
WORDS = {word: number for number, word in enumerate(ORDER, 1)} | {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50}
TIMES = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "seconds": 1, "minutes": 60, "hours": 3600}
SIZES = {"KB": 1e3, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
RATES = {f"{name}/s": scale for name, scale in SIZES.items()}
OPERATIONS = {"GFLOP/s": 1e9, "TFLOP/s": 1e12}
KINDS: tuple[dict[str, float], ...] = (
    TIMES,
    SIZES,
    RATES,
    OPERATIONS,
    {"%": 0.01},
    {"tokens/s": 1, "tokens a second": 1},
    {"times": 1, "×": 1},
)
UNITS = {unit: (kind, scale) for kind, units in enumerate(KINDS) for unit, scale in units.items()}

NUMBER = rf"(?:\d[\d,]*(?:\.\d+)?|\b(?i:{'|'.join(WORDS)})\b)"
SEVERAL = rf"{NUMBER}(?:(?: to | and | or |–|, | to about ){NUMBER}){{0,3}}"
UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
SPACE = "[ \u00a0\u202f-]"
QUANTITY = re.compile(
    rf"(?<![\w.,/^-])(?P<several>{SEVERAL}){SPACE}?(?P<unit>{UNIT})(?![\w/])(?! \d)"  # not 256 × 512
    rf"(?: (?:to|and|or|instead of|rather than) (?P<other>{NUMBER})(?=[.,:;)](?!\d)))?"
)
HEDGE = re.compile(
    r"\b(?:about|some|nearly|roughly|almost) (?:an? |one )?(?:half|quarter|third|f\w+th|sixth|tenth|twice)\b"
)
THINGS = r"(?:\w+ )?(?:tokens|steps|pages|programs|requests|rows|letters)\b"
COUNT = re.compile(rf"(?<![\w.,/^-])(?P<several>{SEVERAL}){SPACE}{THINGS}")
ANSWER = re.compile(r"\*\*Predict\.\*\*(.*?)<details>\s*<summary>Answer</summary>(.*?)</details>", re.DOTALL)
EQUATION = re.compile(r"[\d., ()+·×/-]*=[\d., ()+·×/-]*\d\)?")


class Quantity(NamedTuple):
    number: str
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"

    @property
    def kind(self) -> int:
        return UNITS[self.unit][0]

    @property
    def size(self) -> float:
        """In the base unit of its kind."""
        return float(self.number.replace(",", "")) * UNITS[self.unit][1]

    @property
    def slack(self) -> float:
        """Half of its last digit's place, and what floats add to it."""
        return 0.500001 * 10.0 ** -len(self.number.partition(".")[2]) * UNITS[self.unit][1]


def numbers(text: str) -> list[str]:
    return [str(WORDS.get(number.lower(), number)).rstrip(",") for number in re.findall(NUMBER, text)]


def quantities(text: str) -> Iterator[Quantity]:
    for match in QUANTITY.finditer(text):
        for number in numbers(f"{match['several']} {match['other'] or ''}"):
            yield Quantity(number, match["unit"])


def literals(node: ast.AST) -> Iterator[float]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, int | float):
            yield float(inner.value)


def prose(markdown: str) -> str:
    """The text without code, tables, formulas and the targets of links."""
    text = re.sub(r"^```.*?^```|\$\$.*?\$\$|`[^`\n]+`|<!--.*?-->", " ", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(
        r"\]\([^)]*\)|^\*\*Takes:\*\* .*", "]", text, flags=re.MULTILINE
    )  # an estimate, which the course's index computes
    return " ".join(line for line in text.splitlines() if not line.lstrip().startswith("|"))


def rows(markdown: str) -> str:
    """The rows of its tables."""
    return "\n".join(line for line in markdown.splitlines() if line.lstrip().startswith("|"))


def comments(code: str) -> str:
    """The comments of a cell."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return "\n".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)


class Page:
    """A page of the course: its words, and what its cells printed, asserted and set."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem[:2]
        cells = json.loads(path.read_text())["cells"]
        self.code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        self.words = "\n\n".join((*map(prose, texts), *map(rows, texts), *map(comments, self.code)))
        self.printed = "\n".join(shown(output) for cell in cells for output in cell.get("outputs", ()))
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self.trees = [compile(code, self.name, "exec", flags) for code in self.code]
        asserts = [node for tree in self.trees for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        self.claims = " \n".join(ast.unparse(node.msg) for node in asserts if node.msg is not None)
        self.asserted = {number for node in asserts for number in literals(node.test)}
        self.held = {number for tree in self.trees for number in literals(tree)}

    @cached_property
    def shown(self) -> tuple[Quantity, ...]:
        return (*quantities(self.printed), *quantities(self.claims))

    @cached_property
    def counted(self) -> set[float]:
        """Every number that stands in its outputs, its code or its assertions' messages."""
        texts = " ".join((self.printed, self.claims, *self.code))
        return self.held | {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d(?:\.\d+)?|\d", texts)}

    def has(self, quantity: Quantity) -> bool:
        if any(quantity.kind == one.kind and abs(quantity.size - one.size) <= quantity.slack for one in self.shown):
            return True
        # small whole numbers stand in code for many things, so as values of cells they prove nothing
        set_here = {value for value in self.held if not value.is_integer() or value >= 1000}
        number = float(quantity.number.replace(",", ""))
        return number in self.asserted or any(math.isclose(quantity.size, value) for value in self.asserted | set_here)

    def without_source(self, text: str) -> list[str]:
        """The measured numbers in `text` that come from nothing on this page."""
        wrong = [str(one) for one in quantities(text) if not self.has(one) and (self.name, str(one)) not in ALLOWED]
        wrong += [hedge for hedge in HEDGE.findall(text) if hedge not in self.claims]
        counts = [number for match in COUNT.finditer(text) for number in numbers(match["several"])]
        wrong += [
            f"{number} (a count)" for number in counts if count(number) > 12 and count(number) not in self.counted
        ]
        for question, answer in ANSWER.findall(text):
            known = self.counted | set(map(count, numbers(question)))
            wrong += [f"{one} (an answer)" for one in numbers(EQUATION.sub(" ", answer)) if count(one) not in known]
        return wrong


def count(number: str) -> float:
    return float(number.replace(",", ""))


def shown(output: dict[str, Any]) -> str:
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return "".join(text)


@cache
def page(name: str) -> Page:
    return Page(next(path for path in PAGES if path.name.startswith(name)))


def words_of(picture: Path) -> str:
    elements = ElementTree.parse(picture).iter()
    return " | ".join(one.text or "" for one in elements if one.tag.endswith(("}text", "}title")))


@cache
def bounds() -> frozenset[int]:
    """The sizes that the packages hold, which write them as `4 << 30`."""
    sources = (path.read_text() for package in ("toolkit", "kernels") for path in (ROOT / package).rglob("*.py"))
    found = (re.findall(r"\b(\d+) << (10|20|30)\b", source) for source in sources)
    return frozenset(int(number) << int(shift) for matches in found for number, shift in matches)


def sections(document: Path) -> list[str]:
    """Parts of a document from one heading to the next."""
    return re.split(
        r"^(?=#+ )",
        re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE),
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_says_no_number_that_its_cells_do_not_hold(path: Path) -> None:
    own = page(path.name[:2])
    assert not own.without_source(own.words), "say the relation, or let a cell print or assert the number"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_says_no_number_that_its_page_does_not_hold(path: Path) -> None:
    assert not page(path.name[:2]).without_source(words_of(path))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_the_section_of_a_measured_number_says_what_it_was_measured_on(path: Path) -> None:
    wrong = []
    for section in sections(path):
        if not MEASURED_ON.search(section):
            pages = [page(name) for name in re.findall(r"course/(\d\d)_\w+\.ipynb", section)]
            for one in quantities(prose(section)):
                known = any(linked.has(one) for linked in pages) or (path.stem, str(one)) in ALLOWED
                if not known and one.size not in bounds():
                    wrong.append(f"{one} in {section.partition(chr(10))[0]!r}")
    assert not wrong, "name the processor, device or benchmark in this section"


@pytest.mark.parametrize("name", ["README.md", "tutorials/README.md"])
def test_readme_repeats_what_its_pages_hold(name: str) -> None:
    held = set(quantities(" \n".join(path.read_text() for path in DOCS)))
    text = prose((ROOT / name).read_text())
    assert not [str(one) for one in quantities(text) if one not in held], "measured nowhere"


def test_the_row_of_readme_is_that_of_its_page() -> None:
    """The figures of Zen 4 for one file of four bits, and for random weights of 16 bits in comparison with others."""
    readme = (ROOT / "README.md").read_text().partition("<!-- figures: real files -->")[2].partition("\n\n")[0]
    row = re.sub(r"\]\([^)]*\)", "]", readme.strip().splitlines()[2])
    _, cold, warm, theirs = next(first_files())
    page = (
        next(path for path in DOCS if path.stem == "processors")
        .read_text()
        .partition("## Zen 4 and other engines")[2]
        .partition("\n## ")[0]
    )
    (sixteen,) = re.findall(
        r"^\| 135M, 16 bits \| (\d+) \(([\d.]+)\) \|[^|]*\|[^|]*\| (\d+) \(([\d.]+)\) \|", page, re.M
    )
    for shown, measured in zip(re.findall(r"([\d.]+) s\b", row), (cold[1], warm[1]), strict=True):
        assert float(shown) == pytest.approx(float(measured), abs=0.0501)
    assert re.findall(r"\[(\d+) tokens/s\] \(llama.cpp: (\d+)\)", row) == [(warm[2], theirs[2])]
    assert re.findall(r"\[(\d+)\] \(([\d.]+) ×", row) == [sixteen[:2], sixteen[2:]]


def first_files() -> Iterator[tuple[re.Match[str], list[str], list[str], list[str]]]:
    """The page's rows of each file: its name, the first figures with an empty cache, of later starts, of llama.cpp."""
    page = next(path for path in DOCS if path.stem == "processors").read_text()
    lines = [line for line in page.partition("## Starting, and memory")[2].splitlines() if line.startswith("|")]
    for at, line in enumerate(lines):
        found = re.match(r"\| (?P<name>.+) (?P<format>Q\w+) \((?P<size>\d+) MB\), empty cache \|", line)
        if found:
            rows = [[cell.split(";")[0].strip() for cell in one.split("|")[2:-1]] for one in lines[at : at + 4]]
            yield found, rows[0], rows[2], rows[3]


def test_one_page_says_how_many_tokens_a_second_the_real_model_makes() -> None:
    """Two that measure the same contradict each other, since no two hours of a machine are alike."""
    real = [page(path.name[:2]) for path in PAGES if "SmolLM2-135M-Instruct.Q4_1.gguf" in path.read_text()]
    speeds = [one.name for one in real if any(quantity.unit == "tokens/s" for quantity in quantities(one.printed))]
    assert speeds == ["18"]
    (table,) = re.findall(r"<!-- figures: real files -->\n\|([^|]*)\|", (ROOT / "README.md").read_text())
    assert re.search(r"Zen \d", table) and re.search(r"Zen \d", page("18").words), "what README's was measured on"


def test_what_is_allowed_is_there() -> None:
    texts = {path.stem[:2]: page(path.stem[:2]).words for path in PAGES} | {
        path.stem: prose(path.read_text()) for path in DOCS
    }
    left = [f"{name}: {one}" for name, one in ALLOWED if one not in map(str, quantities(texts[name]))]
    assert not left, "take it off the list"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("the pause grows from 3 ms to 13, and the first token comes after 49 ms instead of 70: so", 4),
        ("five to ten seconds of compiling", 2),
        ("a step of 257 tokens takes four times as long as one of 33", 2),
        ("One text has about half of its bound here", 1),
        ("the fifth prompt below has 156 tokens", 1),
        ("**Predict.** How many?\n<details><summary>Answer</summary>\n\n**0**. Without it, 13.\n\n</details>", 1),
        ("it takes 4.8 ms, 5 ms or 0.005 s, as printed; a matrix of 256 × 512 is none", 0),
        ("**Predict.** How many?\n<details><summary>Answer</summary>\n\n**0**: 8 = 3 + 5 of 20\n\n</details>", 0),
    ],
)
def test_numbers_without_a_source_are_found(tmp_path: Path, words: str, wrong: int) -> None:
    output = {"output_type": "stream", "text": ["budget 64: 4.8 ms, 0 of 20 pages\n"]}
    cells = [
        {"cell_type": "markdown", "source": [words]},
        {"cell_type": "code", "source": ["x = range(3)\nassert x, 'it is there'"], "outputs": [output]},
    ]
    path = tmp_path / "99_x.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    own = Page(path)
    assert len(own.without_source(own.words)) == wrong
