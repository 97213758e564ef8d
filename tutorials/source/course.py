"""`python tutorials/source/course.py`: the course's index, made of what its pages say; `problems` is what its tests ask.

A page of the course has, besides its cells:

- a head: what to know before, what a reader can do afterwards, what others call the things on the page, and how many
  minutes it takes,
- a diagram and a formula,
- predictions: a question with a folded answer, in front of the cell that shows it. Every figure that the answer has in
  bold stands in an assertion, so that an answer can't differ from what is computed. The assertions are in a folded
  cell of their own, with the tag `check`, after the one that shows something: a reader sees no answer before asking,
- an exercise with a cell to write in, whose solution is a cell with the tag `solution` that asserts what it claims,
- a takeaway, what production systems do differently, and further reading.

An assertion's message is a claim of the page, and the index lists both.

Prose repeats no number that a cell prints: it says the relation, or a cell asserts the number. Every measured number in
prose and pictures is found by `tests/project/test_measured.py` if no cell holds it.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import jupytext

FOLDER = Path(__file__).resolve().parent
INDEX = FOLDER.parent / "README.md"
ENGINE = FOLDER.parent / "course" / "engine.py"
HEAD = ("**Before:**", "**Afterwards you can**", "**Also called:**")
LONGEST = 25  # minutes of a reader
ENDS = ("## Takeaway", "## In production", "## Further reading")
PREDICTION = re.compile(r"\*\*Predict\.\*\*(.*?)<details><summary>Answer</summary>(.*?)</details>", re.DOTALL)
FIGURE = re.compile(r"\*\*([\d.,]+)\*\*")
FIRST, LAST = "<!-- course -->", "<!-- end -->"

ENGINE_HEAD = '''"""An inference engine in seven steps, each of which changes one decision of the step before.

    python engine.py MODEL "Once upon a time"

It is made of the cells of pages 27 and 28 of rekindle's course, which explain it.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekindle.models import LoadedModel, ModelConfig, Tokenizer, load

