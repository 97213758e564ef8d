"""The visual language: whatever stands on a shade or in a colour can be read, on light and dark pages, by all eyes."""

from __future__ import annotations

import itertools
import re

import pytest

from helpers.front_ends import PAGES, Page
from rekindle._src.views import html, style, svg

Colour = tuple[float, float, float]


page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def rgb(colour: str) -> Colour:
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def over(ground: Colour, colour: Colour, opacity: float) -> Colour:
    red, green, blue = (opacity * top + (1 - opacity) * below for top, below in zip(colour, ground, strict=True))
    return red, green, blue


def laid(ground: Colour, shade: str) -> Colour:
    """A ground under a translucent colour of the language."""
    red, green, blue, opacity = map(float, re.findall(r"[\d.]+", shade))
    return over(ground, (red / 255, green / 255, blue / 255), opacity)


def luminance(colour: Colour) -> float:
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    """WCAG's contrast of two colours."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@page
def test_text_is_read_on_every_shade(page: Page) -> None:
    ground, ink = rgb(page.ground), rgb(page.ink)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        for shade in (style.likely(share), style.surprise(share)):
            assert contrast(ink, laid(ground, shade)) >= 4.5, shade
    for wash in (style.WASH, style.PRESS):
        assert contrast(ink, laid(ground, wash)) >= 4.5, wash


@page
def test_quiet_and_coloured_text_is_read_too(page: Page) -> None:
    ground, ink = rgb(page.ground), rgb(page.ink)
    for below in (ground, laid(ground, style.WASH)):
        assert contrast(over(below, ink, style.QUIET), below) >= 4.5
        for words in (style.BLUE_INK, style.ORANGE_INK):
            share, accent = re.findall(r"(\d+)%,(#\w+)", words)[0]
            assert contrast(over(rgb(accent), ink, int(share) / 100), below) >= 4.5, words


@page
def test_marks_are_seen(page: Page) -> None:
    for colour in {*style.SERIES, *style.PHASES.values(), *(set(style.TIERS.values()) - {"transparent"})}:
        assert contrast(rgb(colour), rgb(page.ground)) >= (2.3 if page.ground == "#383838" else 3.0), colour


# Linear RGB as eyes without one kind of cones see it: Viénot, Brettel and Mollon's matrices of 1999.
EYES = {
    "without red": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "without green": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


@pytest.mark.parametrize("matrix", EYES.values(), ids=EYES)
def test_accents_phases_and_tiers_differ_for_colour_blind_eyes(matrix: tuple[Colour, ...]) -> None:
    def seen(colour: str) -> Colour:
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in rgb(colour)]
        red, green, blue = (sum(weight * value for weight, value in zip(row, linear, strict=True)) for row in matrix)
        return red, green, blue

    tiers = [colour for colour in style.TIERS.values() if colour != "transparent"]
    for one, other in [
        *itertools.combinations(tiers, 2),
        *itertools.pairwise(style.SERIES),
        (style.BLUE, style.ORANGE),
    ]:
        distance = sum((left - right) ** 2 for left, right in zip(seen(one), seen(other), strict=True)) ** 0.5
        assert distance > 0.1, (one, other)


def test_the_scale_of_probability_runs_one_way() -> None:
    def opacity(shade: str) -> float:
        return float(shade.rpartition(",")[2].removesuffix(")"))

    steps = [place / 10 for place in range(11)]
    assert [opacity(style.likely(step)) for step in steps] == sorted({opacity(style.likely(step)) for step in steps})
    assert opacity(style.surprise(1.0)) == opacity(style.likely(0.0)) == 0.0
    assert opacity(style.surprise(-1.0)) == opacity(style.likely(2.0)) == style.STRONGEST


def test_pictures_have_names_and_escaped_words() -> None:
    evil = "<script>alert('x')</script>\""
    parts = [
        svg.rect(0, 1.5, 2, 3, style.BLUE, title=evil),
        svg.words(0, 0, evil, title=evil),
        svg.stroke([(0, 1), (2, 3)]),
    ]
    made = svg.picture(100, 20, [svg.group(parts, transform="scale(2)")], label=evil)
    assert "<script" not in made and "alert(" in made
    assert made.startswith('<svg role="img" aria-label="&lt;script&gt;')
    assert 'y="1.5"' in made and 'text-anchor="start"' in made
    alone = svg.document(100, 20, parts, title=evil)
    assert "<script" not in alone and 'xmlns="http://www.w3.org/2000/svg"' in alone


def test_the_sheet_has_every_token() -> None:
    assert style.SHEET.count("--rk-") == len(style.VARIABLES)
    assert "http" not in style.SHEET and "url(" not in style.SHEET
    assert "■" in html.legend({"device": style.BLUE})
