"""Every tutorial runs from a fresh kernel, offline and without a warning; `.ci/run` prints how long each takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest

from helpers import real_checkpoints
from rekindle._src.views import style

FOLDER = Path(__file__).parents[2] / "tutorials" / "source"
sys.path.append(str(FOLDER))
import build  # noqa: E402
import course  # noqa: E402
import diagrams  # noqa: E402

SOURCES = build.sources()
REAL = [source for source in SOURCES if 'tags=["real"]' in source.read_text()]


@pytest.fixture
def reader(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the environment of a new user who reads the course: programs that one page compiled serve the next."""
    root = FOLDER.parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{root / 'toolkit'}:{root / 'kernels'}")
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path_factory.getbasetemp() / "reader"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_runs(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("REKINDLE_SMOLLM2", "")
    build.execute(source)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("source", REAL, ids=lambda path: path.stem)
def test_its_cells_run_with_a_real_model(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = real_checkpoints.path_or_reason("smollm2")
    if isinstance(path, str):
        pytest.skip(path)
    monkeypatch.setenv("REKINDLE_SMOLLM2", str(path))
    assert path.name in str([cell.outputs for cell in build.execute(source, real=True).cells])


@pytest.mark.parametrize("source", REAL, ids=lambda path: path.stem)
def test_pages_show_the_real_model(source: Path) -> None:
    saved = nbformat.read(build.built(source), as_version=4)
    real = [cell for cell in saved.cells if "real" in cell.metadata.get("tags", ())]
    assert real_checkpoints.REAL["smollm2"].file in str([cell.outputs for cell in real])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_beside_it_is_its_own(source: Path) -> None:
    import jupytext

    saved = nbformat.read(build.built(source), as_version=4)
    assert [cell.source for cell in saved.cells] == [cell.source for cell in jupytext.read(source).cells], (
        f"{source.name} changed: run python tutorials/source/build.py {source.name[:2]}"
    )
    for cell in saved.cells:
        if cell.cell_type == "code":
            build.check(source, cell)
            assert "widget-view" not in str(cell.outputs)
    text = build.built(source).read_text()
    assert not re.search(r"/(home|work|Users|tmp/venv)/", text), "a path of the machine that built it"
    assert len(text) < 1_500_000


BUILT_EARLIER: set[str] = set()
"""Pages with outputs of an earlier look. They measure or compute for minutes, so that they want a quiet machine."""

COLOUR = re.compile(r"#[0-9a-f]{6}\b|(?:rgb|hsl)a?\([\d.,% ]+\)", re.IGNORECASE)


def hue(colour: str) -> str:
    """A colour without its opacity."""
    if colour.startswith("#"):
        return ",".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    return ",".join(re.findall(r"[\d.]+%?", colour)[:3])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_its_outputs_have_the_colours_of_today(source: Path) -> None:
    """Views have their colours from one module, so that others show an output of an earlier version."""
    sources = Path(style.__file__), FOLDER / "drawing.py"
    known = {hue(one) for path in sources for one in COLOUR.findall(path.read_text())}
    saved = nbformat.read(build.built(source), as_version=4)
    outputs = [output.get("data", {}) for cell in saved.cells for output in cell.get("outputs", ())]
    shown = {one for data in outputs for one in COLOUR.findall("".join(data.get("text/html", "")))}
    earlier = sorted(one for one in shown if hue(one) not in known)
    if source.name[:2] in BUILT_EARLIER:
        assert earlier, "it was built again: take it off the list"
    else:
        assert not earlier, f"run python tutorials/source/build.py {source.name[:2]}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_is_short_and_explained(source: Path) -> None:
    import jupytext

    cells = jupytext.read(source).cells
    cells = [cell for cell in cells if not {"yours", "check"} & set(cell.metadata.get("tags", ()))]
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert 5 <= len(cells) <= 45
    assert 4 <= len(code) <= 30
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith(f"# {source.name[:2]} ")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_page_of_the_course_has_all_its_parts(source: Path) -> None:
    assert not course.Page.read(source).problems()


def test_few_answers_are_bounds() -> None:
    """Whatever one guesses, "more than 0.1" teaches little: most answers are a number, or the nearest of three."""
    pages = course.pages()
    answers = [answer.split() for page in pages for _, answer in course.PREDICTION.findall(page.prose)]
    bounds = [words for words in answers if "than" in words[1:3]]
    assert len(answers) > 100 and len(bounds) < 5


def test_the_index_is_made_of_the_pages() -> None:
    assert course.INDEX.read_text() == course.index(), "run python tutorials/source/course.py"


def test_an_answer_is_asserted_by_the_cell_below_it(tmp_path: Path) -> None:
    """A page whose answers, claims or exercise are checked by nothing is refused."""
    takes = "**Takes:** about 5 minutes, with no model."
    head = "\n\n".join((*course.HEAD, takes, "$$x$$", "![a](../source/pictures/a.svg)", *course.ENDS))
    asked = "**Predict.** How many? <details><summary>Answer</summary>**1,024** of them.</details>"

    def problems(*cells: tuple[str, str], head: str = head) -> str:
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_markdown_cell(f"# 01 X\n\n{head}")]
        for kind, text in cells:
            new = nbformat.v4.new_markdown_cell if kind == "words" else nbformat.v4.new_code_cell
            notebook.cells.append(new(text, metadata={"tags": [kind]} if kind in {"solution", "check"} else {}))
        path = tmp_path / "01_x.ipynb"
        nbformat.write(notebook, path)
        return "; ".join(course.Page.read(path).problems())

    shown, right = ("code", "print(len(x))"), ("check", 'assert len(x) == 1024, "there are many"')
    solution = ("solution", 'assert f(2) == 4, "it doubles"')
    thrice = (("words", asked), shown, right) * 3
    exercise = ("words", "## Exercise")
    assert problems(*thrice, exercise, solution) == ""
    assert "2 predictions" in problems(*thrice[3:], exercise, solution)
    seen = ("code", right[1])
    assert "in sight of its question" in problems(("words", asked), seen, *thrice, exercise, solution)
    assert "in sight of its question" in problems(("words", asked), seen, right, *thrice, exercise, solution)
    apart = (("words", asked), shown, ("words", "More."), right)
    assert "answers 1,024" in problems(*apart, *thrice, exercise, solution)
    assert "needs the line **Takes:** about 5" in problems(
        *thrice, exercise, solution, head=head.replace("5 m", "10 m")
    )
    assert "divide it" in problems(*thrice, exercise, solution, head="word " * 6000 + head)
    for part, missing in (
        (course.HEAD[1], course.HEAD[1]),
        ("$$x$$", "$$"),
        ("![a](../source/pictures/a.svg)", "diagram"),
    ):
        assert f"has no {missing}" in problems(*thrice, exercise, solution, head=head.replace(part, ""))
    wrong = ("check", 'assert len(x) == 11024, "there are more"')
    assert "answers 1,024" in problems(("words", asked), wrong, *thrice, exercise, solution)
    assert "tag solution" in problems(*thrice, exercise)
    assert "has no ## Exercise" in problems(*thrice, solution)
    idle = ("solution", "print(2)")
    assert "tag solution" in problems(*thrice, exercise, idle)
    silent = ("code", "assert await f() == 1024")
    assert "without saying" in problems(("words", asked), silent, *thrice, exercise, solution)


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_diagrams_are_drawn_by_their_code(name: str) -> None:
    import xml.etree.ElementTree as ElementTree

    svg = diagrams.DIAGRAMS[name]().svg()
    assert (FOLDER / "pictures" / f"{name}.svg").read_text() == svg, "run python tutorials/source/diagrams.py"
    assert ElementTree.fromstring(svg).attrib["role"] == "img"


@pytest.mark.parametrize("path", sorted((FOLDER / "pictures").glob("*.svg")), ids=lambda path: path.stem)
def test_diagrams_have_colours_in_viewers_without_style_sheets(path: Path) -> None:
    """Attributes alone make the light theme; the style sheet has the dark one, and a rule for each class."""
    import xml.etree.ElementTree as ElementTree

    svg = ElementTree.parse(path).getroot()
    wrong: list[str] = []
    classes: set[str] = set()

    def look(element: ElementTree.Element, fill: str, stroke: str) -> None:
        fill, stroke = element.get("fill", fill), element.get("stroke", stroke)
        kind = element.tag.rpartition("}")[2]
        visible = [colour for colour in (fill, stroke) if colour != "none"]
        if kind in {"rect", "text", "line", "path"}:
            if not visible or not all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in visible):
                wrong.append(f"{kind} has the colours {fill!r} and {stroke!r}")
            elif kind == "rect" and int(fill[1:], 16) < 0xC00000:
                wrong.append(f"a box is as dark as its words: {fill}")
        if element.get("style"):
            wrong.append(f"{kind} has style={element.get('style')!r}, which hides its attributes")
        classes.update(element.get("class", "").split())
        for child in element:
            look(child, fill, stroke)

    look(svg, "black", "none")
    assert not wrong
    style = "".join(element.text or "" for element in svg.iter() if element.tag.endswith("style"))
    assert style.startswith("@media (prefers-color-scheme: dark) {"), "all of it is for the dark theme"
    assert classes <= set(re.findall(r"\.(\w+)", style)), "each class has its colour in the dark theme"
    assert "var(" not in path.read_text()


