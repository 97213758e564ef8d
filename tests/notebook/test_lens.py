"""The logit lens on paper: a plain SVG with layers, tokens, the answer's path and a legend."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle._src.evaluation.lens import Lens
from rekindle._src.views import style
from rekindle.errors import ConfigError, InvalidRequest

SVG = "{http://www.w3.org/2000/svg}"


def made(layers: int = 3, positions: int = 6) -> Lens:
    tokens = tuple("</svg><b>" if at == 1 else f" t{at}" for at in range(positions))
    ids = np.arange(5, dtype=np.int32)[None, None].repeat(layers, 0).repeat(positions, 1)
    ids[0] = [[1, 0, 2, 3, 4]]  # after the first layer the answer is the second likeliest
    names = (*(f"layer {at}" for at in range(layers - 1)), f"layer {layers - 1}: the answer")
    texts = tuple(tuple(tuple(f" w{token}" for token in row) for row in layer) for layer in ids.tolist())
    shares = np.full((layers, positions, 5), 0.2, np.float32)
    entropies = np.ones((layers, positions), np.float32)
    return Lens(tokens, np.arange(positions, dtype=np.int32), names, texts, ids, shares, entropies)


def test_a_lens_is_saved_as_plain_svg(tmp_path: Path) -> None:
    path = made().save(tmp_path / "lens.svg")
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and {"var(", "rgba(", "<script", "href"}.isdisjoint(text.split())
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words.count("·w0") == 2 * 6 and words.count("·w1") == 6 and "</svg><b>" in words
    assert {"layer 0", "layer 2: the answer", "entropy, bits", "another token"} <= set(words)
    bold = [one.text for one in root.iter(f"{SVG}text") if one.get("font-weight") == "600"]
    assert bold.count("·w0") == 2 * 6, "the answer, where it leads"
    dashed = [one for one in root.iter(f"{SVG}rect") if one.get("stroke-dasharray")]
    assert len(dashed) == 6 + 1, "where the answer is among the likeliest, and a sample"
    width = float(root.get("width") or 0)
    for one in root.iter(f"{SVG}rect"):
        assert float(one.get("x") or 0) + float(one.get("width") or 0) <= width


def test_the_answer_is_blue_from_where_it_leads() -> None:
    lens = made(layers=4)
    assert [lens.leads_from(place) for place in range(6)] == [1] * 6
    shown = lens._repr_html_()
    assert "Half of the answers lead from layer 1 on." in shown
    rows = re.findall(r"(?s)<tr style.*?</tr>", shown)
    blue, grey = style.likely(0.2), style.shade(style.GREY, 0.2)
    assert [(row.count(f"background:{blue}"), row.count(f"background:{grey}")) for row in rows] == [(6, 0)] * 3 + [
        (0, 6)
    ]
    assert all("font-weight:600" in row for row in rows[:3])
    assert "The answer leads from layer 1 on." in made(layers=4, positions=1)._repr_html_()
    assert " on.<" not in made(positions=0)._repr_html_()


def test_what_a_file_shows_is_chosen(tmp_path: Path) -> None:
    lens = made(positions=60)
    few = lens.save(tmp_path / "few.svg", positions=3).read_text()
    assert "·t59" in few and "·t56" not in few and "·t20" in lens.save(tmp_path / "more.svg").read_text()
    wrong: Any
    for wrong in (0, True, "all"):
        with pytest.raises(InvalidRequest, match="is not a number of positions"):
            lens.save(tmp_path / "wrong.svg", positions=wrong)
    with pytest.raises(ConfigError, match="path="):
        lens.save("\0")
