"""`rekindle chat`: an interactive conversation. Its prefix stays cached from turn to turn.

The commands, and the facts below an answer, are the same as in the chat view of a notebook.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from prompt_toolkit.utils import get_cwidth

from rekindle._src.calls.conversation import Conversation, Message, Turn
from rekindle._src.cli.lines import Lines, lines
from rekindle._src.cli.rows import QUIET, Row, plain, wrapped
from rekindle._src.cli.screen import TerminalWriter
from rekindle._src.cli.usage import engine_options, sampling_options
from rekindle._src.core import words
from rekindle._src.core.config import cache_folder
from rekindle._src.core.names import nearest
from rekindle._src.core.records import Completion, FinishReason
from rekindle._src.core.repetition import repetition
from rekindle._src.core.sampling import ANSWER_TOKENS, Sampling
from rekindle._src.session.opening import open_sync
from rekindle._src.session.session import Session
from rekindle._src.views import style
from rekindle._src.views.answers import (
    AS_OPENED,
    AS_OPENED_MEANING,
    CHOICES,
    PRESETS,
    RANGES,
    SUGGESTIONS,
    facts_of,
)
from rekindle._src.views.branches import Branch, Branches
from rekindle._src.views.labels import visible
from rekindle._src.views.replies import calls_of, summary
from rekindle.errors import InvalidRequest, MissingExtra, PromptTooLong, RekindleError, RequestFailed, StoreError

COMMAND = re.compile(r"/([a-z]+|\?)(?:\s++(.*))?", re.DOTALL | re.IGNORECASE)  # a path such as /etc/hosts is no command
SHOWN_TOKENS = 400  # of an answer, for /fork
_SHOWN = 160  # characters of a call or its result


def run(arguments: argparse.Namespace) -> int:
    options = sampling_options(arguments)
    reader = lines(cache_folder(arguments.cache_dir), completions())
    with contextlib.ExitStack() as stack:
        with reader.waiting():
            session = stack.enter_context(open_sync(arguments.model, **engine_options(arguments)))
            session.render("Hello")  # refuses a model that can't chat before a word is typed
        Chat(session, reader, TerminalWriter(), arguments.system, options, arguments.overflow).run()
    return 0


class Chat:
    """A conversation at a terminal, or with the lines of a pipe."""

    def __init__(
        self, session: Session, reader: Lines, writer: TerminalWriter, system: str | None, options: dict[str, Any],
        overflow: str = "drop",
    ) -> None:  # fmt: skip
        self.session, self.reader, self.writer = session, reader, writer
        self._system, self._options, self._overflow = system, options, overflow
        self._changes: dict[str, Any] = {}  # settings that differ from the chat's first ones
        self._typed = ""  # text of the next message, to be edited
        self._new()

    def _new(self, restored: Conversation | None = None) -> None:
        if restored is None:
            restored = self.session.conversation(system=self._system, overflow=self._overflow, **self._options)
        self.conversation: Conversation = restored
        self.branches: Branches[Conversation] = Branches()
        self.last: Completion | None = None  # the last answer that was not cancelled and did not fail
        self._facts: dict[str, tuple[str, ...]] = {}  # the quiet lines of answers, by their texts
        self._reasoning = ""  # of the last answer

    def run(self) -> None:
        """Read and answer until the user leaves."""
        config = self.session.config
        self.note(f"{self.session.model} · {short(self.session.weights)} · {config.max_model_len:,} tokens of context")
        self.note("/help lists commands · Ctrl-D leaves" + self.reader.hint)
        for text in self._messages():
            command = COMMAND.fullmatch(text)
            if command is None:
                self.answer(functools.partial(self.conversation.stream, text, **self._changes))
            elif (name := command[1].lower()) in ("quit", "exit"):
                return
            elif name in COMMANDS:
                COMMANDS[name].run(self, (command[2] or "").strip())
            else:
                close = nearest(name, COMMANDS)
                advice = f"Did you mean /{close}?" if close else "/help lists all commands"
                self.note(f"there is no command /{name}. {advice}")

    def _messages(self) -> Iterator[str]:
        while True:
            typed, self._typed = self._typed, ""
            line = self.reader.read("> ", typed)
            if line is None:
                return
            if text := line.strip():
                yield text

    def note(self, text: str) -> None:
        self.writer.note(text)

    def _list(self, entries: Iterable[tuple[str, str]], width: int) -> None:
        """Write names with their meanings, which begin at one column."""
        for name, meaning in entries:
            self.writer.note(f"  {name:{width}}{meaning}", margin=2 + width)

    def answer(self, turn_of: Callable[[], Turn]) -> bool:
        """Stream one answer; Ctrl-C ends it and keeps the text so far. True if something of it was kept."""
        self._reasoning = ""
        while True:
            turn = turn_of()
            try:
                with self.reader.waiting():
                    for delta in turn.stream_sync():
                        self._reasoning += delta.reasoning
                        self.writer.reason(delta.reasoning, len(delta.token_ids))
                        self.writer.write(delta.content)
            except KeyboardInterrupt:
                turn.cancel()
                self.writer.end()
                compiling = self.session.compiling  # which can't be stopped
                self.note("stopped; /continue goes on" + (f" (still {compiling})" if compiling else ""))
                return True
            except PromptTooLong as error:
                self.writer.end(empty=True)
                if self._make_room(f"the conversation with this message {error.problem}"):
                    continue
                return False
            except InvalidRequest as error:  # such as no answer to continue
                self.note(f"the conversation {error.problem}. {error.fix}")
                return False
            except RequestFailed as error:  # the conversation is as it was before
                self.writer.end(empty=True)
                self.note(f"the answer failed: {error}")
                return False
            self.writer.end()
            self.last = completion = turn.result_sync()
            self._say_end(completion)
            if completion.finish_reason is FinishReason.CONTEXT:
                if self._overflow == "refuse":
                    self._make_room("the context is full, so the answer ends here")
                elif self.turns > 1:
                    self.note("the context is full; /continue goes on without the oldest turns")
            return True

    def _say_end(self, completion: Completion) -> None:
        """Write the quiet line of the last answer: its version, the model, its speed, its end."""
        reason, ids = completion.finish_reason, self.conversation.answer_ids or completion.token_ids
        limit, repeats = self.session.config.max_model_len, repetition(ids)
        *facts, end = facts_of(self.session.model, completion, reason, len(ids), limit)
        advice = "/settings lively draws another" if completion.sampling.greedy else "/undo takes the turn back"
        facts += [
            f"{end}; /continue goes on" if reason is FinishReason.LENGTH else end,
            "" if repeats is None else f"{repeats}; {advice}",
        ]
        messages = self.conversation.messages
        self._facts[str(messages[-1].get("content"))] = tuple(filter(None, facts))
        self._say_facts(len(messages) - 1)

    def _say_facts(self, at: int) -> None:
        messages = self.conversation.messages
        place = self.branches.place(messages[:at], messages[at])
        versions = f"‹ {place} ›  " if place.total > 1 else ""
        facts = " · ".join(self._facts.get(str(messages[at].get("content")), ()))  # of an answer that was loaded, none
        if versions or facts:
            self.note(versions + facts)

    def _make_room(self, problem: str) -> bool:
        """Report that the conversation is too long, and offer to drop its oldest turn. True if it was dropped."""
        turns = self.turns if self._overflow == "refuse" else 0
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

    def _last_message(self, purpose: str) -> tuple[int, str] | None:
        """Return the place and the text of the user's last message. Without one, say that there is none to use so."""
        messages = self.conversation.messages
        place = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
        if place is None:
            self.note(f"there is no message to {purpose}")
            return None
        text = messages[place]["content"]
        if not isinstance(text, str):  # of a conversation that was loaded
            self.note(f"the last message has pictures, which a terminal can't {purpose}: load it in Python")
            return None
        return place, text

    def _keep(self, at: int) -> None:
        """Keep the conversation from a place on as a version."""
        messages = self.conversation.messages
        self.branches.keep(messages[:at], Branch(tuple(messages[at:]), self.conversation.fork()))

    # Commands.

    def help(self, argument: str) -> None:
        self._list(((f"/{name} {one.argument}", one.meaning) for name, one in COMMANDS.items()), 26)
        for line in self.reader.help:
            self.writer.note(f"  {line}", margin=4)

    def go_on(self, argument: str) -> None:
        self.answer(lambda: self.conversation.continue_answer(**self._changes))

    def again(self, argument: str) -> None:
        message = self._last_message("answer again")
        if message is None:
            return
        place, text = message
        self._keep(place + 1)
        before, kept = self.conversation.messages, self.conversation.fork()
        self.conversation.undo()
        if not self.answer(lambda: self.conversation.stream(text, **{"seed": None, **self._changes})):
            self.conversation = kept
        elif self.conversation.messages == before:
            self.note("the same answer once more: /settings lively, or a temperature above 0, draws others")

    def edit(self, argument: str) -> None:
        message = self._last_message("write anew")
        if message is None:
            return
        place, text = message
        self._keep(place)
        self.conversation.undo()
        if argument:
            self.answer(lambda: self.conversation.stream(argument, **self._changes))
        else:
            self._typed = text
            self.note("Write the message anew; /earlier shows this version again")

    def fork(self, argument: str) -> None:
        number, _, text = argument.partition(" ")
        ids = self.conversation.answer_ids
        if not ids:
            self.note("no answer can be forked: there is none yet, or it was loaded without its tokens")
        elif not number:
            self.writer.show(self._numbered(ids))
            self.note("/fork 12 goes on from token 12, with what you write there or with another draw")
        elif not number.isdecimal() or int(number) >= len(ids):
            self.note(
                f"{number!r} is not the number of a token in the answer. Use 0 to {len(ids) - 1}, as /fork lists them"
            )
        else:
            self._fork(int(number), text)

    def _fork(self, at: int, text: str) -> None:
        whole = self.conversation.fork()
        if not text:
            for row in self._likely(at):
                self.writer.show([row])
            written = self.reader.ask("instead of it (empty for another draw): ")
            if written is None:
                return
            text = written
        place = len(self.conversation.messages) - 1
        self._keep(place)
        before = self._decode(self.conversation.answer_ids[:at])
        spaced = f" {text}" if text and text[0].isalnum() and before[-1:].strip() and self._spaced(at) else text
        try:
            self.conversation.edit_answer(at, spaced)
        except InvalidRequest as error:
            self.note(str(error))
            return
        self.writer.write(self.conversation.messages[-1]["content"])
        options = {"max_tokens": max(1, self._most() - at), **self._changes}
        if not self.answer(lambda: self.conversation.continue_answer(**options)):
            self.conversation = whole

    def _most(self) -> int:
        return int(self._options.get("max_tokens") or ANSWER_TOKENS)

    def _spaced(self, at: int) -> bool:
        """True if the token at a place begins a word with a space, so that a replacement needs one, too."""
        return self._decode(self.conversation.answer_ids[at : at + 1])[:1] == " "

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self.session.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _numbered(self, ids: tuple[int, ...]) -> list[Row]:
        """Return the tokens of an answer with their numbers."""
        row: Row = []
        for at, token in enumerate(ids[:SHOWN_TOKENS]):
            row += [(QUIET, f"{at}\u00a0"), ("", f"{visible(self._decode((token,)))} ")]
        more = plain(f"… and {len(ids) - SHOWN_TOKENS:,} more", self.writer.columns, QUIET)
        return wrapped(row, self.writer.columns) + (more if len(ids) > SHOWN_TOKENS else [])

    def _likely(self, at: int) -> Iterator[Row]:
        """Yield a bar for each token that could stand at a place of the answer."""
        chosen = self.conversation.answer_ids[at]
        peek = self.conversation.fork()
        try:
            peek.edit_answer(at)
            done = peek.continue_answer(max_tokens=1, logprobs=CHOICES, ignore_eos=True).result_sync()
        except RekindleError:  # no place, or a model that can't: the token can be replaced all the same
            return
        for found in (done.logprobs or ())[:1]:
            for token, logprob in zip(found.top_ids, found.top_logprobs, strict=False):
                name, share = visible(self._decode((token,))), math.exp(logprob)
                pad, bar = " " * max(0, 14 - get_cwidth(name)), "█" * max(1, round(24 * share))
                look = f"bold fg:{style.BLUE}" if token == chosen else QUIET
                yield [
                    ("bold" if token == chosen else "", name),
                    ("", pad),
                    (look, bar),
                    (QUIET, f" {words.share(share)}"),
                ]

    def earlier(self, argument: str) -> None:
        self._switch(-1, "earlier")

    def later(self, argument: str) -> None:
        self._switch(1, "later")

    def _switch(self, by: int, name: str) -> None:
        """Show another version of the latest message or answer with one in that direction."""
        messages = self.conversation.messages
        for at in range(len(messages), -1, -1):
            branch = self.branches.turned(messages[:at], messages[at] if at < len(messages) else None, by)
            if branch is not None and branch.answer is not None:
                self._keep(at)
                self.conversation = branch.answer.fork()
                self._typed = ""
                self._show_from(at)
                return
        self.note(f"there is no {name} version; /again, /edit and /fork make others")

    def _show_from(self, at: int) -> None:
        """Write the conversation from a place on."""
        for place, message in enumerate(self.conversation.messages[at:], at):
            if message["role"] == "user":
                versions = self.branches.place(self.conversation.messages[:place], message)
                self.note(f"> {_words(message)}" + (f"  ‹ {versions} ›" if versions.total > 1 else ""))
            elif message["role"] == "tool":
                self.note(f"  result: {words.shorten(_words(message), _SHOWN)}")
            else:
                if reasoning := message.get("reasoning_content"):
                    self.note(summary(str(reasoning)))
                self.writer.write(_words(message))
                self.writer.end(empty=True)
                for call in calls_of(message):
                    self.note(words.shorten(f"calls {call}", _SHOWN))
                self._say_facts(place)

    def settings(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        value = value.strip()
        if argument in PRESETS or argument == AS_OPENED:
            own = {} if argument == AS_OPENED else PRESETS[argument].settings
            kept = {key: number for key, number in self._changes.items() if key == "max_tokens"}
            self._changes = {**kept, **own}
        elif name == "system":
            self.conversation.system = self._system = value
        elif name in RANGES:
            if not self._change(name, value):
                return
        elif argument:
            known = [*PRESETS, AS_OPENED, *RANGES, "system"]
            close = nearest(name, known)
            self.note(f"there is no setting {name!r}. " + (f"Did you mean {close}?" if close else "/settings lists"))
            return
        self._show_settings()

    def _change(self, name: str, value: str) -> bool:
        """Take a setting's value. False if it is invalid."""
        try:
            number = int(value) if name == "max_tokens" else float(value)
            Sampling.of(None, {name: number})
        except ValueError:
            self.note(f"{value!r} is no number. Write /settings {name} {RANGES[name].least:g}")
        except InvalidRequest as error:
            self.note(str(error))
        else:
            self._changes[name] = number
            return True
        return False

    def _show_settings(self) -> None:
        own = Sampling.of(self.session.chat_sampling, self._options)
        opened = {name: getattr(own, name) for name in RANGES} | {"max_tokens": self._most()}
        now = {**opened, **self._changes}
        self._list(((f"{name:14}{now[name]:<6g}", one.meaning) for name, one in RANGES.items()), 22)
        self._list([("system", self._system or "none")], 14)
        own_preset = {name: opened[name] for name in next(iter(PRESETS.values())).settings}
        presets = {AS_OPENED: (own_preset, AS_OPENED_MEANING), **PRESETS}
        on = {name: all(now[key] == number for key, number in one.items()) for name, (one, _) in presets.items()}
        self._list(((f"{'●' if on[name] else '○'} {name}", meaning) for name, (_, meaning) in presets.items()), 14)

    def reasoning(self, argument: str) -> None:
        if self._reasoning:
            self.writer.show(plain(self._reasoning.strip(), self.writer.columns, f"italic {QUIET}"))
        else:
            self.note("the last answer has no reasoning")

    def undo(self, argument: str) -> None:
        if not self.turns:
            self.note("there is no turn to take back")
            return
        message = _words(next(m for m in reversed(self.conversation.messages) if m["role"] == "user"))
        self.conversation.undo()
        said = message if len(message) <= 60 else message[:59] + "…"
        self.note(f"took back {said!r}; {words.count(self.turns, 'turn')} left")

    def reset(self, argument: str) -> None:
        self._new()
        self.note("a new conversation")

    def save(self, argument: str) -> None:
        if not argument:
            self.note("Name a file: /save chat.json")
            return
        try:
            self.conversation.save(argument)
        except StoreError as error:
            self.note(str(error))
        else:
            self.note(f"saved; /load {argument} takes it up here, session.conversation(restore={argument!r}) in Python")

    def load(self, argument: str) -> None:
        if not argument:
            self.note("Name a file: /load chat.json")
            return
        try:
            restored = self.session.conversation(restore=argument, overflow=self._overflow, **self._options)
        except InvalidRequest as error:
            self.note(f"{argument} {error.problem}. {error.fix}")
            return
        except MissingExtra as error:  # of pictures
            self.note(str(error))
            return
        self._new(restored)
        self._system = restored.system or None
        self.note(f"goes on after {words.count(self.turns, 'turn')}" + (". The last one:" if self.turns else ""))
        users = [place for place, message in enumerate(restored.messages) if message["role"] == "user"]
        self._show_from(users[-1] if users else len(restored.messages))

    def stats(self, argument: str) -> None:
        if argument == "all":
            for line in str(self.session.stats()).splitlines():
                self.note(f"  {line}")
            return
        self._list(self._figures(), 14)
        self.note("  (/stats all shows every figure)")

    def _figures(self) -> Iterator[tuple[str, str]]:
        figures = self.session.stats().as_dict()
        yield "model", f"{self.session.model}, {short(self.session.weights)}"
        limit = self.session.config.max_model_len
        if self.last is None:
            yield "conversation", f"{words.count(self.turns, 'turn')}, room for {limit:,} tokens"
        else:
            used, times = self.last.usage, self.last.timings
            context, generated = used.prompt_tokens + used.completion_tokens, used.completion_tokens
            speed = f"first after {times.first_token * 1e3:,.0f} ms, then {times.decode_rate(generated):,.0f} tokens/s"
            yield "conversation", f"{words.count(self.turns, 'turn')}, {context:,} of {limit:,} tokens of context"
            prompt = f"{used.prompt_tokens:,} before it, {used.cached_tokens:,} of them cached"
            yield "last answer", f"{words.count(generated, 'token')}, {prompt}; {speed}"
        prompt_tokens, cached_tokens = figures.get("prompt_tokens", 0), figures.get("cached_tokens", 0)
        generated, finished = figures.get("generated_tokens", 0), figures.get("finished", 0)
        yield "all answers", f"{words.count(generated, 'token')} in {words.count(finished, 'answer')}"
        yield "prefix cache", from_cache(prompt_tokens, cached_tokens)
        pages = [f"{figures.get(f'pages_{name}', 0):,} {name}" for name in ("held", "cached", "free")]
        yield "pages", f"{', '.join(pages)}, of {figures.get('pages_total', 0):,}"


def from_cache(prompt_tokens: int, cached_tokens: int) -> str:
    """Return how many tokens of all prompts came from the prefix cache, in words."""
    if not prompt_tokens:
        return "no prompt was sent yet"
    found, share = f"{cached_tokens:,}" if cached_tokens else "none", cached_tokens / prompt_tokens
    return f"{found} of {words.count(prompt_tokens, 'prompt token')} came from it ({share:.0%})"


def _words(message: Message) -> str:
    """Return the text of a message; of its pictures, that they are there."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    return " ".join(part if isinstance(part, str) else str(part.get("text", "[picture]")) for part in parts)


class Command(NamedTuple):
    """A /command: its meaning, its function, and its argument's name."""

    meaning: str
    run: Callable[[Chat, str], None]
    argument: str = ""


COMMANDS = {
    "help": Command("shows this list", Chat.help),
    "continue": Command("goes on with an answer that was cut or stopped", Chat.go_on),
    "again": Command("answers the last message again; this answer stays", Chat.again),
    "edit": Command("takes the last message into the line, to write it anew; this version stays", Chat.edit, "[TEXT]"),
    "fork": Command("lists the answer's tokens, or goes on from one with something else", Chat.fork, "[TOKEN] [TEXT]"),
    "earlier": Command("shows the version before, of a message or an answer", Chat.earlier),
    "later": Command("shows the next version", Chat.later),
    "undo": Command("takes the last turn back", Chat.undo),
    "reset": Command("starts a new conversation", Chat.reset),
    "settings": Command("shows temperature and others, or sets one, or a preset", Chat.settings, "[NAME] [VALUE]"),
    "reasoning": Command("shows the model's reasoning before its last answer", Chat.reasoning),
    "save": Command("writes the conversation to a file", Chat.save, "FILE"),
    "load": Command("goes on with a conversation from a file", Chat.load, "FILE"),
    "stats": Command("shows tokens, speed and cache", Chat.stats),
    "quit": Command("leaves, as Ctrl-D does", lambda chat, argument: None),
}


def completions() -> list[str]:
    """Return the lines that Tab completes."""
    settings = [f"/settings {name}" for name in (*PRESETS, AS_OPENED, *RANGES, "system")]
    return [*(f"/{name}" for name in COMMANDS), *settings, *SUGGESTIONS]


def short(weights: str) -> str:
    """Return the formats of weights without the reasons for them."""
    return weights.partition(" (")[0]
