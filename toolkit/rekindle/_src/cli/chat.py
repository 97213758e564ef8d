"""`rekindle chat`: an interactive conversation. Its prefix stays cached from turn to turn.

Its terminal has lines with editing, history and pasting by prompt_toolkit, and text wrapped between words.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
import re
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rekindle._src.calls.conversation import Conversation, Turn
from rekindle._src.cli.usage import engine_options, sampling_options
from rekindle._src.core import html
from rekindle._src.core.activity import nothing_drawn, terminal_columns
from rekindle._src.core.config import cache_folder
from rekindle._src.core.records import Completion, FinishReason
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session
from rekindle.errors import InvalidRequest, PromptTooLong, RequestFailed
from rekindle_kernels import private_files, system

COMMAND = re.compile(r"/([a-z]+|\?)(?:\s++(.*))?", re.DOTALL | re.IGNORECASE)  # a path such as /etc/hosts is no command

DRAW = "Start with --temperature 0.8: greedy answers of small models do that"
PENALISE = "Start with --repetition-penalty 1.1 if that happens often; /undo takes the turn back"
AGAIN = 3.0  # seconds within which a second Ctrl-C leaves


def run(arguments: argparse.Namespace) -> int:
    options = sampling_options(arguments)
    names = [f"/{name}" for name in COMMANDS]
    reader = lines(cache_folder(arguments.cache_dir), names)
    with contextlib.ExitStack() as stack:
        with reader.waiting():
            session = stack.enter_context(open_sync(arguments.model, **engine_options(arguments)))
            session.render("Hello")  # refuses a model that can't chat before a word is typed
        Chat(session, reader, TerminalWriter(), arguments.system, options).run()
    return 0


class Chat:
    """A conversation at a terminal, or with the lines of a pipe."""

    def __init__(
        self, session: Session, reader: Lines, writer: TerminalWriter, system: str | None, options: dict[str, Any]
    ) -> None:
        self.session, self.reader, self.writer = session, reader, writer
        self._system, self._options = system, options
        self.conversation: Conversation = self._new()
        self.last: Completion | None = None  # the last answer that was not cancelled and did not fail

    def _new(self) -> Conversation:
        return self.session.conversation(system=self._system, **self._options)

    def run(self) -> None:
        """Read and answer until the user leaves."""
        config = self.session.config
        self.note(f"{self.session.model} · {short(self.session.weights)} · {config.max_model_len:,} tokens of context")
        self.note("/help lists commands · Ctrl-D leaves" + self.reader.hint)
        for text in self._messages():
            command = COMMAND.fullmatch(text)
            if command is None:
                self.answer(functools.partial(self.conversation.stream, text))
            elif (name := command[1].lower()) in ("quit", "exit"):
                return
            elif name in COMMANDS:
                COMMANDS[name].run(self, (command[2] or "").strip())
            else:
                matches = difflib.get_close_matches(name, COMMANDS, n=1)
                advice = f"Did you mean /{matches[0]}?" if matches else "/help lists those that there are"
                self.note(f"there is no command /{name}. {advice}")

    def _messages(self) -> Iterator[str]:
        while (line := self.reader.read("> ")) is not None:
            if text := line.strip():
                yield text

    def note(self, text: str) -> None:
        self.writer.note(text)

    def answer(self, turn_of: Callable[[], Turn]) -> None:
        """Stream one answer; Ctrl-C ends it and keeps the text so far."""
        while True:
            turn = turn_of()
            try:
                with self.reader.waiting():
                    for delta in turn.stream_sync():
                        self.writer.write(delta.text)
            except KeyboardInterrupt:
                turn.cancel()
                self.writer.end()
                compiling = self.session.compiling  # which can't be stopped
                self.note("stopped; /continue goes on" + (f" (still {compiling})" if compiling else ""))
                return
            except PromptTooLong as error:
                self.writer.end(empty=True)
                if not self._make_room(f"the conversation with this message {error.problem}"):
                    return
                continue
            except InvalidRequest as error:  # such as no answer to continue
                self.note(f"the conversation {error.problem}. {error.fix}")
                return
            except RequestFailed as error:  # the conversation is as it was before
                self.writer.end(empty=True)
                self.note(f"the answer failed: {error}")
                return
            self.writer.end()
            self.last = completion = turn.result_sync()
            if completion.finish_reason is FinishReason.LENGTH:
                self.note(f"cut at {completion.usage.completion_tokens:,} tokens; /continue goes on")
            elif completion.finish_reason is FinishReason.CONTEXT:
                self._make_room("the context is full, so the answer ends here")
            if (found := completion.repetition) is not None:
                self.note(f"the answer {found}. {DRAW if completion.sampling.greedy else PENALISE}")
            return

    def _make_room(self, problem: str) -> bool:
        """Report that the conversation is too long, and offer to drop its oldest turn. True if it was dropped."""
        turns = self.turns
        self.note(problem)
        if not turns:
            self.note("there is no older turn to drop: say it in fewer words, or use --max-model-len")
            return False
        answer = self.reader.ask(f"Drop the oldest of {turns} turns? [Y/n] ")
        if answer is None or answer.strip().lower() not in ("", "y", "yes"):
            self.note("nothing was dropped; /undo takes the last turn back, /reset starts over")
            return False
        self.conversation.forget()
        return True

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.conversation.messages)

    # Commands.

    def help(self, argument: str) -> None:
        for name, command in COMMANDS.items():
            self.note(f"  {f'/{name} {command.argument}':15}{command.meaning}")
        for line in self.reader.help:
            self.note(f"  {line}")

    def go_on(self, argument: str) -> None:
        self.answer(self.conversation.continue_answer)

    def undo(self, argument: str) -> None:
        if not self.turns:
            self.note("there is no turn to take back")
            return
        message = next(m["content"] for m in reversed(self.conversation.messages) if m["role"] == "user")
        self.conversation.undo()
        self.note(f"took back {message if len(message) <= 60 else message[:59] + '…'!r}; {self.turns} turns are left")

    def reset(self, argument: str) -> None:
        self.conversation, self.last = self._new(), None
        self.note("a new conversation")

    def save(self, argument: str) -> None:
        if not argument:
            self.note("Name a file: /save chat.json")
            return
        try:
            self.conversation.save(argument)
        except OSError as error:
            self.note(f"{argument} can't be written: {error.strerror}")
        else:
            self.note(f"saved; session.conversation(restore={argument!r}) takes it up in Python")

    def stats(self, argument: str) -> None:
        if argument == "all":
            for line in str(self.session.stats()).splitlines():
                self.note(f"  {line}")
            return
        for name, text in self._figures():
            self.note(f"  {name:14}{text}")
        self.note("  (/stats all shows every figure)")

    def _figures(self) -> Iterator[tuple[str, str]]:
        figures = self.session.stats().as_dict()
        yield "model", f"{self.session.model}, {short(self.session.weights)}"
        limit = self.session.config.max_model_len
        if self.last is None:
            yield "conversation", f"{html.count(self.turns, 'turn')}, room for {limit:,} tokens"
        else:
            used, times = self.last.usage, self.last.timings
            context, generated = used.prompt_tokens + used.completion_tokens, used.completion_tokens
            speed = f"first after {times.first_token * 1e3:,.0f} ms, then {times.decode_rate(generated):,.0f} tokens/s"
            yield "conversation", f"{html.count(self.turns, 'turn')}, {context:,} of {limit:,} tokens of context"
            prompt = f"{used.prompt_tokens:,} before it, {used.cached_tokens:,} of them cached"
            yield "last answer", f"{html.count(generated, 'token')}, {prompt}; {speed}"
        prompt_tokens, cached_tokens = figures.get("prompt_tokens", 0), figures.get("cached_tokens", 0)
        share = f" ({cached_tokens / prompt_tokens:.0%})" if prompt_tokens else ""
        generated, finished = figures.get("generated_tokens", 0), figures.get("finished", 0)
        yield "all answers", f"{html.count(generated, 'token')} in {html.count(finished, 'answer')}"
        yield "prefix cache", f"{cached_tokens:,} of {prompt_tokens:,} prompt tokens were not computed again{share}"
        pages = [f"{figures.get(f'pages_{name}', 0):,} {name}" for name in ("held", "cached", "free")]
        yield "pages", f"{', '.join(pages)}, of {figures.get('pages_total', 0):,}"


class Command(NamedTuple):
    """A /command: its meaning, its function, and its argument's name."""

    meaning: str
    run: Callable[[Chat, str], None]
    argument: str = ""