def test_words_are_taken_over_without_executing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "course").mkdir()
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "02_x.py"
    source.write_text((FOLDER / "02_what_a_step_does.py").read_text().replace("# # 02 What", "# # 02 Really, what"))
    build.built(source).write_text((build.COURSE / "02_what_a_step_does.ipynb").read_text())
    notebook = build.reworded(source)
    assert notebook.cells[0].source.startswith("# 02 Really, what")
    assert any(cell.get("outputs") for cell in notebook.cells)
    source.write_text(source.read_text().replace("reports = []", "reports = []\n    assert True"))
    assert any("assert True" in cell.source for cell in build.reworded(source).cells)
    source.write_text(source.read_text().replace("max_tokens=12", "max_tokens=13"))
    with pytest.raises(build.CellError, match="its code changed"):
        build.reworded(source)


def test_outputs_before_the_first_change_stay(tmp_path: Path) -> None:
    for folder in ("course", "source"):
        (tmp_path / folder).mkdir()
    source = tmp_path / "source" / "01_x.py"
    new, output = nbformat.v4, nbformat.v4.new_output
    cells = [new.new_code_cell(code, outputs=[output("stream", text="before")]) for code in ("a = 1", "b = 2", "c = 3")]
    nbformat.write(new.new_notebook(cells=cells, metadata={"seconds": 7}), build.built(source))
    again = [new.new_code_cell(code, outputs=[output("stream", text="after")]) for code in ("a = 1", "b = 4", "c = 3")]
    notebook = build.resumed(source, new.new_notebook(cells=again))
    assert [cell.outputs[0].text for cell in notebook.cells] == ["before", "after", "after"]
    assert notebook.metadata["seconds"] == 7


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
