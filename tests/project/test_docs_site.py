"""The documentation site: its links follow the repository's, notebooks keep their outputs, and it builds strictly."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers import browsing

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "docs"
PAGES = {
    "README.md": "index.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/decisions/0001-x.md": "decisions/0001-x.md",
    ".github/docs/pages/bounds.md": "bounds.md",
    "tutorials/guide/glossary.md": "guide/glossary.md",
    "tutorials/course/01_x.ipynb": "course/01_x.md",
}


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", FOLDER / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[a](tutorials/course/01_x.ipynb)", "[a](course/01_x.md)"),
        ("tutorials/course/01_x.ipynb", "[a](../guide/glossary.md)", "[a](../guide/glossary.md)"),
        ("tutorials/course/01_x.ipynb", "![a](../source/pictures/a.svg)", "![a](../pictures/a.svg)"),
        ("tutorials/guide/glossary.md", "[a](../../.github/docs/pages/bounds.md)", "[a](../bounds.md)"),
        ("README.md", "[a](.github/CONTRIBUTING.md#way)", "[a](contributing.md#way)"),
        ("README.md", "[a](.github/decisions)", "[a](decisions/0001-x.md)"),
        (".github/decisions/0001-x.md", "[a](../../README.md#use)", "[a](../index.md#use)"),
        ("tutorials/guide/glossary.md", '<img src="../source/pictures/a.png">', '<img src="../../pictures/a.png">'),
        ("README.md", '<source srcset="tutorials/source/pictures/a.png">', '<source srcset="pictures/a.png">'),
        (".github/docs/pages/bounds.md", "[a](../../decisions/0001-x.md)", "[a](decisions/0001-x.md)"),
        ("README.md", "[a](../../issues)", "a"),
        ("README.md", "[`errors`](toolkit/rekindle/errors.py)", "`errors`"),
        ("README.md", "[a](toolkit/not_there.py)", "[a](toolkit/not_there.py)"),
        ("README.md", "[a](#here) [b](https://example.org)", "[a](#here) [b](https://example.org)"),
        ("README.md", "```\n[a](toolkit/a.py)\n```", "```\n[a](toolkit/a.py)\n```"),
    ],
)
def test_links_follow_their_files(site: ModuleType, source: str, text: str, expected: str) -> None:
    assert site.relink(text, source, PAGES, None) == expected


def test_sources_are_linked_where_the_repository_is_known(site: ModuleType) -> None:
    linked = site.relink(
        "[a](../toolkit/rekindle/errors.py)", ".github/CONTRIBUTING.md", PAGES, "https://example.org/r/"
    )
    assert linked == "[a](https://example.org/r/tree/HEAD/toolkit/rekindle/errors.py)"


def test_every_tutorial_and_decision_has_a_page(site: ModuleType) -> None:
    pages = site.sources()
    names = {*(ROOT / "tutorials/course").glob("[0-9]*.ipynb"), *(ROOT / ".github" / "decisions").glob("*.md")}
    assert {str(path.relative_to(ROOT)) for path in names} <= set(pages)
    assert len(set(pages.values())) == len(pages)


def test_notebooks_keep_their_outputs(site: ModuleType) -> None:
    text = site.notebook(ROOT / "tutorials" / "course" / "02_what_a_step_does.ipynb")
    assert "```python\n" in text and "```text\n" in text and 'src="data:image/png;base64,' in text


def test_notebooks_can_be_downloaded_and_opened_where_the_repository_is_known(site: ModuleType) -> None:
    path = ROOT / "tutorials" / "course" / "02_what_a_step_does.ipynb"
    plain, linked = site.notebook(path), site.notebook(path, "https://github.com/someone/rekindle/")
    assert '<a href="../02_what_a_step_does.ipynb" download>' in plain
    assert "colab" not in plain
    assert (
        "(https://colab.research.google.com/github/someone/rekindle/blob/HEAD/tutorials/course/02_what_a_step" in linked
    )
    assert "`%pip install git+https://github.com/someone/rekindle`" in linked
    assert "(https://mybinder.org/v2/gh/someone/rekindle/HEAD?labpath=tutorials/course/02_what" in linked


def test_an_answer_is_folded_until_it_is_asked_for(site: ModuleType) -> None:
    text = site.notebook(ROOT / "tutorials" / "course" / "13_serving.ipynb")
    after = text.partition("have 32. How many come from the cache")[2]
    assert after.index("<summary>Output</summary>") < after.index("96 of 114 prompt tokens")
    assert "<pre><code>" in after and "markdown" not in after.partition("<details class")[2].partition("</details>")[0]
    assert after.index("96 of 114 prompt tokens") < after.index("</details>", after.index("<summary>Output</summary>"))


def test_no_page_asserts_an_answer_in_sight_of_its_question(site: ModuleType) -> None:
    """Next to a question there are code that shows something, and folds."""
    for path in sorted((ROOT / "tutorials/course").glob("[0-9]*.ipynb")):
        text = re.sub(r"<details.*?</details>", "", site.notebook(path), flags=re.DOTALL)
        for asked in text.split("**Predict.**")[1:]:
            (code,) = re.findall(r"```python\n(.*?)\n```", asked, re.DOTALL)[:1]
            after = asked.partition(code)[2].partition("\n\n")[2]
            assert not after.startswith(("```text", "<div>", "<img")), f"{path.name} shows what {code} printed"
            assert not re.search("^assert ", code, re.MULTILINE), f"{path.name} shows an answer in {code}"


def test_links_of_outputs_lead_to_pages_and_cells_to_write_in_are_left_out(site: ModuleType, tmp_path: Path) -> None:
    import nbformat

    new = nbformat.v4
    drawn = new.new_output(
        "display_data", {"text/html": '<a href="02_x.ipynb">a</a> <a href="https://e.org/03_y.ipynb">b</a>'}
    )
    cells = [
        new.new_markdown_cell("# 01 X\n\nwords"),
        new.new_code_cell("show()", outputs=[drawn]),
        new.new_code_cell("# Your answer.", metadata={"tags": ["yours"]}),
    ]
    path = tmp_path / "01_x.ipynb"
    nbformat.write(new.new_notebook(cells=cells), path)
    page = site.notebook(path)
    assert '<a href="../02_x/">' in page and 'href="https://e.org/03_y.ipynb"' in page
    assert "show()" in page and "Your answer" not in page


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("git@github.com:someone/rekindle.git", "https://github.com/someone/rekindle"),
        ("https://github.com/someone/rekindle", "https://github.com/someone/rekindle"),
        ("/srv/somewhere/rekindle", None),
        ("https://user:secret@example.org/a/b", None),
    ],
)
def test_the_address_is_that_of_the_clone(
    remote: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    address = runpy.run_path(str(ROOT / ".ci/address.py"))
    assert address["address"](tmp_path) is None and address["urls"](tmp_path) == {}
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    assert address["address"](tmp_path) == expected
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "another/fork")
    assert address["urls"](tmp_path)["Repository"] == "https://github.com/another/fork"


def test_no_file_states_the_address() -> None:
    files = [ROOT / "pyproject.toml", *FOLDER.glob("*.yml"), ROOT / "README.md", ROOT / ".github/CITATION.cff"]
    assert not [path.name for path in files if re.search(r"github\.com/[\w-]+/rekindle", path.read_text())]


def test_formulas_are_drawn_in_the_colour_of_the_text(site: ModuleType) -> None:
    drawn = site.folded("Weights $w$ cost $5 or\n\n$$\\frac{a}{b}$$\n\n<details>x</details>")
    assert drawn.count("<svg") == 2
    assert drawn.count("currentColor") == 2
    assert "cost $5 or" in drawn
    assert "<style" not in drawn
    assert '<details markdown="1">' in drawn


ASKED = "# 01 X\n\n**Predict.** How many?\n\n<details><summary>Answer</summary>\n\n**1,024** and **2.5**.\n\n</details>"


def test_a_prediction_has_a_field_that_knows_its_figures_and_hides_without_scripts(site: ModuleType) -> None:
    text = site.folded(ASKED)
    assert '<p class="guess" data-figures="1024 2.5" hidden>' in text
    assert text.index("How many?") < text.index("guess") < text.index("<summary>Answer")
    assert "guess" not in site.folded(ASKED.replace("**1,024** and **2.5**", "No number"))


@pytest.mark.browser
def test_the_field_compares_a_guess_with_the_answer(site: ModuleType) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    one = site.folded(ASKED.replace(" and **2.5**", ""))
    script = (FOLDER / "pages/site.js").read_text()
    said = []
    with sync_api.sync_playwright() as playwright, browsing.blank_page(playwright) as page:
        page.set_content(f"{site.folded(ASKED)}{one}<script>{script}</script>")
        for at, guess in ((0, "2.5"), (0, "1,024; 2.5"), (1, "12"), (1, "2,000"), (1, "1024"), (1, "many")):
            field = page.locator(".guess").nth(at)
            field.locator("input").fill(guess)
            field.locator("input").press("Tab")
            said.append(field.locator("output").text_content())
    assert said == [
        "1 of 2 are right.",
        "Right. The answer below says why.",
        "It is more.",
        "It is less.",
        "Right. The answer below says why.",
        "A number, please.",
    ]


def test_the_table_of_options_is_a_section_with_types_and_defaults(tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe")
    kind = runpy.run_path(str(FOLDER / "option_sections.py"))["OptionSections"]
    code = '''
class Config:
    """Words.

    Options:
        size ("auto"): tokens of a page, or
            "*" for all.
    """

    size: int | str

def serve(port: int = 8000):
    """Words.

    Options:
        port: where it listens.
    """
'''
    module = griffe.visit("m", filepath=tmp_path / "m.py", code=code)
    found = []
    for name in ("Config", "serve"):
        kind().on_object(obj=module[name])
        docstring = module[name].docstring
        docstring.parser = "google"
        (section,) = [one for one in docstring.parsed if one.kind.value == "parameters"]
        (option,) = section.value
        found.append((section.title, option.name, str(option.annotation), option.default, option.description))
    assert found == [
        ("Options:", "size", "int | str", '"auto"', 'tokens of a page, or\n"\\*" for all.'),
        ("Options:", "port", "int", "8000", "where it listens."),
    ]


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    # Not with --quiet: mkdocs then doesn't count warnings, and strict mode passes whatever is wrong.
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", FOLDER / "mkdocs.yml", "-d", tmp_path],
        check=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
    )
    reference = (tmp_path / "api" / "rekindle" / "index.html").read_text()
    assert 'id="rekindle.Session.generate"' in reference
    assert 'id="rekindle.errors.QueueFull"' in (tmp_path / "api" / "errors" / "index.html").read_text()
