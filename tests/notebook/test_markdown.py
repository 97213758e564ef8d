"""Markdown in a chat: what is rendered, and that nothing in a model's answer becomes more than text."""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._src.notebook.markdown import has_markup, render

ALLOWED = {
    "div": {"style", "class"}, "span": {"style", "data-press", "data-label"},
    "pre": {"style"}, "code": set(), "b": set(), "i": set(), "br": set(),
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
        ("```text\nif a < b:\n    **x**\n```\nafter", "if a &lt; b:\n    **x**</code></pre>"),
        ("```python\nif a < b:\n    x = '<' # **y**\n```\nafter", "if</span> a &lt; b:\n    x = "),
        ("```python\nx = '<' # **y**\n```", ">&#x27;&lt;&#x27;</span>"),
        ("```python\nx = 1 # **y**\n```", "># **y**</span></code></pre>"),
        ("the $a_1*b*c_2$ of it", ">a_1*b*c_2</span> of it"),
        ("\\(x < y\\) holds", ">x &lt; y</span> holds"),
        ("$$\nx^2 *a*\n$$\nafter", ">x^2 *a*</div>"),
        ("`$x^2$`", "<code>$x^2$</code>"),
        ("**a** costs $5 or $6", "costs $5 or $6"),
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


@pytest.mark.parametrize(
    "text", ["Hello there.", "One.\n\nTwo.", "2 * 3 = 6", "a_b_c", "x < y", "it's #1", "$5 and $6, or 7$"]
)
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
    "$</span><script>alert(1)</script>_$",
    "$$\n</div><script>alert(1)</script>\n$$",
    "```python\n'</span><script>alert(1)</script>' # <img src=x>\n```",
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


def test_it_is_the_html_that_patterns_gave() -> None:
    """Many of three pieces in a row, compared with what this module made while regular expressions read the lines."""

    def bare(made: str) -> str:
        """Without looks, and without the box around code."""
        made = re.sub(r' style="[^"]*"', "", made).replace('<div class="rekindle-code"><pre>', "<pre>")
        return made.replace('</pre><span data-press="copy" data-label="Copy"></span></div>', "</pre>")

    state = hashlib.sha256()
    rows = itertools.product([*PIECES, "x **a b** y", "~~~", "|a|b|\n|-|:-:|\n|c"], repeat=3)
    for text in map("".join, itertools.islice(rows, 0, None, 4)):
        state.update(f"{bare(render(text))}{has_markup(text)}".encode())
    assert state.hexdigest() == "9e37ddfb0f8a32a0f450f054d8e1f1fd861361336554c820032e7bc9d58e45f6"


def test_a_ragged_table_is_text() -> None:
    """A row of one cell is filled up to the width of the heads: rows of "|" would make a large page of a short text."""
    assert "<table" in render("|a|b|c|\n|-|-|-|\n|1|\n|1|2|3|")
    ragged = render("|a" * 100 + "\n" + "|-" * 100 + "\n" + "|\n" * 200)
    assert "<table" not in ragged and len(ragged) < 10_000


GROWING: dict[str, Callable[[int], str]] = {
    "asterisks": lambda n: "*" * n,
    "bold": lambda n: "**a" * n,
    "bold with spaces": lambda n: "**a " * n,
    "italic": lambda n: "*a " * n,
    "backticks": lambda n: "a" + "`" * n,
    "code": lambda n: "`a" * n + "``",
    "code of many lengths": lambda n: "".join("`" * (1 + i % 60) + "a" for i in range(n // 20)),
    "links": lambda n: "[a](https://" * n,
    "brackets": lambda n: "[" * n + "](https://" * n,
    "middles": lambda n: "](" * n,
    "heading": lambda n: "# " + " " * n + "#" * n + " " * n + "x",
    "heading of parts": lambda n: "# a" + " #" * n + "x",
    "hashes": lambda n: "#" * n,
    "dashes": lambda n: "a|\n" + "-|" * n + "x",
    "a run of dashes": lambda n: "a|\n|" + "-" * n + " " * n + "x",
    "rule": lambda n: "- " * n + "x",
    "table": lambda n: "|" * n + "\n" + "|-" * n + "|\n" + "|\n" * n,
    "tables": lambda n: "|a|b|\n|-|-|\n- |\n" * (n // 4),
    "wide heads": lambda n: ("|a" * 50 + "\n" + "|-" * 50 + "\n|\n- |\n") * (n // 50),
    "quotes": lambda n: "> a\nb\n" * (n // 4),
    "quotes in quotes": lambda n: "> " * n,
    "items": lambda n: "- x\n" * (n // 4),
    "items in items": lambda n: "\n".join(" " * (i % 50) + "- x" for i in range(n // 8)),
    "fences": lambda n: "```\n" * n,
    "open fences": lambda n: "\n".join("~" * (3 + i % 90) for i in range(n)),
    "digits": lambda n: "1" * n + ". a",
    "dollars": lambda n: "$" * n,
    "dollars and words": lambda n: "$a " * n,
    "formulas": lambda n: "$a_$ " * n,
    "open formulas": lambda n: "\\(a" * n,
    "open displays": lambda n: "\\[" * n + "\\)" * n,
    "displays": lambda n: "$$\n" * n,
    "code of quotes": lambda n: "```python\n" + "\"'" * n,
    "code of open strings": lambda n: "```js\n" + "`\\" * n,
    "code of open comments": lambda n: "```c\n" + "/*" * n,
    "code of words": lambda n: "```python\n" + "if" * n,
    "code of numbers": lambda n: "```sql\n" + "1.1-" * n,
}


@pytest.mark.clock
@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("text", GROWING.values(), ids=GROWING.keys())
def test_four_times_the_text_takes_four_times_as_long(text: Callable[[int], str]) -> None:
    def seconds(length: int) -> float:
        shown, times = text(length), []
        for _ in range(3):
            began = time.process_time()
            made = render(shown)
            has_markup(shown)
            times.append(time.process_time() - began)
        assert len(made) < 500 * len(shown) + 1000
        return min(times)

    # Twice the time for twice the length would be 4, and what grows with the square 16.
    assert seconds(4000) < 9 * max(seconds(1000), 0.0005)


def test_long_texts_are_safe() -> None:
    for text in GROWING.values():
        Safe(render(text(500)))
