"""Pictures of attention: what they leave out and say so, what a page without scripts shows, and files for papers."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle._src.evaluation.attention import AttentionMap, AttentionMaps
from rekindle._src.evaluation.attention_picture import CELLS, SIDE
from rekindle._src.views.labels import visible
from rekindle.errors import ConfigError, InvalidRequest

EVIL = '</script><b onmouseover="alert(1)">'


def made(count: int = 6, heads: int = 2, *, layer: int = 0, reading: Any = None) -> AttentionMap:
    positions = np.arange(count, dtype=np.int32) if reading is None else np.array(reading, np.int32)
    weights = np.random.default_rng(layer).random((heads, len(positions), count), np.float32) + 0.01
    weights[..., 0] += count  # they rest on position 0
    weights *= np.arange(count) <= positions[:, None]
    weights /= weights.sum(axis=-1, keepdims=True)
    tokens = tuple(EVIL if at == 2 else f" t{at}" for at in range(count))
    return AttentionMap(tokens, layer, weights, positions)


def data_of(shown: AttentionMap | AttentionMaps) -> Any:
    """The data in the saved form, as a page reads it."""
    match = re.search(r'mount\(document\.getElementById\("[^"]+"\), "attention", (.*)\);\n\}\)', shown._repr_html_())
    assert match is not None
    return json.loads(match[1])


def shares_of(data: Any, layer: int = 0) -> Any:
    levels = np.frombuffer(base64.b64decode(data["cells"][layer]), np.uint8)
    return (levels.reshape(data["heads"][layer], len(data["rows"]), len(data["columns"])) / 255.0) ** 2


def without_scripts(shown: AttentionMap) -> str:
    return re.sub(r"<script>.*?</script>", "", shown._repr_html_(), flags=re.DOTALL)


def test_each_head_has_its_weights() -> None:
    maps = AttentionMaps([made(), made(layer=3)])
    data = data_of(maps)
    assert data["layers"] == [0, 3] == list(maps)
    for place, each in enumerate(maps.values()):
        np.testing.assert_allclose(shares_of(data, place), each.weights, atol=0.004)
    assert repr(maps) == "<AttentionMaps: 2 layers, 2 heads, 6 positions>"


def test_what_has_no_place_is_summed_and_said() -> None:
    shown = made(2000, 1)
    data = data_of(shown)
    assert len(data["rows"]) == len(data["columns"]) == SIDE
    assert data["columns"][1] == "1,953 more" and data["spans"][1] == [1, 1954]
    assert "the last 48 of 2,000 positions that read, and one column sums up 1,953 positions" in data["note"]
    np.testing.assert_allclose(shares_of(data)[0].sum(axis=-1), 1.0, atol=0.05)
    only = data_of(made(2000, 1, reading=[7, 40]))
    assert only["columns"] == [visible(text) for text in made(2000, 1).tokens[:41]] and only["note"] == ""


def test_a_figure_of_many_layers_and_heads_is_bounded() -> None:
    maps = AttentionMaps([made(60, 64, layer=layer) for layer in range(80)])
    data = data_of(maps)
    assert 80 * 64 * len(data["rows"]) * len(data["columns"]) <= CELLS
    assert len(maps._repr_html_()) < 2.5e6


def test_a_page_without_scripts_shows_the_first_state() -> None:
    page = without_scripts(made())
    assert "attention of layer 0, mean of its heads" in page
    assert page.count("<svg") == 1 and page.count('<img src="data:image/png') == 2
    assert re.search(r"<title>·t5 reads ·t1: \d+\.\d%</title>", page), "numbers on hover"
    assert re.search(r"position 0, which gets \d+%, is left out", page)
    assert not re.search(r"<title>[^<]* reads ·t0:", page)
    text = page.partition("what ·t5 reads, in the text")[2]
    shades = [float(share) for share in re.findall(r'<span title="[\d.]+%" style="[^"]*,([\d.]+)\)">', text)]
    assert len(shades) == 6 and shades[0] == 0.0 and max(shades) == 0.5, "position 0 would hide the others"
    assert ">0 <span" in page and "linear-gradient" in page, "what the shades mean"
    assert "<b " not in page and "onmouseover=" not in page


def test_names_have_the_room_that_they_need() -> None:
    """Tokens of one letter leave no gap around the map, and long or wide ones are not cut."""

    def room(*tokens: str) -> tuple[float, float]:
        weights = np.full((1, len(tokens), len(tokens)), 1 / len(tokens), np.float32)
        data = data_of(AttentionMap(tokens, 0, weights, np.arange(len(tokens), dtype=np.int32)))
        return data["left"], data["top"]

    assert room("a", "b") < (20, 20) < (90, 80) < room("a", "b" * 12) < room("a", "語" * 12)


def test_nothing_ends_the_script_or_the_element() -> None:
    page = made()._repr_html_()
    assert page.count("</script>") == 1
    assert "<b " not in page


@pytest.mark.parametrize("options", [{}, {"head": 1}, {"head": -1, "first": True}])
def test_a_saved_figure_is_plain_xml_for_any_program(tmp_path: Path, options: Any) -> None:
    path = made().save(tmp_path / "figure.svg", **options)
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert {"var(", "rgba(", "<script", "href"}.isdisjoint(re.findall(r"var\(|rgba\(|<script|href", text))
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert ("head 1" in names) == (not options)
    assert ("·t5" in names) == bool(options)


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    count = [
        (made().save(tmp_path / "figure.svg", head=0, first=first)).read_text().count("crispEdges") for first in (0, 1)
    ]
    assert count[1] > count[0], "position 0 is a column"
    with pytest.raises(InvalidRequest, match=r"head=2: is not among the layer's 2 heads\. Use 0 to 1"):
        made().save(tmp_path / "figure.svg", head=2)
    with pytest.raises(ConfigError, match="path="):
        made().save("\0")


def test_labels_are_seen_and_change_nothing_around_them() -> None:
    assert visible(" a\n") == "·a↵"
    assert visible("") == "∅"
    assert visible("\x00\x1b") == "␀␛"
    assert visible("a\u202eb\ud800\ufffe") == "a\ufffdb\ufffd\ufffd"
    assert visible("x" * 40) == "x" * 11 + "…"
    assert visible("語 ") == "語·"


def test_one_token_alone_is_shown() -> None:
    page = without_scripts(made(1))
    assert "is left out" not in page
    assert "<title>·t0 reads ·t0: 100.0%</title>" in page


@pytest.mark.browser
def test_heads_layers_and_cells_are_reached_by_pointer_and_keys() -> None:
    api = pytest.importorskip("playwright.sync_api")
    from helpers import browsing

    maps = AttentionMaps([made(), made(layer=3, heads=3)])
    with api.sync_playwright() as playwright, browsing.blank_page(playwright, width=360, height=640) as page:
        page.set_content("<meta name='viewport' content='width=device-width'>" + maps._repr_html_())
        assert page.get_by_text("attention of layer 0, mean of its heads").is_visible()
        page.get_by_role("button", name="head 1").click()
        map_of_all = page.get_by_role("img", name="attention of layer 0, head 1")
        map_of_all.focus()
        assert page.get_by_text("what ·t5 (5) reads, head 1; point at another token").is_visible()
        page.keyboard.press("ArrowUp")
        share = maps[0].weights[1, 5, 5]
        assert page.get_by_text(f"·t5 (5) reads ·t5 (5): {100 * share:.1g}").is_visible()
        page.keyboard.press("ArrowLeft")
        assert page.get_by_text("·t5 (5) reads ·t4 (4): ").is_visible()
        page.keyboard.press("ArrowUp")
        assert page.get_by_text("what ·t4 (4) reads, head 1").is_visible(), "the text follows the map"
        shade = "(one) => Number(getComputedStyle(one).backgroundColor.match(/[\\d.]+(?=\\)$)/)[0])"
        row, token = maps[0].weights[1, 4], page.get_by_text("t3", exact=True).first
        assert token.evaluate(shade) == pytest.approx(0.5 * row[3] / row[1:].max(), abs=0.02)
        token.hover()
        assert page.get_by_text("what ·t3 (3) reads, head 1").is_visible(), "a token that is pointed at reads"
        page.get_by_role("slider", name="layer").fill("1")
        assert page.get_by_text("attention of layer 3, head 1").is_visible()
        assert page.get_by_role("button", name="head 2").is_visible()
        page.keyboard.press("Tab")
        assert page.get_by_text("position 0, which gets").is_visible()
        page.get_by_role("checkbox", name="position 0").check()
        assert page.get_by_text("position 0, which gets").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.locator("b").count() == 0, "a token's text is text"


@pytest.mark.browser
def test_two_thousand_tokens_do_not_stall() -> None:
    api = pytest.importorskip("playwright.sync_api")
    from helpers import browsing

    maps = AttentionMaps([made(2000, 16, layer=layer, reading=range(1900, 2000)) for layer in range(2)])
    with api.sync_playwright() as playwright, browsing.blank_page(playwright) as page:
        page.set_content(maps._repr_html_())
        taken = page.evaluate(
            """() => {
                const input = document.querySelector("input[type=range]"), times = [];
                for (let at = 0; at < 20; at += 1) {
                    const before = performance.now();
                    input.value = at % 2;
                    input.dispatchEvent(new Event("input"));
                    times.push(performance.now() - before);
                }
                return times.sort((a, b) => a - b)[10];
            }"""
        )
    assert taken < 50, f"{taken} ms for another layer"
