"""Sliders of the course: their files are those of their code, their pages show them, and both languages agree."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers import browsing

FOLDER = Path(__file__).parents[2] / "tutorials" / "source"
sys.path.append(str(FOLDER))
import sliders  # noqa: E402

NAMES = sorted(sliders.SLIDERS)


@pytest.mark.parametrize("name", NAMES)
def test_a_slider_is_drawn_by_its_code_and_shown_by_its_page(name: str) -> None:
    text = sliders.SLIDERS[name].html()
    assert (FOLDER / "pictures" / f"{name}.html").read_text() == text, "run python tutorials/source/sliders.py"
    (page,) = (FOLDER.parent / "course").glob(f"{name[:2]}_*.ipynb")
    outputs = [output for cell in json.loads(page.read_text())["cells"] for output in cell.get("outputs", ())]
    shown = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    assert text in shown, f"run python tutorials/source/build.py {name[:2]}"


class Words(HTMLParser):
    """The text that a page shows where no script runs."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_read_without_scripts(name: str) -> None:
    slider, reader = sliders.SLIDERS[name], Words()
    reader.feed(slider.html())
    text = " ".join(reader.words)
    for words in (*slider.words().values(), *(one.words for one in (*slider.controls, *slider.results))):
        assert words in text
    for at in slider.columns:
        (first,) = [slider.words(**{control.name: at})[control.symbol] for control in slider.controls[:1]]
        assert first in text
    assert "<script" not in slider.html()


@pytest.mark.browser
def test_the_script_says_what_python_says() -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright, browsing.blank_page(playwright) as page:
        for slider in sliders.SLIDERS.values():
            page.set_content(slider.html())
            for share in (0.0, 0.6, 1.0):
                positions = {}
                for control in slider.controls:
                    steps = round((control.most - control.least) / control.step * share)
                    at = positions[control.name] = float(f"{control.least + steps * control.step:g}")
                    page.locator(f"[name={control.name}]").fill(f"{at:g}")
                expected = slider.words(**positions)
                found = {name: page.locator(f"[data-out={name}]").first.text_content() for name in expected}
                assert found == expected
                bars = [one for one in slider.results if one.fill]
                widths = [float(page.locator(f"[data-bar={one.name}]").get_attribute("width")) for one in bars]
                values = slider.values(**positions)
                longest = max(values[one.name] for one in bars)
                assert widths == pytest.approx(
                    [max(1, sliders.WIDTH * values[one.name] / longest) for one in bars], abs=0.1
                )
