"""`rekindle learn`: copies a page of the course, names missing packages, and opens the copy in JupyterLab."""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from rekindle._src.cli.usage import Parser
from rekindle._src.core.names import nearest
from rekindle.errors import InvalidRequest, RekindleError

PACKAGE: Final = Path(__file__).parents[3]

NEEDS = ()
FEATURES: Final = {
    "uvicorn": (".serve(",),
    "llguidance": (" schema=", " regex=", " choice=", " grammar="),
    "PIL": (" images=",),
}
"""Optional modules that a page needs without importing them, and the code that needs them."""

OPTIONAL: Final = frozenset({"ray", "torch", "transformers"})  # a page leaves out the part that needs it
_PICTURE: Final = re.compile(r"\.\./source/pictures/([\w.-]+)")
_DRAWING: Final = re.compile(r'"(\d\d_\w+\.(?:svg|html))"')  # that a cell shows
_FILE: Final = re.compile(r"\]\((\w+\.py)\)")
_ANSWER: Final = "<details><summary>Answer</summary>"
_LINK: Final = re.compile(r"(?<!!)\[([^\[\]]*)\]\(\.\./((?:guide/|\.\./)[\w./#-]+)\)")


def options(command: Parser) -> None:
    command.add("page", "its number, such as 05, or words of its title; without it, list the pages", nargs="?")
    command.add(
        "--to",
        "the folder for copies (default rekindle-course); a copy that is there is kept",
        default="rekindle-course",
    )
    command.flag("--handout", "leave out answers, their checks and solutions: a copy for a class")
    command.flag("--print", "print the path of the copy and open nothing")


class CoursePage(NamedTuple):
    """A page of the course as it is installed."""

    path: Path
    cells: list[dict[str, Any]]

    @property
    def number(self) -> str:
        return self.path.name[:2]

    @property
    def title(self) -> str:
        return _text(self.cells[0]).strip().splitlines()[0].removeprefix("# ")

    @property
    def question(self) -> str:
        return next(line.strip("*") for line in _text(self.cells[0]).splitlines() if line.startswith("*"))

    @property
    def missing(self) -> list[str]:
        """The optional modules of its cells without an installation."""
        code = "\n".join(_text(cell) for cell in self.cells if cell["cell_type"] == "code")
        names = {
            *_imports(code),
            *(module for module, words in FEATURES.items() if any(word in code for word in words)),
        }
        return sorted(name for name in names - OPTIONAL if importlib.util.find_spec(name) is None)


def run(arguments: argparse.Namespace) -> int:
    """List the pages, or copy one and open it."""
    pages = installed()
    if arguments.page is None:
        for page in pages:
            print(f"{page.title:48} {page.question}")
        print("\nrekindle learn 05 copies page 05 here and opens it in JupyterLab")
        return 0
    page = chosen(arguments.page, pages)
    target, new = copied(page, Path(arguments.to), handout=arguments.handout)
    print(f"{target} was there: it keeps what you wrote" if not new else f"copied to {target}", file=sys.stderr)
    missing = page.missing
    if missing:
        fix = "pip install 'rekindle[notebook]' brings all that the course needs"
        print(f"the page needs {', '.join(missing)}, not installed here: {fix}", file=sys.stderr)
    lab = importlib.util.find_spec("jupyterlab") is not None
    if missing or not lab or arguments.print or not sys.stdout.isatty():
        print(target)
        return 0
    return subprocess.call([sys.executable, "-m", "jupyterlab", str(target)])


def installed() -> list[CoursePage]:
    """Return the pages of this installation, a wheel or a clone."""
    folder = next((folder for folder in (PACKAGE / "course", _clone()) if folder.is_dir()), None)
    if folder is None:
        raise RekindleError(f"{PACKAGE} holds no course. Install a wheel, or a clone with -e")
    paths = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    return [CoursePage(path, json.loads(path.read_text(encoding="utf-8"))["cells"]) for path in paths]


def chosen(name: str, pages: Iterable[CoursePage]) -> CoursePage:
    """Return the page with a number, or with words in its title."""
    pages = list(pages)
    number = name.zfill(2) if name.isdecimal() else name
    found = [page for page in pages if page.number == number or page.path.stem == name]
    found = found or [page for page in pages if name.lower() in page.title.lower()]
    if len(found) == 1:
        return found[0]
    if found:
        titles = "; ".join(page.title for page in found)
        raise InvalidRequest("page", name, f"{len(found)} pages have it in their titles", f"Pass a number: {titles}")
    close = nearest(name, [page.path.stem[3:] for page in pages])
    hint = f"Did you mean {close}? " if close else ""
    raise InvalidRequest("page", name, "no page has this number or title", f"{hint}`rekindle learn` lists the pages")


def copied(page: CoursePage, folder: Path, *, handout: bool = False) -> tuple[Path, bool]:
    """Copy a page without outputs, with its pictures and files. True if it is new: a reader's copy is not replaced.

    A handout has no answers either, and no cells that check or solve; the page itself is a teacher's edition of it.
    """
    target = folder / (f"{page.path.stem}_handout.ipynb" if handout else page.path.name)
    if target.exists():
        return target, False
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    notebook = json.loads(page.path.read_text(encoding="utf-8"))
    links = project_links()
    if handout:
        notebook["cells"] = [
            cell for cell in notebook["cells"] if not {"check", "solution"} & set(cell["metadata"].get("tags", ()))
        ]
    for cell in notebook["cells"]:
        text, code = _text(cell), cell["cell_type"] == "code"
        for picture in (_DRAWING if code else _PICTURE).findall(text):
            shutil.copyfile(_pictures(page) / picture, folder / "pictures" / picture)
        if code:
            cell.update(outputs=[], execution_count=None)
            continue
        for file in _FILE.findall(text):
            if not (folder / file).exists():  # a reader changes it, too
                shutil.copyfile(page.path.parent / file, folder / file)
        text = _unanswered(text) if handout else text
        text = text.replace("../source/pictures/", "pictures/")
        cell["source"] = _LINK.sub(lambda match: _absolute(match, links), text)
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return target, True


def _unanswered(text: str) -> str:
    """Return the Markdown without its folded answers."""
    before, *folds = text.split(_ANSWER)
    return before + "".join(fold.partition("</details>")[2].lstrip("\n") for fold in folds)


def _clone() -> Path:
    return PACKAGE.parents[1] / "tutorials" / "course"


def _pictures(page: CoursePage) -> Path:
    beside = page.path.parent / "pictures"
    return beside if beside.is_dir() else page.path.parents[1] / "source" / "pictures"


def _absolute(match: re.Match[str], links: dict[str, str]) -> str:
    """Return a link to a page of the guide with an address, or its words alone where none is known."""
    words, path = match.groups()
    if "Repository" not in links:
        return words
    place = "tutorials/" + path if path.startswith("guide/") else path.removeprefix("../")
    return f"[{words}]({links['Repository']}/blob/HEAD/{place})"


def project_links() -> dict[str, str]:
    """Return the links in the metadata of the installed package."""
    try:
        lines = importlib.metadata.metadata("rekindle").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {name: url for name, _, url in (line.partition(", ") for line in lines)}


def _imports(code: str) -> set[str]:
    """Return the modules that a page imports in any case: imports within an `if` are left out."""
    tree = compile(code, "page", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    found |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in found}


def _text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])
