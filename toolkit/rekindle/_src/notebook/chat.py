"""A conversation: send, stop, answer again, edit the last message, or fork an answer at a token.

Conversations outlive their kernel: a JSON file each, private to the user, in the cache folder's `chats`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rekindle._src.core import html
from rekindle._src.core.config import cache_folder
from rekindle._src.core.records import FinishReason, TextDelta
from rekindle._src.core.repetition import repetition
from rekindle._src.core.reply import ContentDelta, Reply, ReplyEvent, fold
from rekindle._src.core.sampling import ANSWER_TOKENS, Sampling
from rekindle._src.core.store import Store
from rekindle._src.notebook import bubbles
from rekindle._src.notebook.attachments import Attachments, is_content, rooms, text_in, thumbnails_of
from rekindle._src.notebook.live import Control, Live, RequestLike, SessionLike, button, field, slider
from rekindle.errors import InvalidRequest, RequestAborted, StoreError

_TALK = (
    field("say", "Say something", width="44em", rows=2),
    button("send", "Send"),
    button("halt", "Stop", title="Stop the answer; what was said stays"),
    button("again", "Again", title="Another answer to the last message"),
    button("edit", "Edit last", title="Take the last message and its answer back"),
    button("settings", "Settings", title="System prompt and sampling, for the next answer"),
)
_CONTINUE = (button("continue", "Continue", title="Go on with the answer where it ends"),)
_FORK = (
    field("instead", "what should come there instead", width="18em"),
    button("fork", "Fork", title="Keep the answer up to the marked token and go on from there"),
    button("keep", "Cancel"),
)
_SLIDERS = {  # least, most, step, title
    "temperature": (0.0, 2.0, 0.05, "0 is greedy: always the most likely token"),
    "top_p": (0.05, 1.0, 0.05, "only the most likely tokens that make up this share"),
    "max_tokens": (1, 2 * ANSWER_TOKENS, 1, "at most in an answer; one that is cut can be continued"),
}
# Options of `chat` that are no sampling options.
_OF_CHAT = ("tools", "template", "continue_final_message", "template_options")

VERSION = 1
MOST = 50  # kept conversations; the least recently used one is removed first
NEWEST = "auto"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
log = logging.getLogger("rekindle.cache")
Message = dict[str, Any]


class Piece(NamedTuple):
    """Tokens whose text became final together. An answer can be forked before each piece."""

    text: str
    token_ids: tuple[int, ...]
    events: tuple[ReplyEvent, ...] | None  # its part of the reply; None if unknown, after a fork

    @classmethod
    def of(cls, delta: TextDelta) -> Piece:
        return cls(delta.text, delta.token_ids, (ContentDelta(delta.text),) if delta.events is None else delta.events)


class ChatView(Live):
    """A conversation in `messages`. Every answer uses the session's prefix cache as far as possible.

    Click a token of the last answer to fork it there: the tokens before it stay, and their pages are shared. The
    conversation is kept in the cache folder under `name` as it goes on, unless `disk_memory` is 0. `restore` resumes
    one by its name, the newest if it is "auto".
    """

    def __init__(
        self, session: SessionLike, *, system: str | None = None, restore: str | None = None, **options: Any
    ) -> None:
        super().__init__(*_TALK)
        # Wrong options, or a model without a chat template, raise now and not at the first message.
        drawn = {name: value for name, value in options.items() if name not in _OF_CHAT and value is not None}
        sampling = Sampling.of(session.chat_sampling, drawn)
        self._session, self._options = session, options
        session.chat([{"role": "user", "content": "…"}], **options)
        self._transcripts = Transcripts(cache_folder(session.config.cache_dir))
        self._keeps = session.config.disk_memory > 0  # cleared when writing fails
        self._keeping = threading.Lock()
        self._written: list[Message] = []
        self.name: str = new_name()  # name of the kept conversation, for `restore`
        self.messages: list[Message] = []
        self._attached = Attachments(session.model, session.reads_pictures)
        if restore is not None:
            self.name, self.messages = self._transcripts.load(restore)
            self._written = list(self.messages)
        if system:
            self.system = system
        self._tuning = False  # the settings are shown
        self._settings = {name: str(getattr(sampling, name)) for name in _SLIDERS} | {"system": self.system}
        if options.get("max_tokens") is None:
            self._settings["max_tokens"] = str(ANSWER_TOKENS)
        if self._keeps:
            self.widget.gone = (
                "Its kernel was restarted or is gone: this is the last picture. "
                f'session.view.chat(restore="{self.name}") goes on with the conversation.'
            )
        self.widget.values = {**self.widget.values, **self._settings}
        self.widget.files = self._attached.most_file
        self._handle: RequestLike | None = None  # the request of the last answer, which is not in `messages` yet
        self._origin: RequestLike | None = None  # the request that the answer was forked from, or `_handle`
        self._kept_pieces: tuple[Piece, ...] = ()  # the pieces of the answer that a fork kept
        self._bubbles: list[tuple[object, str]] = []  # pictures of the messages, each with what it shows
        self._replies: dict[str, Reply] = {}  # earlier answers with reasoning or calls, by their texts
        # Of the drawing thread only: the shown request, the number of its shown deltas, and True once its end is shown.
        self._watched: RequestLike | None = None
        self._shown_deltas, self._over = 0, True
        self._marked: int | None = None  # token to fork at
        self._changed = threading.Event()  # set after a message, a stop or a mark
        self.start()

    @property
    def ended(self) -> bool:
        return super().ended or self._session.closed

    @property
    def system(self) -> str:
        """The system prompt; empty if there is none."""
        first = self.messages[0] if self.messages else {"role": ""}
        return text_in(first["content"]) if first["role"] == "system" else ""

    @system.setter
    def system(self, prompt: str) -> None:
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": prompt}, *others] if prompt else others

    @property
    def answering(self) -> bool:
        return self._handle is not None and not self._handle.done

    @property
    def handle(self) -> RequestLike | None:
        """The request of the last answer, or None."""
        return self._handle

    @property
    def answer(self) -> str:
        """The last answer so far."""
        return "".join(piece.text for piece in self._pieces())

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The token ids of the last answer so far."""
        return tuple(token for piece in self._pieces() for token in piece.token_ids)

    @property
    def stopped(self) -> str:
        """The point where the last answer was cut or stopped, in words; empty if the model ended it or it runs."""
        tokens = html.count(len(self.answer_ids), "token")
        match self._reason:
            case FinishReason.ABORTED:
                return f"stopped after {tokens}"
            case FinishReason.LENGTH:
                return f"cut at {tokens}"
            case FinishReason.CONTEXT:
                limit = self._session.config.max_model_len
                return f"cut at {tokens}: the context of {limit:,} tokens is full"
        return ""

    @property
    def can_continue(self) -> bool:
        """True if the last answer was cut or stopped, and the context has room for more of it."""
        return self._reason in (FinishReason.ABORTED, FinishReason.LENGTH)

    @property
    def _reason(self) -> FinishReason | None:
        """The finish reason of the last answer; None if it failed, or has not ended."""
        handle = self._handle
        if handle is None or not handle.done:
            return None
        if isinstance(handle.error, RequestAborted):
            return FinishReason.ABORTED
        return next((delta.finish_reason for delta in reversed(handle.deltas) if delta.finish_reason), None)

    def continue_answer(self, **options: Any) -> None:
        """Continue an answer that was cut or stopped."""
        handle = self._handle
        if handle is None or not self.can_continue:
            return
        if not self.answer_ids:
            self.again()
            return
        defaults = {"max_tokens": self._options.get("max_tokens") or ANSWER_TOKENS, **self._tuned()}
        pieces = tuple(self._pieces())
        self._handle = self._session.fork(handle, at=len(handle.token_ids), **{**defaults, **options})
        self._kept_pieces = pieces
        self._mark(None)

    def send(self, text: str) -> None:
        """Send a message with its attached pictures. An unfinished answer is stopped, and its text so far is kept."""
        attached = self._attached.entries
        if text or attached:
            self._finish_answer()
            self.messages.append({"role": "user", "content": self._attached.content(text)})
            self._attached.entries = ()
            try:
                self._answer()
            except BaseException:
                self.messages.pop()  # it was not sent, so it stays in the input line
                self._attached.entries = attached
                raise
            self.widget.fill("say", "")

    def attach(self, picture: Any) -> None:
        """Attach a picture, in any form that `session.chat` takes, to the next message."""
        self._attached.add(picture, self._contents())
        self._mark(self._marked)

    def detach(self) -> None:
        """Remove the pictures that are attached to the next message."""
        self._attached.entries = ()
        self._mark(self._marked)

    def halt(self) -> None:
        """Stop the answer. Its text so far stays."""
        if self._handle is not None:
            self._handle.cancel()

    def again(self, **options: Any) -> None:
        """Request another answer to the last message, with another seed if the temperature is above 0."""
        self._take_back()
        if self.messages and self.messages[-1]["role"] == "user":
            self._answer(**{"seed": None, **options})

    def edit(self) -> None:
        """Remove the last message and its answer, and put the message into the input line."""
        self._take_back()
        if self.messages and self.messages[-1]["role"] == "user":
            self.widget.fill("say", self._attached.take_back(self.messages.pop()["content"]))
            self._mark(None)

    def fork(self, at: int, edit: str = "", **options: Any) -> None:
        """Continue from token `at` of the last answer, with `edit` in place of the tokens there.

        Without `edit`, the rest is sampled again with another seed; a greedy answer then repeats itself.
        """
        origin, handle, length = self._origin, self._handle, len(self.answer_ids)
        if origin is None or handle is None:
            return
        if not 0 <= at <= length:
            raise InvalidRequest("at", at, f"is outside of the answer's {length} tokens so far", f"Use 0 to {length}")
        tokenizer = self._session.tokenizer
        # Events of a reply lag behind its text, so the events of its beginning are unknown.
        pieces = [piece._replace(events=None) for piece in _until(self._pieces(), at, tokenizer.decode)]
        if edit:
            ids = tuple(tokenizer.encode(edit, add_special_tokens=False))
            pieces.append(Piece(edit, ids, None))
        beginning = [token for piece in pieces for token in piece.token_ids]
        # The first request's prompt ends where the answer begins; the prompts of its forks hold parts of the answer.
        budget = max(1, max(origin.sampling.max_tokens, length) - len(beginning))
        forked = self._session.fork(origin, at=0, edit=beginning, **{"seed": None, "max_tokens": budget, **options})
        handle.cancel()
        self._handle, self._kept_pieces = forked, tuple(pieces)
        self._mark(None)

    # Called from the page.

    def press(self, name: str) -> None:
        marked = self._marked
        if name in ("send", "say:enter"):
            self.send(self.widget.value("say"))
        elif name in ("fork", "instead:enter") and marked is not None:
            self.fork(marked, self.widget.value("instead"))
        elif name == "keep":
            self._mark(None)
        elif name == "settings":
            self._tuning = not self._tuning
            self._mark(self._marked)
        elif name == "continue":
            self.continue_answer()
        elif name in ("halt", "again", "edit", "detach"):
            getattr(self, name)()

    def token(self, index: int) -> None:
        self._mark(index if 0 <= index < len(self.answer_ids) else None)

    def file(self, value: Mapping[str, Any]) -> None:
        if value.get("at") == 0:
            self.widget.note = ""  # what was wrong with one of several stays while the others come
        self._attached.add_file(value, self._contents())
        self.widget.controls = self._controls()
        self.refresh()

    def _mark(self, index: int | None) -> None:
        self._marked = index
        self.widget.fill("instead", "")
        self.widget.controls, self.widget.note = self._controls(), ""
        self.refresh()
        self._changed.set()

    def _controls(self) -> list[Control]:
        settings = _settings() if self._tuning else ()
        more = (*self._attached.controls, *(_CONTINUE if self.can_continue else ()))
        return [*_TALK, *more, *settings, *(() if self._marked is None else _FORK)]

    def _contents(self) -> list[Any]:
        return [message["content"] for message in self.messages]

    # Making and drawing answers.

    def _answer(self, **options: Any) -> None:
        if (system := self.widget.value("system")) != self._settings["system"]:
            self._settings["system"] = self.system = system
        call = self._session.chat(self.messages, **{**self._options, **self._tuned(), **options})
        call.submit()
        self._handle = self._origin = call
        self._kept_pieces = ()
        self._mark(None)

    def _tuned(self) -> dict[str, float]:
        """Return the values of moved sliders. The page may send anything; `Sampling` checks the numbers."""
        values: dict[str, float] = {}
        for name in _SLIDERS:
            value = self.widget.value(name)
            if value != self._settings[name]:
                try:
                    values[name] = int(value) if name == "max_tokens" else float(value)
                except ValueError:
                    raise InvalidRequest(name, value, "is no number", "Move the slider") from None
        return values

    def _pieces(self) -> list[Piece]:
        deltas = self._handle.deltas if self._handle is not None else ()
        return [*self._kept_pieces, *(Piece.of(delta) for delta in deltas if delta.index == 0)]

    def _reply(self) -> Reply | None:
        """Return the parts of the last answer if it has reasoning or calls. Those of a fork are unknown."""
        pieces = self._pieces()
        if any(piece.events is None for piece in pieces):
            return None
        reply = fold(event for piece in pieces for event in piece.events or ())
        return reply if reply.reasoning or reply.tool_calls else None

    def _finish_answer(self) -> None:
        """Stop the answer, and add its text so far to the messages."""
        if self._handle is not None:
            self._handle.cancel()
            if (reply := self._reply()) is not None:
                self._replies[self.answer] = reply
            self.messages.append({"role": "assistant", "content": self.answer})
        self._drop()

    def _drop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._origin = None
        self._kept_pieces = ()
        self._mark(None)

    def _take_back(self) -> None:
        """Drop the last answer. In a restored conversation it is one of the messages."""
        if self._handle is None and self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        self._drop()

    # Outliving the kernel.

    def keep(self) -> None:
        """Write the current conversation to the cache folder."""
        with self._keeping:
            messages = [dict(message) for message in self.messages]
            # Sending has two steps: the answer is added to the messages, and then its request is dropped.
            said = messages and messages[-1]["role"] != "assistant"
            if self._handle is not None and (answer := self.answer) and said:
                messages.append({"role": "assistant", "content": answer})
            if self._keeps and messages != self._written and any(message["role"] == "user" for message in messages):
                self._keeps = self._transcripts.save(self.name, self._session.model, messages)
                self._written = messages

    def epitaph(self) -> str:
        if not (self._keeps and self.messages):
            return ""
        return html.line(f'If its kernel is gone: session.view.chat(restore="{self.name}") takes the conversation up')

    def wait(self) -> None:
        """Block until there is more of the answer. After its end, return twice a second."""
        handle = self._handle
        if handle is not self._watched:
            self._watched, self._shown_deltas, self._over = handle, 0, handle is None
        if handle is None or self._over:
            self._changed.wait(0.5)
            self._changed.clear()
            return
        # If an answer ends between two pictures, the next picture is due at once, not half a second later.
        self._shown_deltas = handle.wait_for_more(self._shown_deltas)
        self._over = handle.done

    def stop(self) -> None:
        super().stop()
        self._changed.set()

    def _bubble(self, index: int, role: str, content: Any, most: int) -> str:
        """Return a complete message with at most `most` thumbnails, which is drawn once."""
        reply = self._replies.get(content) if isinstance(content, str) else None
        shown = (role, content, reply, most)
        if index < len(self._bubbles) and self._bubbles[index][0] == shown:
            return self._bubbles[index][1]
        del self._bubbles[index:]
        key, images = f"reasoning {index}", thumbnails_of(content, most)
        drawn = bubbles.message(role, text_in(content), reply, key=key, images=images, most=most)
        self._bubbles.append((shown, drawn))
        return self._bubbles[index][1]

    def draw(self) -> str:
        said = [(message["role"], message["content"]) for message in self.messages]
        room = rooms([content for _, content in said])
        rows = [self._bubble(index, *message, room[index]) for index, message in enumerate(said)]
        del self._bubbles[len(rows) :]
        if (handle := self._handle) is not None:
            pieces = [(piece.text, len(piece.token_ids)) for piece in self._pieces()]
            key = f"reasoning {len(self.messages)}"
            rows.append(bubbles.answer(pieces, marked=self._marked, complete=handle.done, reply=self._reply(), key=key))
            error = handle.error
            if error is not None and not isinstance(error, RequestAborted):
                rows.append(html.line(f"{type(error).__name__}: {error}"))
            if stopped := self.stopped:
                hint = "Continue goes on" if self.can_continue else "Edit last takes the message back"
                rows.append(html.line(stopped, "" if self.ended else hint))
            if (found := repetition(self.answer_ids)) is not None:
                hint = "" if self.ended else "Stop ends it" if not handle.done else "Settings: a higher temperature"
                rows.append(html.line(f"the answer {found}", hint))
        if attached := self._attached.draw():
            rows.append(attached)
        if not self.ended and (controls := self._controls()) != self.widget.controls:
            self.widget.controls = controls  # an answer was cut, or continues
        if not rows:
            return html.line("Nothing was said yet")
        if self._keeps:
            hint = f'After a restart session.view.chat(restore="{self.name}") goes on with it'
            rows.append(html.with_hint(html.line(f'kept as "{self.name}"'), hint))
        return html.block(*rows)


