"""Markdown in a chat: what is rendered, and that nothing in a model's answer becomes more than text."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.notebook.bubbles import has_markup, render

ALLOWED = {
    "div": {"style"}, "span": {"style"}, "pre": {"style"}, "code": set(), "b": set(), "i": set(), "br": set(),
    "hr": {"style"}, "a": {"href", "target", "rel", "title"}, "table": {"style"}, "thead": set(), "tbody": set(),
    "tr": set(), "th": {"style"}, "td": {"style"},
}  # fmt: skip


class Safe(HTMLParser):
    """Elements and attributes that are known, in balance, and links to web pages alone."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        assert {name for name, _ in attrs} <= ALLOWED[tag], attrs
        for name, value in attrs:
            if name == "href":
                assert re.fullmatch(r"https?://\S+", value or ""), value
            if name == "style":
                assert "url(" not in (value or ""), value
        if tag not in ("br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# Title", "font-weight:600"),
        ("a **b** c", "a <b>b</b> c"),
        ("a *b* c", "a <i>b</i> c"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("`a < b`", "<code>a &lt; b</code>"),
        ("``a ` b``", "<code>a ` b</code>"),
        ("`**a**`", "<code>**a**</code>"),
        ("```python\nif a < b:\n    **x**\n```\nafter", "if a &lt; b:\n    **x**</code></pre>"),
        ("```\nstill open", "still open</code></pre>"),
        ("- one\n- two", "•</span><div>two"),
        ("1. one\n2. two", "2.</span><div>two"),
        ("- one\n  - inner\n- two", "inner"),
        ("> said", "border-left"),
        ("---", "<hr"),
        ("[here](https://example.org/a?b=1&c=2)", 'href="https://example.org/a?b=1&amp;c=2"'),
        ("| a | b |\n|---|--:|\n| 1 | **2** |", "<b>2</b></td>"),
        ("one\ntwo", "one<br>two"),
        ("my_snake_case and __init__", "my_snake_case and __init__"),
    ],
)
def test_what_is_rendered(text: str, words: str) -> None:
    made = render(text)
    assert words in made
    Safe(made)


@pytest.mark.parametrize("text", ["Hello there.", "One.\n\nTwo.", "2 * 3 = 6", "a_b_c", "x < y", "it's #1"])
def test_plain_text_has_no_markup(text: str) -> None:
    assert not has_markup(text)


ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "**<svg onload=alert(1)>**",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](https://a/\" onmouseover=\"alert(1))",
    "[x](https://a/'onclick='alert(1))",
    '[<img src=x onerror="alert(1)">](https://a)',
    "[a](https://a`b`)",
    "[**a](https://b) c**",
    "**[a](https://x/**b**)",
    "![x](https://tracker.example/pixel.png)",
    "```html\n</code></pre><script>alert(1)</script>\n```",
    "```\"><script>alert(1)</script>\nx\n```",
    "`</code><script>alert(1)</script>`",
    "# <script>alert(1)</script>",
    "- <iframe src=javascript:alert(1)>",
    "> <style>*{display:none}</style>",
    "| <b onclick=alert(1)> | x |\n|---|---|\n| </td><script>alert(1)</script> | y |",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "**a*b**c*",
    "*a **b* c**",
    "<!--", "<![CDATA[", "</div></div>", "<a href=//evil>",
]  # fmt: skip


@pytest.mark.parametrize("text", ATTACKS)
def test_nothing_becomes_more_than_text(text: str) -> None:
    made = render(text)
    Safe(made)
    assert "<script" not in made
    assert "<img" not in made


PIECES = [
    "**",
    "*",
    "`",
    "```",
    "\n",
    " ",
    "- ",
    "1. ",
    "> ",
    "# ",
    "|",
    "|-|-|",
    "[",
    "](",
    "https://a/",
    ")",
    "<b>",
    '"',
    "'",
    "a",
    "b",
    "&",
    "\\",
    "  ",
]


@given(st.lists(st.sampled_from([*PIECES, *ATTACKS]), max_size=25).map("".join))
def test_any_mixture_is_safe(text: str) -> None:
    Safe(render(text))


@pytest.mark.parametrize(
    "text",
    ["*" * 20_000, "`" * 20_000, "[" * 20_000, "> " * 10_000, "- " * 10_000, "**a" * 10_000, "|" * 20_000,
     "#" * 20_000, "[a](https://" * 3000, "\n".join(" " * index + "- x" for index in range(300)), "- - " * 5000],
)  # fmt: skip
def test_long_texts_take_no_time(text: str) -> None:
    began = time.perf_counter()
    Safe(render(text))
    has_markup(text)
    assert time.perf_counter() - began < 5.0
