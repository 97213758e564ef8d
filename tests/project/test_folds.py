"""A reader of the course sees no answer before asking for it: folds of its notebooks, as stored and in JupyterLab."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from helpers import browsing

COURSE = Path(__file__).parents[2] / "tutorials" / "course"
PAGES = sorted(COURSE.glob("[0-9][0-9]_*.ipynb"))
OUTPUT = "Output:"


def folds(page: Path) -> list[str]:
    """The first line of each fold of a page, which JupyterLab shows: of code that tells an answer, and of outputs."""
    found, asked = [], False
    for cell in nbformat.read(page, as_version=4).cells:
        tags, state = set(cell.metadata.get("tags", ())), cell.metadata.get("jupyter", {})
        if cell.cell_type == "markdown":
            asked = "**Predict.**" in cell.source
            continue
        if tags & {"check", "solution"}:
            assert state.get("source_hidden"), f"{page.name} shows {cell.source}"
            found.append(cell.source.partition("\n")[0])
        if cell.outputs and (asked or "solution" in tags):
            assert state.get("outputs_hidden"), f"{page.name} shows what {cell.source} printed"
            found.append(cell.outputs[0].get("data", {}).get("text/plain", cell.source))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_notebook_folds_what_a_reader_has_not_asked_for(page: Path) -> None:
    assert set(folds(page)) == {"# Holds the answer above.", "# Our solution.", OUTPUT}


@pytest.mark.browser
def test_jupyterlab_shows_no_answer_before_a_reader_asks(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("jupyterlab")
    with browsing.served(tmp_path, []) as address:
        (tmp_path / browsing.NAME).write_text(PAGES[0].read_text())
        with sync_api.sync_playwright() as playwright, browsing.opened(playwright, address, height=9000) as page:
            notebook, lines = page.locator(".jp-Notebook"), folds(PAGES[0])
            notebook.locator(".jp-Placeholder").nth(len(lines) - 1).wait_for(state="attached")
            assert [one.strip() for one in notebook.locator(".jp-Placeholder").all_text_contents()] == lines
            answer, printed = "512 = (4 + 2 · 2) · 64.", "67% in the MLP"
            before = re.sub(r"\s+", " ", notebook.inner_text())
            assert "Predict." in before and answer not in before and printed not in before
            for summary in notebook.locator("summary").all():
                summary.click()
            for _ in range(3):  # each is gone once it is pressed
                notebook.locator(".jp-OutputPlaceholder:visible").first.click()
            after = re.sub(r"\s+", " ", notebook.inner_text())
            assert answer in after and printed in after
