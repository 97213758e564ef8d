"""Reading of messages: lines with editing, history and pasting by prompt_toolkit at a terminal, else plain ones."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings

from rekindle._src.cli.rows import QUIET
from rekindle._src.core.activity import nothing_drawn
from rekindle_kernels import private_files, system

AGAIN = 3.0  # seconds within which a second Ctrl-C leaves


class Lines(Protocol):
    """A source of messages. Both methods return None at the end of the input, and when the user leaves."""

    hint: str  # shown at the start
    help: tuple[str, ...]

    def read(self, prompt: str, text: str = "") -> str | None:
        """Read a message; `text` stands there to be edited, where lines can be edited."""
        ...

    def ask(self, question: str) -> str | None: ...
    def waiting(self) -> AbstractContextManager[None]:
        """Return a block that reads nothing. Input typed meanwhile is kept for the next message."""
        ...


def lines(cache: Path, commands: Sequence[str]) -> Lines:
    """Return lines with editing at a terminal, else plain ones. Tab completes `commands`."""
    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return EditedLines(cache / "chats", commands)
    return PlainLines()


class PlainLines:
    """Lines without editing: of a pipe, a file or a simple terminal."""

    hint = ""
    help: tuple[str, ...] = ()

    def read(self, prompt: str, text: str = "") -> str | None:
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    ask = read

    def waiting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class EditedLines:
    """Lines with arrows, a lasting history, Ctrl-R, and pasted text in one piece. Ctrl-C twice leaves."""

    hint = " · Alt-Enter makes a new line"
    help: tuple[str, ...] = (
        "Enter sends, Alt-Enter makes a new line; pasted text is one message",
        "Up and Down step through earlier messages, Ctrl-R searches them; Tab completes a command",
        "Ctrl-C stops an answer, or clears the line; twice, or Ctrl-D, leaves",
    )

    def __init__(self, folder: Path, commands: Sequence[str]) -> None:
        keys = KeyBindings()

        typing = has_focus(DEFAULT_BUFFER)  # and not searching

        @keys.add("enter", filter=typing)
        def _(event: Any) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=typing)
        def _(event: Any) -> None:
            event.current_buffer.newline(copy_margin=False)

        self._session: PromptSession[str] = PromptSession(
            history=kept_history(folder),
            key_bindings=keys,
            multiline=True,
            prompt_continuation=lambda width, number, wrapped: "  ",
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            placeholder=FormattedText([(QUIET, "Say something")]),
        )
        self._question: PromptSession[str] = PromptSession()

    def read(self, prompt: str, text: str = "") -> str | None:
        left = -AGAIN
        while True:
            try:
                with nothing_drawn():
                    return self._session.prompt(prompt, default=text)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if time.monotonic() - left < AGAIN and not self._session.default_buffer.text:
                    return None
                left = time.monotonic()
                print("(Ctrl-C again leaves)", file=sys.stderr)

    def ask(self, question: str) -> str | None:
        try:
            with nothing_drawn():
                return self._question.prompt(question)
        except (EOFError, KeyboardInterrupt):
            return None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Keep input typed meanwhile off the screen, where answers and spinners are drawn, and through Ctrl-C.

        The terminal hands it to the next prompt, which shows it.
        """
        with system.echo_off(sys.stdin.fileno()):
            yield


def kept_history(folder: Path) -> History:
    """Return the history: in a file that only this user can read, else in memory."""
    if private_files.distrust_reason(folder) is None:
        with contextlib.suppress(OSError):
            private_files.make_folder(folder)
            file = folder / "terminal-history"
            os.close(system.open_file(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
            return FileHistory(str(file))
    return InMemoryHistory()
