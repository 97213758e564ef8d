"""`rekindle learn`: pages are listed, chosen and copied without their answers, and a reader's copy is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rekindle._src.cli.commands import learn
from rekindle._src.cli.main import main
from rekindle.errors import InvalidRequest, RekindleError


def test_pages_are_listed_with_their_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.match(r"\d\d ", line)]) == len(learn.installed()) >= 26
    assert any(line.startswith("05 The prefix cache") and "computed again" in line for line in lines)


def test_a_page_is_copied_without_answers_and_with_its_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", "5", "--to", str(tmp_path)]) == 0
    target = tmp_path / "05_prefix_cache.ipynb"
    assert capsys.readouterr().out.strip() == str(target), "nothing opens where no terminal asks"
    cells = json.loads(target.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs")]
    pictures = re.findall(r"\]\(pictures/([^)]+)\)", target.read_text())
    assert pictures and all((tmp_path / "pictures" / name).is_file() for name in pictures)
    assert not re.search(r"\]\(\.\./", target.read_text())


def test_a_handout_has_no_answers_and_is_no_teachers_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["learn", "18", "--to", str(tmp_path)]) == main(["learn", "18", "--handout", "--to", str(tmp_path)]) == 0
    )
    whole, handout = (Path(name).read_text() for name in capsys.readouterr().out.split())
    for secret in ("<summary>Answer", "== 4.5", "Our solution"):
        assert secret in whole and secret not in handout
    for shown in ("**Predict.**", "# Your answer.", "def file_gb", "## Takeaway"):
        assert shown in handout


@pytest.mark.parametrize("name", ["00_map.svg", "19_slider.html"])
def test_a_file_that_a_cell_shows_is_copied(name: str, tmp_path: Path) -> None:
    learn.copied(learn.chosen(name[:2], learn.installed()), tmp_path)
    assert (tmp_path / "pictures" / name).is_file()


def test_the_file_of_a_page_comes_with_it_and_keeps_what_a_reader_wrote(tmp_path: Path) -> None:
    page = learn.chosen("27", learn.installed())
    learn.copied(page, tmp_path)
    assert (tmp_path / "engine.py").read_text() == (page.path.parent / "engine.py").read_text()
    (tmp_path / page.path.name).unlink()
    (tmp_path / "engine.py").write_text("mine")
    learn.copied(page, tmp_path)
    assert (tmp_path / "engine.py").read_text() == "mine"


def test_a_copy_that_a_reader_wrote_in_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "05_prefix_cache.ipynb"
    target.write_text("mine")
    assert main(["learn", "05", "--to", str(tmp_path), "--print"]) == 0
    assert target.read_text() == "mine"
    assert "keeps what you wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("99", "no page has this number"),
        ("a", "pages have it in their titles"),
        ("prefix_cash", "Did you mean prefix_cache"),
    ],
)
def test_a_name_of_no_page_is_refused(name: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        learn.chosen(name, learn.installed())
    assert main(["learn", name]) == 1
    assert problem in capsys.readouterr().err


def test_words_of_a_title_name_a_page() -> None:
    assert learn.chosen("roofline", learn.installed()).number == "19"


def test_what_a_page_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = learn.importlib.util.find_spec
    monkeypatch.setattr(learn.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else there(name))
    assert main(["learn", "13", "--to", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "needs uvicorn" in said.err and "rekindle[notebook]" in said.err
    assert main(["learn", "02", "--to", str(tmp_path)]) == 0
    assert "needs" not in capsys.readouterr().err


def test_links_to_the_guide_lead_to_the_repository_where_one_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = learn.chosen("17", learn.installed())
    monkeypatch.setattr(learn, "project_links", dict)
    plain, _ = learn.copied(page, tmp_path / "plain")
    monkeypatch.setattr(learn, "project_links", lambda: {"Repository": "https://example.org/r"})
    linked, _ = learn.copied(page, tmp_path / "linked")
    assert "[Adapters]" not in plain.read_text()
    assert "[Adapters](https://example.org/r/blob/HEAD/tutorials/guide/adapters.md)" in linked.read_text()


def test_a_wheels_pages_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = learn.chosen("05", learn.installed())
    (tmp_path / "course" / "pictures").mkdir(parents=True)
    (tmp_path / "course" / page.path.name).write_text(page.path.read_text())
    (tmp_path / "course" / "pictures" / "05_tree.svg").write_text("<svg/>")
    monkeypatch.setattr(learn, "PACKAGE", tmp_path)
    (only,) = learn.installed()
    learn.copied(only, tmp_path / "out")
    assert (tmp_path / "out" / "pictures" / "05_tree.svg").read_text() == "<svg/>"
    monkeypatch.setattr(learn, "PACKAGE", tmp_path / "nothing" / "rekindle")
    with pytest.raises(RekindleError, match="holds no course"):
        learn.installed()
