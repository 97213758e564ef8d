"""An answer in a terminal: Markdown in rows, drawn while it grows, and text that can't steer the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.terminals import Screen
from rekindle._src.cli import screen
from rekindle._src.cli.rows import markdown, plain, width_of, wrapped
from rekindle._src.cli.screen import TerminalWriter
from rekindle._src.core import activity

ANSWER = """# A *title*

Some **bold words** and `code`, with a [link](https://example.org/) in a paragraph that wraps.
Its second line.

- one item that is too long for one row
- two
  - nested

| name | meaning |
|---|---|
| prefix cache | pages of what was computed before |
| x | `y` |

```python
def hello():
    return "a string"  # a long comment
```
> A quote

The end: 2 * 3 * 4."""
DRAWN = [
    "A title",
    "",
    "Some bold words and code, with a link",
    "(https://example.org/) in a paragraph",
    "that wraps.",
    "Its second line.",
    "",
    "• one item that is too long for one row",
    "• two",
    "  • nested",
    "",
    "name         │ meaning",
    "─────────────┼────────────────────────",
    "prefix cache │ pages of what was",
    "             │ computed before",
    "x            │ y",
    "",
    "── python ────────────────────────────",
    "def hello():",
    '    return "a string"  # a long comment',
    "───────────────────────────────────────",
    "",
    "│ A quote",
    "",
    "The end: 2 * 3 * 4.",
]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Writes a text in pieces; gives what a terminal of so many columns shows."""
    monkeypatch.setattr(screen, "INTERVAL", 0.0)
    monkeypatch.setattr(screen, "PAUSE", 0.0)

    def draw(text: str, columns: int = 20, *, reasoning: str = "", height: int = 40, pieces: int = 3) -> list[str]:
        monkeypatch.setattr(screen, "terminal_columns", lambda out: columns)
        monkeypatch.setattr(TerminalWriter, "screen_rows", lambda writer: height)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        capsys.readouterr()
        writer = TerminalWriter()
        for piece in re.findall(".{1,5}", reasoning, re.DOTALL):
            writer.reason(piece)
        for piece in re.findall(f".{{1,{pieces}}}", text, re.DOTALL):
            writer.write(piece)
        writer.end()
        lines = Screen(columns).feed(capsys.readouterr().out)
        assert lines.pop() == ""
        return lines

    return draw


def test_markdown_is_drawn_in_rows(shown: Callable[..., list[str]]) -> None:
    assert [line.rstrip("─") for line in shown(ANSWER, 40)] == [line.rstrip("─") for line in DRAWN]


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_it_looks_the_same_however_it_came_and_on_a_low_screen(shown: Callable[..., list[str]], pieces: int) -> None:
    assert shown(ANSWER, 40, pieces=pieces, height=8) == shown(ANSWER, 40)


def test_a_complete_block_is_not_drawn_again(shown: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    read = screen.markdown

    def counted(text: str, columns: int) -> object:
        lengths.append(len(text))
        return read(text, columns)

    monkeypatch.setattr(screen, "markdown", counted)
    shown("A paragraph of some words.\n\n" * 60, 40)
    assert max(lengths) < 70


def test_reasoning_is_folded_once_the_answer_begins(shown: Callable[..., list[str]]) -> None:
    thought = "First I think about it, and then more."
    assert shown("The answer.", reasoning=thought) == ["reasoning, 8 words", "", "The answer."]
    assert shown("", reasoning=thought) == ["First I think about", "it, and then more."], "that is all there is"


def test_folded_reasoning_says_its_seconds_and_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 1_000, 2))
    monkeypatch.setattr(screen.time, "monotonic", lambda: next(now))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(screen, "terminal_columns", lambda out: 60)
    writer = TerminalWriter()
    writer.draws = False  # each look at the clock is one of the reasoning's
    for _ in range(2):  # an answer's figures are its own
        for piece in ("I ", "think", "."):
            writer.reason(piece, 7)
        writer.draws = True
        writer.write("So.")
        writer.end()
        assert "reasoning, 4 s, 21 tokens" in Screen(60).feed(capsys.readouterr().out)
        writer.draws = False


def test_a_wait_that_was_drawn_over_the_text_leaves_it_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The spinner of a compilation stands where the text goes on."""
    monkeypatch.setattr(screen, "INTERVAL", 0.0)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(screen, "terminal_columns", lambda out: 40)
    monkeypatch.setattr(activity, "terminal_columns", lambda out: 40)
    writer, spinner = TerminalWriter(), activity.TerminalScreen(sys.stdout)
    writer.write("one two\nthree ")
    writer.write("and ")
    spinner.show(activity.State("compiling"), 1.0)
    spinner.clear()
    writer.write("four")
    writer.end()
    assert Screen(40).feed(capsys.readouterr().out)[:2] == ["one two", "three and four"]


def test_words_move_to_the_next_line(shown: Callable[..., list[str]]) -> None:
    assert shown("The quick brown fox jumps over it") == ["The quick brown fox", "jumps over it"]
    assert shown("exactly nineteen ch hi\nx") == ["exactly nineteen ch", "hi", "x"]
    assert shown("a" * 30 + " b") == ["a" * 19, "a" * 11 + " b"]


def test_a_text_can_not_steer_the_terminal(shown: Callable[..., list[str]]) -> None:
    assert shown("a\x1b[2Jb\x9bc\x07") == ["a␛[2Jb\N{REPLACEMENT CHARACTER}c␇"]
    assert shown("```\n\x1b[2J\n```")[1] == "␛[2J"
    assert shown("", reasoning="\x1b[2J") == ["␛[2J"]


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    writer = TerminalWriter()
    writer.reason("thinking")
    for piece in ("# Ti", "tle\n", "**b**"):
        writer.write(piece)
    writer.end()
    assert capsys.readouterr().out == "# Title\n**b**\n"


SIGNS = st.text(st.sampled_from("ab 語́*`_#|->1.$\\[]()\n\t\x1b"), max_size=60)


@given(SIGNS, st.integers(1, 30))
@example(" 1語", 1)
def test_no_row_is_wider_than_the_terminal(text: str, columns: int) -> None:
    for row in plain(text, max(2, columns)):
        assert width_of(row) <= max(2, columns)
    for rows, _ in markdown(text, 24 + columns):
        for row in rows:
            assert width_of(row) <= 24 + columns


@given(SIGNS, st.integers(2, 30))
def test_wrapping_loses_spaces_at_most(text: str, columns: int) -> None:
    line = text.replace("\n", " ").replace("\t", " ")
    rows = wrapped([("", line)], columns)
    said = "".join(fragment[1] for row in rows for fragment in row)
    assert said.replace(" ", "") == line.replace(" ", "").replace("\x1b", "␛")


def test_drawing_keeps_up_with_a_long_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is shared by rate, not by tokens."""
    now = [0.0]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    drawn = []
    writer = TerminalWriter()
    monkeypatch.setattr(writer, "draw_blocks", drawn.append)
    for _ in range(1000):
        now[0] += 0.001
        writer.write("word ")
    assert 15 <= len(drawn) <= 21, "twenty a second"


def test_a_note_can_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A template says why it refuses a message, and a checkpoint has the template."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    TerminalWriter().note("the answer failed: \x1b]0;title\x07 \x9b2J")
    written = capsys.readouterr().err
    assert written.startswith("\x1b[2mthe answer failed: \u241b]0;title\u2407 \ufffd2J\x1b[0m")