'''


@dataclasses.dataclass(frozen=True)
class Cell:
    text: str
    code: bool
    solution: bool
    engine: bool = False
    check: bool = False

    def assertions(self) -> list[tuple[str, str]]:
        """Each assertion of the cell: its message, or nothing, and its condition."""
        if not self.code:
            return []
        tree = compile(self.text, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        found.sort(key=lambda node: node.lineno)
        return [(str(ast.literal_eval(node.msg)) if node.msg else "", ast.unparse(node.test)) for node in found]


@dataclasses.dataclass(frozen=True)
class Page:
    path: Path
    cells: tuple[Cell, ...]

    @classmethod
    def read(cls, path: Path) -> Page:
        cells = jupytext.read(path).cells
        return cls(
            path,
            tuple(
                Cell(
                    cell.source,
                    cell.cell_type == "code",
                    "solution" in cell.metadata.get("tags", ()),
                    "engine" in cell.metadata.get("tags", ()),
                    "check" in cell.metadata.get("tags", ()),
                )
                for cell in cells
            ),
        )

    @property
    def prose(self) -> str:
        return "\n\n".join(cell.text for cell in self.cells if not cell.code)

    @property
    def title(self) -> str:
        return self.prose.partition("\n")[0].removeprefix("# ")

    @property
    def question(self) -> str:
        return next(line.strip("*") for line in self.prose.splitlines() if line.startswith("*"))

    @property
    def predictions(self) -> int:
        return len(PREDICTION.findall(self.prose))

    @property
    def diagrams(self) -> int:
        return len(re.findall(r"!\[[^\]]+\]\(\.\./source/pictures/[^)]+\.svg\)", self.prose))

    @property
    def claims(self) -> list[tuple[str, str]]:
        return [claim for cell in self.cells for claim in cell.assertions()]

    @property
    def minutes(self) -> int:
        """An estimate of a reader's time, in steps of five: words, lines of code, predictions, exercise."""
        words = len(self.prose.partition("## Further reading")[0].split()) / 220
        code = sum(len(cell.text.split("\n")) - cell.text.count("\n\n") for cell in self.cells if cell.code) / 25
        return math.ceil((words + code + self.predictions / 2 + 3) / 5) * 5

    @property
    def models(self) -> str:
        code = "".join(cell.text for cell in self.cells if cell.code)
        names = ["the embedded model"] * bool(re.search(r'"tiny"|\btiny\.', code))
        names += ["SmolLM2, which page 18 fetches"] * ("REKINDLE_SMOLLM2" in code)
        return " and ".join(names) or "no model"

    @property
    def seconds(self) -> int | None:
        """How long the page took when its notebook was built."""
        built = self.path.parents[1] / "course" / f"{self.path.stem}.ipynb"
        seconds: int | None = json.loads(built.read_text())["metadata"].get("seconds") if built.exists() else None
        return seconds

    def _shown_after(self, index: int) -> list[Cell]:
        """The next cell of code, and the checks that follow it."""
        code = itertools.dropwhile(lambda cell: not cell.code, self.cells[index:])
        first = list(itertools.islice(code, 1))
        return first + list(itertools.takewhile(lambda cell: cell.check, code))

    def problems(self) -> list[str]:
        """What a page of the course must have and this one doesn't."""
        wrong = [f"has no {part}" for part in (*HEAD, "$$", *ENDS, "## Exercise") if part not in self.prose]
        if not self.diagrams:
            wrong.append("has no diagram")
        if not 3 <= self.predictions <= 5:
            wrong.append(f"asks for {self.predictions} predictions, not 3 to 5")
        wrong += [f"asserts {test} without saying what it claims" for message, test in self.claims if not message]
        for index, cell in enumerate(self.cells):
            for _, answer in [] if cell.code else PREDICTION.findall(cell.text):
                shown = self._shown_after(index)
                asserted = " ".join(test for later in shown for _, test in later.assertions())
                seen = " ".join(test for later in shown if not later.check for _, test in later.assertions())
                figures = FIGURE.findall(answer)
                if not figures:
                    wrong.append(f"has an answer without a figure in bold: {answer.strip()[:60]}")
                wrong += [
                    f"answers {figure}, and the next cell asserts no such figure"
                    for figure in figures
                    if not holds(asserted, figure)
                ]
                wrong += [
                    f"asserts {figure} in sight of its question: move it to a cell with the tag check"
                    for figure in figures
                    if holds(seen, figure)
                ]
        if f"**Takes:** about {self.minutes} minutes, with {self.models}." not in self.prose:
            wrong.append(f"needs the line **Takes:** about {self.minutes} minutes, with {self.models}.")
        if self.minutes > LONGEST:
            wrong.append(f"takes {self.minutes} minutes: divide it")
        solutions = [cell for cell in self.cells if cell.solution]
        if len(solutions) != self.prose.count("## Exercise") or not all(cell.assertions() for cell in solutions):
            wrong.append("needs a cell with the tag solution for its exercise, which asserts something")
        return [f"{self.path.name} {problem}" for problem in wrong]


def holds(assertions: str, figure: str) -> bool:
    """True if a figure of an answer stands in these assertions as a number of its own."""
    return re.search(rf"(?<![\d.]){re.escape(figure.replace(',', ''))}(?![\d.])", assertions) is not None


def pages() -> list[Page]:
    return [Page.read(path) for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))]


def tracks(listed: list[Page]) -> dict[str, list[Page]]:
    """The pages of each track, in its order, as page 00 lists them; a page outside of all is refused."""
    pages = {page.title[:2]: page for page in listed}
    found = {"The map": [pages["00"]]}
    for name, links in re.findall(r"^\| \*\*(.+?)\*\* \| (\[.+) \|$", pages["00"].prose, re.MULTILINE):
        found[name[0].upper() + name[1:]] = [pages[number] for number in re.findall(r"\[(\d\d)\]", links)]
    placed = sorted(page.path for some in found.values() for page in some)
    assert placed == [page.path for page in listed], "page 00 has each page in one of its tracks"
    return found


def table() -> str:
    """The index: the pages of each track, then every claim with the assertion that checks it."""
    names = ("page", "question", "minutes", "predictions", "exercises", "seconds to build")
    lines: list[str] = []
    for track, some in tracks(listed := pages()).items():
        lines += ["", f"### {track}", "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        for page in some:
            link = f"[{page.title}](course/{page.path.stem}.ipynb)"
            exercises = sum(cell.solution for cell in page.cells)
            row = (link, page.question, page.minutes, page.predictions, exercises, page.seconds)
            lines.append("| " + " | ".join(str(entry or "") for entry in row) + " |")
    claims = [
        f"| {page.title[:2]} | {escaped(message)} | <code>{escaped(test)}</code> |"
        for page in listed
        for message, test in page.claims
    ]
    longest = [page.title[:2] for page in listed if (page.seconds or 0) >= 120]
    took = f"{len(listed) - len(longest)} of {len(listed)} pages ran in less than two minutes on two cores"
    lines += ["", f"{took}; {', '.join(longest)} took longer." if longest else f"{took}."]
    head = ["", "## What the pages claim, and what checks it", ""]
    head += ["Building a page runs its assertions.", "", "| page | claim | assertion |", "|---|---|---|"]
    return "\n".join([*lines[1:], *head, *claims])


def escaped(text: str) -> str:
    """`text` as it can stand in a table's cell, as code or not."""
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("*", "&#42;"), ("_", "&#95;")):
        text = text.replace(char, entity)
    return text.replace("[", "&#91;").replace("]", "&#93;").replace("\n", " ")


def index() -> str:
    """The text of README.md as it should be."""
    before, _, rest = INDEX.read_text().partition(FIRST)
    return f"{before}{FIRST}\n\n{table()}\n\n{LAST}{rest.partition(LAST)[2]}"


def engine() -> str:
    """The file that the cells with the tag `engine` make."""
    parts = [cell.text.rstrip() for page in pages() for cell in page.cells if cell.engine]
    return ENGINE_HEAD + "\n\n\n".join([*parts, 'if __name__ == "__main__":\n    main()\n'])


def write() -> None:
    INDEX.write_text(index())
    ENGINE.write_text(engine())


if __name__ == "__main__":
    for page in pages():
        for problem in page.problems():
            print(problem)
    write()
