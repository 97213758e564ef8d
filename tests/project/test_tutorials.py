"""Every tutorial runs from a fresh kernel, offline and without a warning; `.ci/run` prints how long each takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "tutorials"
sys.path.append(str(FOLDER))
import build  # noqa: E402

SOURCES = build.sources()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_runs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = FOLDER.parent
    monkeypatch.setenv("PYTHONPATH", f"{root / 'toolkit'}:{root / 'kernels'}")
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))  # nothing was compiled before: a new user's first run
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    build.execute(source)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_beside_it_is_its_own(source: Path) -> None:
    import jupytext

    saved = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert [cell.source for cell in saved.cells] == [cell.source for cell in jupytext.read(source).cells], (
        f"{source.name} changed: run python tutorials/build.py {source.name[:2]}"
    )
    for cell in saved.cells:
        if cell.cell_type == "code":
            build.check(source, cell)
            assert "widget-view" not in str(cell.outputs)
    text = source.with_suffix(".ipynb").read_text()
    assert not re.search(r"/(home|work|Users|tmp/venv)/", text), "a path of the machine that built it"
    assert len(text) < 1_500_000


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_is_short_and_explained(source: Path) -> None:
    import jupytext

    cells = jupytext.read(source).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert 5 <= len(cells) <= 45
    assert 4 <= len(code) <= 30
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith(f"# {source.name[:2]} ")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_private_names_are_said_to_be_private(source: Path) -> None:
    text = source.read_text()
    if re.search(r"^from rekindle\._src|^import rekindle\._src", text, re.MULTILINE):
        prose = " ".join(re.findall(r"^# (.+)$", text, re.MULTILINE))
        assert "`rekindle._src`" in prose and "private" in prose and "may change" in prose


@pytest.mark.parametrize(
    "output",
    [
        nbformat.v4.new_output("stream", name="stderr", text="x"),
        nbformat.v4.new_output("stream", name="stdout", text="DeprecationWarning: y"),
        nbformat.v4.new_output("error", ename="ValueError", evalue="z", traceback=[]),
    ],
)
def test_the_check_finds_what_readers_should_not_see(output: object) -> None:
    cell = nbformat.v4.new_code_cell("1", outputs=[output])
    with pytest.raises(build.CellError):
        build.check(FOLDER / "01_x.py", cell)


def test_widgets_leave_their_static_fallback() -> None:
    both = {"application/vnd.jupyter.widget-view+json": {}, "text/html": "<b>x</b>"}
    assert build.kept(nbformat.v4.new_output("display_data", both)).data == {"text/html": "<b>x</b>"}
    only = {"application/vnd.jupyter.widget-view+json": {}}
    assert build.kept(nbformat.v4.new_output("display_data", only)) is None
