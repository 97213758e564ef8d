"""`python tutorials/source/build.py [01 05 …]`: execute pages from a fresh kernel and keep them in `tutorials/course`.

The `.py` files are the source. A notebook holds no widget state (nothing could revive it), no cell's execution time and
no machine's paths, so that building it twice on one machine changes little but the measured numbers. Its metadata has
the seconds that the whole page took. `--text` takes over words and assertions, which show nothing, for a
later build or test to run: other code that changed is refused. `--resume` executes a page and keeps the stored outputs
of the cells before the first change, so that speeds measured on a quiet machine stay where a later cell changes.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from pathlib import Path
from typing import Any

import course
import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
COURSE = FOLDER.parent / "course"
SECONDS = 600  # for one notebook on a busy machine; the tests ask for less
FOLDED = "Output:"  # first of a folded cell's outputs, since JupyterLab shows the first line of what it folds
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def built(source: Path) -> Path:
    """The executed notebook of a source."""
    return source.parents[1] / "course" / f"{source.stem}.ipynb"


class CellError(RuntimeError):
    """A cell raised, or printed what a reader should not see."""


def sources(names: list[str] | None = None) -> list[Path]:
    """The tutorials whose names start with one of `names`, or all."""
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    return [path for path in found if not names or path.name.startswith(tuple(names))]


def execute(source: Path, *, seconds: float = SECONDS, real: bool = False) -> Any:
    """The notebook with its outputs, from a kernel of its own; raises `CellError` naming the cell that is wrong.

    With `real` it has no cells but the first, which imports, and those with the tag `real`, which need a real model.
    """
    notebook = jupytext.read(source)
    if real:
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        notebook.cells = [cell for cell in code if cell is code[0] or "real" in cell.metadata.get("tags", ())]
    notebook.metadata = nbformat.NotebookNode(kernelspec=KERNEL, language_info={"name": "python"})
    client = nbclient.NotebookClient(
        notebook,
        timeout=seconds,
        kernel_name="python3",
        resources={"metadata": {"path": str(COURSE)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
    )
    client.execute()
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem[:2]}-{index:02d}"  # the same in every build
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(kept, cell.outputs) if output is not None]
            check(source, cell)
    fold(notebook)
    return notebook


def fold(notebook: Any) -> None:
    """Hide outputs that follow a question, the checks of answers, and solutions, until the reader runs or opens them.

    JupyterLab shows the first line of what it folds. So such cells begin with a comment, and their outputs with a line
    that tells nothing.
    """
    asked = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            asked = "**Predict.**" in cell.source
            continue
        tags = cell.metadata.get("tags", ())
        hidden = {"outputs_hidden": True} if (asked and "check" not in tags) or "solution" in tags else {}
        hidden |= {"source_hidden": True} if {"solution", "check"} & set(tags) else {}
        if hidden and "yours" not in tags:
            cell.metadata["jupyter"] = hidden
            outputs = [output for output in cell.outputs if output.get("data") != {"text/plain": FOLDED}]
            first = nbformat.v4.new_output("display_data", {"text/plain": FOLDED})
            cell.outputs = [first, *outputs] if outputs else []


def reworded(source: Path) -> Any:
    """The notebook that is there with the source's words and assertions; raises `CellError` if other code changed."""
    notebook = jupytext.read(source)
    saved = nbformat.read(built(source), as_version=4)
    executed, code = computing(saved), computing(notebook)
    if [shown(cell.source) for cell in code] != [shown(cell.source) for cell in executed]:
        raise CellError(f"{source.name}: its code changed, so it has to be executed: build it without --text")
    for cell, before in zip(code, executed, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem[:2]}-{index:02d}"
    fold(notebook)
    notebook.metadata = saved.metadata
    return notebook


def computing(notebook: Any) -> list[Any]:
    """The cells of code that can show something: not those that assert, and none that is left for a reader's answer."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and shown(cell.source)]


def resumed(source: Path, notebook: Any) -> Any:
    """The executed notebook with the stored outputs of the cells before the first one whose code changed."""
    saved = nbformat.read(built(source), as_version=4)
    executed, code = computing(saved), computing(notebook)
    for cell, before in zip(code, executed, strict=False):
        if shown(cell.source) != shown(before.source):
            break
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    fold(notebook)
    notebook.metadata = saved.metadata
    return notebook


def shown(code: str) -> str:
    """A cell's code without what can't change its outputs: assertions and layout."""

    class Silent(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.If | None:
            self.generic_visit(node)
            return node if node.body or node.orelse else None

    tree = compile(code, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return ast.unparse(Silent().visit(tree))


def kept(output: Any) -> Any:
    """An output without what only a live kernel can show; None if nothing is left of it."""
    data = output.get("data")
    if data is None:
        return output
    data.pop("application/vnd.jupyter.widget-view+json", None)
    return output if any(data.values()) else None  # a progress bar leaves an empty output


def check(source: Path, cell: Any) -> None:
    """Raise `CellError` for an error, a warning or anything else on stderr."""
    for output in cell.outputs:
        if output.output_type == "error":
            wrong = f"{output.ename}: {output.evalue}"
        elif output.output_type == "stream" and (output.name == "stderr" or "Warning" in output.text):
            wrong = output.text
        else:
            continue
        raise CellError(f"{source.name}: this cell\n\n{cell.source}\n\nprinted\n\n{wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="numbers of tutorials; all of them by default")
    parser.add_argument(
        "--text", action="store_true", help="only words and assertions changed: keep the outputs that are there"
    )
    parser.add_argument("--resume", action="store_true", help="keep the outputs of the cells before the first change")
    arguments = parser.parse_args()
    failed = 0
    for source in sources(arguments.names):
        began = time.monotonic()
        try:
            notebook = reworded(source) if arguments.text else execute(source)
        except (CellError, nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
            print(f"{source.name}: {error}", file=sys.stderr)
            failed += 1
            continue
        if arguments.resume:
            notebook = resumed(source, notebook)
        elif not arguments.text:
            notebook.metadata["seconds"] = round(time.monotonic() - began)
        target = built(source)
        nbformat.write(notebook, target)
        print(f"{target.name}: {time.monotonic() - began:.0f} s, {target.stat().st_size // 1024} KiB", flush=True)
    course.write()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