def _settings() -> tuple[Control, ...]:
    ranges = [
        slider(name, name.replace("_", " "), low=low, high=high, step=step, title=title)
        for name, (low, high, step, title) in _SLIDERS.items()
    ]
    return field("system", "System prompt", width="44em", rows=2), *ranges


def _until(pieces: list[Piece], count: int, decode: Any) -> Iterator[Piece]:
    """Yield the pieces of the first `count` tokens. A piece cut in two loses text that was not final at the cut."""
    remaining = count
    for piece in pieces:
        if remaining <= 0:
            return
        if len(piece.token_ids) <= remaining:
            yield piece
        else:
            yield Piece(decode(list(piece.token_ids[:remaining])), piece.token_ids[:remaining], None)
        remaining -= len(piece.token_ids)


def new_name() -> str:
    """Return a name for a conversation, readable for people."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


class Transcripts:
    """The conversations of one cache folder."""

    def __init__(self, cache_folder: Path) -> None:
        self.folder: Path = cache_folder / "chats"

    def names(self) -> list[str]:
        """Return the names of the kept conversations, the newest first."""
        entries: list[tuple[float, str]] = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix == ".json" and _NAME.fullmatch(path.stem):
                    with contextlib.suppress(OSError):  # another process removed it meanwhile
                        entries.append((path.lstat().st_mtime, path.stem))
        return [name for _, name in sorted(entries, reverse=True)]

    def save(self, name: str, model: str, messages: list[Message]) -> bool:
        """Keep the messages under `name`, whole or not at all. On failure, log the reason and return False."""
        content = {"version": VERSION, "model": model, "saved": time.time(), "messages": messages}
        try:
            encoded = json.dumps(content, ensure_ascii=False).encode()
            if not Store(self.folder).put(f"{name}.json", encoded, durable=True):
                return False
        except (OSError, TypeError, ValueError) as error:
            log.warning("the conversation %r is no longer kept: %s: %s", name, type(error).__name__, error)
            return False
        for old in self.names()[MOST:]:
            with contextlib.suppress(OSError):
                (self.folder / f"{old}.json").unlink()
        return True

    def load(self, name: str) -> tuple[str, list[Message]]:
        """Return the name and the messages of a conversation; "auto" is the newest. Raise StoreError if unreadable."""
        if name == NEWEST:
            name = next(iter(self.names()), NEWEST)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest("restore", name, "can't be a conversation's name", 'Use one that was shown, or "auto"')
        store = Store(self.folder)
        if store.distrusted is not None:
            raise StoreError(f"conversation {name!r} is not read: {store.distrusted}")
        path = store.path(f"{name}.json")
        try:
            content = store.get(path.name)
            if content is not None:
                return name, _messages(json.loads(content))
        except OSError as error:
            raise StoreError(f"conversation {name!r} can't be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"conversation {name!r} can't be used: {path} is damaged ({error}). Remove it") from error
        known = ", ".join(map(repr, self.names()))
        choices = f"There are: {known}" if known else "There is none: each chat view keeps its own while it is used"
        raise StoreError(f"there is no conversation {name!r} in {self.folder}. {choices}")


def _messages(content: Any) -> list[Message]:
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION}")
    messages = content.get("messages")
    if not isinstance(messages, list):
        raise ValueError("it has no messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message has no role")
        if not is_content(message.get("content")):
            raise ValueError("a message has no content")
    return messages