COMMANDS = {
    "help": Command("shows this list", Chat.help),
    "continue": Command("goes on with an answer that was cut or stopped", Chat.go_on),
    "undo": Command("takes the last turn back", Chat.undo),
    "reset": Command("starts a new conversation", Chat.reset),
    "save": Command("writes the conversation to a file", Chat.save, "FILE"),
    "stats": Command("shows tokens, speed and cache", Chat.stats),
    "quit": Command("leaves, as Ctrl-D does", lambda chat, argument: None),
}


class Lines(Protocol):
    """A source of messages. Both methods return None at the end of the input, and when the user leaves."""

    hint: str  # shown at the start
    help: tuple[str, ...]

    def read(self, prompt: str) -> str | None: ...
    def ask(self, question: str) -> str | None: ...
    def waiting(self) -> AbstractContextManager[None]:
        """Return a block in which nothing is read. What is typed meanwhile is kept for the next message."""
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

    def read(self, prompt: str) -> str | None:
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
                with nothing_drawn():
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
            with nothing_drawn():
                return self._question.prompt(question)
        except (EOFError, KeyboardInterrupt):
            return None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Keep what is typed meanwhile off the screen, where answers and spinners are drawn, and through Ctrl-C.

        The terminal hands it to the next prompt, which shows it.
        """
        with system.echo_off(sys.stdin.fileno()):
            yield


def _history(folder: Path) -> Any:
    """Return the history: in a file that only this user can read, else in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if private_files.distrust_reason(folder) is None:
        with contextlib.suppress(OSError):
            private_files.make_folder(folder)
            file = folder / "terminal-history"
            os.close(system.open_file(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
            return FileHistory(str(file))
    return InMemoryHistory()


class TerminalWriter:
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


def short(weights: str) -> str:
    """Return the formats of weights without the reasons for them."""
    return weights.partition(" (")[0]


def _visible(character: str) -> str:
    """Return a character that can't steer the terminal: a picture in place of a control character."""
    code = ord(character)
    if code < 32:
        return chr(0x2400 + code)
    return "\N{REPLACEMENT CHARACTER}" if 127 <= code < 160 else character


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
