"""Rich reprs: escaped, static, and readable numbers."""

from __future__ import annotations

import re

from rekindle._src.views import html


def test_what_comes_from_a_model_is_escaped() -> None:
    evil = "<script>alert('x')</script>"
    for made in (
        html.table([evil], [[evil]]),
        html.pairs({evil: evil}),
        html.text(evil),
        html.tokens([html.Token(evil, -0.1, ((evil, -1.0),)), html.Token(evil)]),
        html.bar({evil: 1.0}),
        html.line(evil),
        html.block(html.text("fine"), title=evil),
    ):
        assert "<script" not in made
        assert evil not in made


def test_a_title_can_not_be_left_with_a_quote() -> None:
    made = html.tokens([html.Token('"', -0.1, (('" onmouseover="x', -1.0),))])
    assert 'onmouseover="x' not in made


def test_tables_align_numbers_and_count_what_they_leave_out() -> None:
    made = html.table(["name", "size"], [[f"row {index}", index] for index in range(60)], limit=50)
    assert made.count("<tr>") == 51
    assert "and 10 more" in made
    assert re.search(r"text-align:right[^>]*>size", made)


def test_markup_is_not_escaped_twice() -> None:
    assert "<b>" in html.pairs({"x": html.Markup("<b>bold</b>")})


def test_numbers() -> None:
    assert [html.number(value) for value in (1234567, 0.12345, 1234.5, True, "x", float("inf"))] == [
        "1,234,567", "0.123", "1,234", True, "x", "inf",
    ]  # fmt: skip


def test_unlikely_tokens_are_shaded_stronger() -> None:
    def opacity(logprob: float) -> float:
        found = re.search(r"rgba\([\d,]+,([\d.]+)\)", html.tokens([html.Token("x", logprob)]))
        assert found
        return float(found[1])

    assert opacity(-5.0) > opacity(-1.0) > opacity(-0.01)


def test_names_tell_what_they_mean_when_they_are_hovered_over() -> None:
    made = html.pairs({"a": 1, "b": 2}, {"a": "the <first>"})
    assert 'title="the &lt;first&gt;">a</td>' in made
    assert made.count("title=") == 1


def test_numbers_are_aligned_where_all_are_numbers() -> None:
    assert "text-align:right" in html.pairs({"a": 1, "b": 20})
    assert "text-align:right" not in html.pairs({"a": 1, "b": "x"})
