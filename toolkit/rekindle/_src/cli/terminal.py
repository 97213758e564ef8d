"""A terminal: lines with editing, history and pasting by prompt_toolkit, and text wrapped between words."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rekindle._src.core.progress import terminal_columns
from rekindle_kernels import private_files

AGAIN = 3.0  # seconds within which a second Ctrl-C leaves


class Lines(Protocol):
    """A source of messages. Both methods return None at the end of the input, and when the user leaves."""

    hint: str  # shown at the start
    help: tuple[str, ...]

    def read(self, prompt: str) -> str | None: ...
    def ask(self, question: str) -> str | None: ...


def lines(cache: Path, commands: Sequence[str]) -> Lines:
    """Return lines with editing at a terminal, else plain ones. Tab completes `commands`."""
    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return EditedLines(cache / "chats", commands)
    return PlainLines()


class PlainLines:
    """Lines without editing: of a pipe, a file or a simple terminal."""

    hint = ""
    help: tuple[str, ...] = ()

    def read(self, prompt: str) -> str | None:
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    ask = read


class EditedLines:
    """Lines with arrows, a lasting history, Ctrl-R, and pasted text in one piece. Ctrl-C twice leaves."""

    hint = " · Alt-Enter makes a new line"
    help: tuple[str, ...] = (
        "Enter sends, Alt-Enter makes a new line; pasted text is one message",
        "Up and Down step through earlier messages, Ctrl-R searches them; Tab completes a command",
        "Ctrl-C stops an answer, or clears the line; twice, or Ctrl-D, leaves",
    )

    def __init__(self, folder: Path, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.enums import DEFAULT_BUFFER
        from prompt_toolkit.filters import has_focus
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        typing = has_focus(DEFAULT_BUFFER)  # and not searching

        @keys.add("enter", filter=typing)
        def _(event: Any) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=typing)
        def _(event: Any) -> None:
            event.current_buffer.newline(copy_margin=False)

        self._session: PromptSession[str] = PromptSession(
            history=_history(folder),
            key_bindings=keys,
            multiline=True,
            prompt_continuation=lambda width, number, wrapped: "  ",
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
        )
        self._question: PromptSession[str] = PromptSession()

    def read(self, prompt: str) -> str | None:
        left = -AGAIN
        while True:
            try:
                return self._session.prompt(prompt)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if time.monotonic() - left < AGAIN and not self._session.default_buffer.text:
                    return None
                left = time.monotonic()
                print("(Ctrl-C again leaves)", file=sys.stderr)

    def ask(self, question: str) -> str | None:
        try:
            return self._question.prompt(question)
        except (EOFError, KeyboardInterrupt):
            return None


def _history(folder: Path) -> Any:
    """Return the history: in a file that only this user can read, else in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if private_files.distrust_reason(folder) is None:
        with contextlib.suppress(OSError):
            private_files.make_folder(folder)
            file = folder / "terminal-history"
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600))
            return FileHistory(str(file))
    return InMemoryHistory()


class Writer:
    """Writes text piece by piece. In a terminal, words wrap whole, and control characters are visible."""

    def __init__(self) -> None:
        self._wraps = sys.stdout.isatty()
        self._column = 0
        self._word = ""  # text on the line since the last space
        self._began = False

    def write(self, text: str) -> None:
        self._began = self._began or bool(text)
        print("".join(map(self._placed, text)) if self._wraps else text, end="", flush=True)

    def end(self, *, empty: bool = False) -> None:
        """End the text and its line. With `empty`, end no line if no text was written."""
        if self._began or not empty:
            print(flush=True)
        self._column, self._word, self._began = 0, "", False

    def note(self, text: str) -> None:
        """Write a line that is not part of the text."""
        if sys.stderr.isatty():
            columns = max(20, terminal_columns(sys.stderr) - 1)
            margin = "    " if text.startswith(" ") else ""
            text = f"\x1b[2m{textwrap.fill(text, columns, subsequent_indent=margin)}\x1b[0m"
        print(text, file=sys.stderr, flush=True)

    def _placed(self, character: str) -> str:
        """Return a character, after the codes that move its word to the next line if it does not fit on this one."""
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        if character == "\t":
            return "".join(map(self._placed, " " * (8 - self._column % 8)))
        character = _visible(character)
        width, limit = _width(character), terminal_columns(sys.stdout) - 1
        prefix = ""
        if self._column + width > limit:
            if character == " ":
                self._column, self._word = 0, ""
                return "\n"
            word_width = sum(map(_width, self._word))
            if 0 < word_width < self._column and word_width + width <= limit:
                prefix = f"\x1b[{word_width}D\x1b[K\n{self._word}"
                self._column = word_width
            else:
                prefix, self._column, self._word = "\n", 0, ""
        self._column += width
        self._word = "" if character == " " or width == 2 else self._word + character
        return prefix + character


def _visible(character: str) -> str:
    """Return a character that can't steer the terminal: a picture in place of a control character."""
    code = ord(character)
    if code < 32:
        return chr(0x2400 + code)
    return "\N{REPLACEMENT CHARACTER}" if 127 <= code < 160 else character


def _width(character: str) -> int:
    """Return the number of columns of a character."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
