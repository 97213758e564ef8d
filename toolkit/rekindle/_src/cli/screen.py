"""Writing at a terminal: an answer's Markdown, drawn while it is made, and quiet lines below it."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, Final

from prompt_toolkit.output import create_output
from prompt_toolkit.renderer import print_formatted_text
from prompt_toolkit.styles import Style

from rekindle._src.cli.controls import for_stream
from rekindle._src.cli.rows import QUIET, Row, markdown, plain
from rekindle._src.core.activity import erased_lines, terminal_columns
from rekindle._src.views.replies import ReasoningFigures, summary

INTERVAL: Final = 0.05  # seconds between two drawings at least
PAUSE: Final = 4.0  # and so many times the last drawing's time: drawing takes a fifth of the time at most
_STYLE = Style([])


class TerminalWriter:
    """Writes an answer piece by piece. In a terminal, words wrap whole, and control characters are visible.

    A block of Markdown is drawn anew while it grows, from its first row that differs; a complete one stays. In a pipe
    the text is written as it is.
    """

    def __init__(self) -> None:
        self.draws = sys.stdout.isatty()
        self._output: Any = create_output(sys.stdout) if self.draws else None
        self._text = ""  # from the block on that is not complete
        self._reasoning, self._figures = "", ReasoningFigures()
        self._began_reasoning = 0.0
        self._rows: list[Row] = []  # of that block, as they are on the screen
        self._began = False
        self._due = 0.0
        self._erased = erased_lines()

    def write(self, text: str) -> None:
        """Write text of the answer."""
        if text and self._reasoning:
            self._fold()
        self._began = self._began or bool(text)
        if not self.draws:
            print(text, end="", flush=True)
            return
        self._text += text
        if text and time.monotonic() >= self._due:
            self._draw()

    def reason(self, text: str, tokens: int = 0) -> None:
        """Write text of the reasoning before the answer, of so many tokens. It is folded once the answer begins."""
        if text:
            now = time.monotonic()
            if not self._reasoning:
                self._began_reasoning, self._figures = now, ReasoningFigures()
            self._figures = ReasoningFigures(self._figures.tokens + tokens, now - self._began_reasoning)
        self._reasoning += text
        self._began = self._began or bool(text)
        if self.draws and text and time.monotonic() >= self._due:
            self._draw()

    def end(self, *, empty: bool = False) -> None:
        """End the text and its line. With `empty`, end no line if no text was written."""
        if self.draws:
            self._draw()
        if self._began or not empty:
            print(flush=True)
        self._text, self._reasoning, self._rows, self._began, self._due = "", "", [], False, 0.0

    def note(self, text: str, *, margin: int = 0) -> None:
        """Write a line that is not part of the text. Its rows after the first begin at a `margin`.

        It may repeat what others wrote, such as a template's reason to refuse a message.
        """
        text = for_stream(text, sys.stderr)
        if sys.stderr.isatty():
            columns = max(20, terminal_columns(sys.stderr) - 1)
            indent = " " * min(margin, columns // 2)
            text = f"\x1b[2m{textwrap.fill(text, columns, subsequent_indent=indent)}\x1b[0m"
        print(text, file=sys.stderr, flush=True)

    def show(self, rows: Sequence[Row]) -> None:
        """Write rows that are not part of the text."""
        if self.draws:
            self._print(rows)
            print(flush=True)
        else:
            for row in rows:
                print("".join(fragment[1] for fragment in row), file=sys.stderr, flush=True)

    @property
    def columns(self) -> int:
        """The columns of a row; the terminal's last one stays free, since some break the line there."""
        return max(8, terminal_columns(sys.stdout) - 1)

    def _fold(self) -> None:
        """Leave one line of the reasoning."""
        line = summary(self._reasoning, self._figures)
        self._reasoning = ""
        if self.draws:
            self._replace([[(QUIET, line)], [], []])
            self._rows = self._rows[-1:]

    def _draw(self) -> None:
        began, columns = time.monotonic(), self.columns
        if self._reasoning:
            self._replace(plain(self._reasoning.strip(), columns, f"italic {QUIET}"))
        else:
            self.draw_blocks(columns)
        now = time.monotonic()
        self._due = now + max(INTERVAL, PAUSE * (now - began))

    def draw_blocks(self, columns: int) -> None:
        lines = self._text.split("\n")
        rows: list[Row] = []
        open_row = open_line = 0  # of the first block that may still change
        for drawn, start in markdown(self._text, columns):
            rows += [[]] if rows else []
            if start < len(lines) - 1:  # the last line is not complete: it may belong to the block before it
                open_row, open_line = len(rows), start
            rows += drawn
        self._replace(rows)
        self._rows, self._text = rows[open_row:], "\n".join(lines[open_line:])

    def _replace(self, rows: list[Row]) -> None:
        """Draw rows in place of those on the screen, from the first that differs. The cursor is at their end."""
        erased = erased_lines()
        if erased != self._erased and self._rows:
            self._rows = [*self._rows[:-1], []]  # a wait was drawn there
        self._erased = erased
        before = self._rows
        same = next((at for at, pair in enumerate(zip(before, rows, strict=False)) if pair[0] != pair[1]), None)
        first = min(len(before), len(rows)) if same is None else same
        if first == len(before) == len(rows):
            return
        self._rows = rows
        if first == len(before):  # more rows
            self._print([[], *rows[first:]] if before else rows)
            return
        if first == len(before) - 1 < len(rows) and (rest := _rest(before[first], rows[first])) is not None:
            self._print([rest, *rows[first + 1 :]])
            return
        first = min(first, max(0, len(rows) - 1))
        first = max(first, len(before) - self.screen_rows())  # lines that have left the screen can't be changed
        self._output.cursor_up(len(before) - 1 - first)
        self._output.write_raw("\r")
        self._output.erase_down()
        self._print(rows[first:])

    def _print(self, rows: Sequence[Row]) -> None:
        fragments = [part for at, row in enumerate(rows) for part in ([("", "\n"), *row] if at else row)]
        print_formatted_text(self._output, fragments, _STYLE)

    def screen_rows(self) -> int:
        """Return how many rows the terminal has."""
        try:
            return max(2, os.get_terminal_size(sys.stdout.fileno()).lines)
        except (OSError, ValueError):
            return 24


def _rest(before: Row, after: Row) -> Row | None:
    """Return the part of a row that extends the one before; None if they begin differently."""
    if not before:
        return after
    place = len(before) - 1
    if len(after) <= place or before[:-1] != after[:place] or before[-1][0] != after[place][0]:
        return None
    text = after[place][1]
    if not text.startswith(before[-1][1]):
        return None
    return [(before[-1][0], text[len(before[-1][1]) :]), *after[place + 1 :]]
