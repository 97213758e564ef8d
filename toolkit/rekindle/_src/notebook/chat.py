"""A conversation: send, stop, answer again, edit the last message, or fork an answer at a token.

Conversations outlive their kernel; see `transcripts`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rekindle._src.capabilities.overflow.turns import turns_of
from rekindle._src.core.names import short_model
from rekindle._src.core.records import FinishReason
from rekindle._src.core.repetition import repetition
from rekindle._src.core.reply import Reply
from rekindle._src.core.sampling import ANSWER_TOKENS, Sampling
from rekindle._src.notebook import bubbles, settings
from rekindle._src.notebook.answer import LastAnswer, Piece, tokens_of
from rekindle._src.notebook.attachments import Attachment, Attachments, drawn_of, rooms, text_in
from rekindle._src.notebook.live import Control, Live, RequestLike, SessionLike, button, choice, field
from rekindle._src.notebook.transcripts import Message, Transcripts, new_name
from rekindle._src.views import html
from rekindle._src.views.answers import CHOICES, SUGGESTIONS, facts_of, stop_of
from rekindle._src.views.branches import Branch, Branches, Place
from rekindle._src.views.replies import NO_FIGURES, ReasoningFigures, reply_of, results_of
from rekindle.errors import InvalidRequest, PromptTooLong, RekindleError, RequestAborted

_SAY = field("say", "Say something", width="100%", grows=True, group="say")
_SEND = button("send", "Send", title="Enter sends, Shift+Enter is a new line", look="main", group="say", spot="go")
_HALT = button("halt", "Stop", title="Stop the answer; what was said stays", look="main", group="say", spot="go")
_FORK = (
    field("instead", "what should come there instead", width="18em", group="fork"),
    button(
        "fork", "Fork", title="Keep the answer up to the marked token and go on from there", look="main", group="fork"
    ),
    button("keep", "Cancel", group="fork"),
)
_FORGET = "The first message and its answer leave the conversation, which makes room"
_RESEND = button("forget", "Drop the oldest turn and send", title=_FORGET, look="main", group="room")
_PROCEED = button("forget", "Drop the oldest turn and go on", title=_FORGET, look="main", group="room")
# Options of `chat` that are no sampling options.
_OF_CHAT = ("tools", "overflow", "template", "continue_final_message", "template_options")


class Refusal(NamedTuple):
    """A message that was not answered, in words, and True if the conversation is too long for it."""

    problem: str
    too_long: bool

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        if isinstance(error, PromptTooLong):
            return cls(f"Not sent: the conversation with this message {error.problem}", True)
        return cls(f"Not answered: {type(error).__name__}: {error}", False)


class Draft(NamedTuple):
    """The next message: the text of the input line, and its attachments."""

    text: str
    attached: tuple[Attachment, ...]


class ChatView(Live):
    """A conversation in `messages`. Every answer uses the session's prefix cache as far as possible.

    Click a token of the last answer to fork it there: the tokens before it stay, and their pages are shared. What is
    edited, answered again or forked stays as another version, while the kernel lives. The conversation is kept in the
    cache folder under `name` as it goes on, unless `disk_memory` is 0. `restore` resumes one by its name, the one
    used last if it is "auto". A conversation that outgrows the context goes on without its oldest turns, and a line
    below the answer says so; with overflow="refuse" a button makes room instead. `suggestions` are first messages to
    press. Where `sessions` gives several open ones, the model of the next answer can be chosen.
    """

    def __init__(
        self,
        session: SessionLike,
        *,
        system: str | None = None,
        restore: str | None = None,
        suggestions: Sequence[str] | None = None,
        sessions: Callable[[], Sequence[SessionLike]] = tuple,
        **options: object,
    ) -> None:
        super().__init__()
        suggestions = SUGGESTIONS if suggestions is None else suggestions
        if isinstance(suggestions, str) or not all(isinstance(one, str) and one for one in suggestions):
            raise InvalidRequest("suggestions", suggestions, "must be a list of messages", "Pass [text, …], or []")
        self.suggestions: tuple[str, ...] = tuple(suggestions)
        self.options: dict[str, Any] = {"overflow": "drop", **options}
        self._sessions = sessions
        self._use(session)
        self._transcripts = Transcripts(session.config.cache_folder)
        self._keeps = session.config.disk_memory > 0  # cleared when writing fails
        self._keeping = threading.Lock()
        self._written: list[Message] = []
        self.name: str = new_name()  # name of the kept conversation, for `restore`
        self.messages: list[Message] = []
        if restore is not None:
            self.name, self.messages = self._transcripts.load(restore)
            self._written = list(self.messages)
        if system:
            self.system = system
        self._sliders_shown = False  # the settings are shown
        self._listed: list[str] = []  # the models to choose from, as they were shown last
        self._settings["system"] = self.system
        if self._keeps:
            self.widget.gone = (
                "Its kernel was restarted or is gone: this is the last picture. "
                f'session.view.chat(restore="{self.name}") goes on with the conversation.'
            )
        self.widget.values = {**self.widget.values, **self._settings, "model": self._model()}
        self.last_answer: LastAnswer | None = None  # the last answer, which is not in `messages` yet
        self.refused: Refusal | None = None  # the last message was not answered, and is in the input line again
        self._settling = threading.RLock()  # the drawing thread and a press may both find a refusal
        self._edit: tuple[Draft, Draft] | None = None  # the next message before and after `edit`
        self._branches = Branches[LastAnswer]()
        self._bubbles: list[tuple[object, str]] = []  # pictures of the messages, each with what it shows
        # Earlier answers with reasoning or calls, by their texts.
        self._replies: dict[str, tuple[Reply, ReasoningFigures]] = {}
        self._facts: dict[str, tuple[str, ...]] = {}  # the quiet lines of earlier answers, by their texts
        self._peek: RequestLike | None = None  # asks what could stand at the marked token
        self._picking = False  # the tokens of the answer are shown to pick one
        # Of the drawing thread only: the shown request, the number of its shown deltas, and True once its end is shown.
        self._watched: RequestLike | None = None
        self._shown_deltas, self._over = 0, True
        self.marked: int | None = None  # token to fork at
        self._changed = threading.Event()  # set after a message, a stop or a mark
        self.start()

    def _use(self, session: SessionLike) -> None:
        """Let a session answer from now on. Raise for options or a model that it can't answer with."""
        drawn = {name: value for name, value in self.options.items() if name not in _OF_CHAT and value is not None}
        sampling = Sampling.of(session.chat_sampling, drawn)
        session.chat([{"role": "user", "content": "…"}], **self.options)
        self.session: SessionLike = session
        self.attachments: Attachments = Attachments(session)
        self.widget.files = self.attachments.most_file
        self._settings = settings.opened_with(sampling, self.options)

    @property
    def ended(self) -> bool:
        return super().ended or self.session.closed

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
        return self.handle is not None and not self.handle.done

    @property
    def handle(self) -> RequestLike | None:
        """The request of the last answer, or None."""
        return None if self.last_answer is None else self.last_answer.handle

    @property
    def answer(self) -> str:
        """The last answer so far."""
        return "" if self.last_answer is None else self.last_answer.text

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The token ids of the last answer so far."""
        return () if self.last_answer is None else self.last_answer.token_ids

    @property
    def stopped(self) -> str:
        """The point where the last answer was cut or stopped, in words; empty if the model ended it or it runs."""
        return stop_of(self._reason, len(self.answer_ids), self.session.config.max_model_len)

    @property
    def can_continue(self) -> bool:
        """True if the last answer was cut or stopped, and the context has room for more of it."""
        made_room = self.last_answer is not None and (self._drops or not self.last_answer.follows) and self._full
        return self._reason in (FinishReason.ABORTED, FinishReason.LENGTH) or made_room

    @property
    def _drops(self) -> bool:
        """True if the prompt leaves out the oldest turns once the context is full."""
        return self.options["overflow"] != "refuse" and self._droppable(turns_of(self.messages))

    @property
    def _full(self) -> bool:
        """True if the context ended the last answer, or left no room for the rest of it."""
        last = self.last_answer
        return last is not None and (
            last.reason is FinishReason.CONTEXT or isinstance(last.handle.error, PromptTooLong)
        )

    @property
    def _reason(self) -> FinishReason | None:
        """The finish reason of the last answer; None if it failed, or has not ended."""
        return None if self.last_answer is None else self.last_answer.reason

    def continue_answer(self, **options: object) -> None:
        """Continue an answer that was cut or stopped."""
        last = self.last_answer
        if last is None or not self.can_continue:
            return
        if not self.answer_ids:
            self.again()
            return
        if self._full and self._drops:
            last = last._replace(follows=False)
        merged = {"max_tokens": self.options.get("max_tokens") or ANSWER_TOKENS, **self.moved(), **options}
        if last.follows:
            rest = last.session.fork(last.handle, at=len(last.handle.token_ids), **merged)
            self.last_answer = last._replace(handle=rest, kept=tuple(last.pieces))
        else:
            self.last_answer = self._gone_on(last, last.pieces, merged)
        self._mark(None)

    def _gone_on(self, last: LastAnswer, pieces: Sequence[Piece], options: Mapping[str, Any]) -> LastAnswer:
        """Return an answer that begins with these pieces of the last one."""
        ids = tokens_of(pieces)
        if last.follows and len(ids) >= last.joined:
            # Its first request's prompt ends where the answer begins, or after the tokens that are joined to it.
            request = last.session.fork(last.origin, at=0, edit=ids[last.joined :], **options)
            return last._replace(handle=request, kept=tuple(pieces))
        beginning = [{"role": "assistant", "content": "".join(piece.text for piece in pieces)}] if pieces else []
        more = {**self.options, **options, "continue_final_message": bool(beginning)}
        request = self.session.chat([*self.messages, *beginning], **more)
        request.submit()
        return LastAnswer(request, request, self.session, tuple(pieces), joined=len(ids))

    def forget(self) -> int:
        """Drop the oldest whole turn, the first message and all before the next one. Return how many messages left.

        System messages stay, and so does the turn of the last answer, which can go on once there is room.
        """
        self._settle()
        turns = turns_of(self.messages)
        if not self._droppable(turns):
            return 0
        del self.messages[turns[0].start : turns[0].stop]
        self.refused = None
        if self.last_answer is not None:
            self.last_answer = self.last_answer._replace(follows=False)
        self._mark(None)
        return len(turns[0])

    def _droppable(self, turns: Sequence[range]) -> bool:
        """True if there is an older turn than the one that the last answer belongs to."""
        return len(turns) > (self.last_answer is not None)

    def _make_room(self) -> None:
        """Drop the oldest turn and try again what had no room."""
        refused = self.refused
        if not self.forget():
            return
        if refused is not None:
            self.send(self.widget.value("say"))
        else:
            self.continue_answer()

    def _settle(self) -> None:
        """Take a refused message back into the input line: the conversation is as it was before it."""
        with self._settling:
            error = None if self.last_answer is None else self.last_answer.refusal
            if error is None:
                return
            self.last_answer = None
            if self.messages and self.messages[-1]["role"] == "user":
                self._take_back(self.messages.pop()["content"])
            self.refused = Refusal.of(error)

    @property
    def _draft(self) -> Draft:
        return Draft(self.widget.value("say"), self.attachments.entries)

    def _take_back(self, content: Any) -> None:
        """Put a message into the input line, before the text and the attachments that are there."""
        typed, attached = self._draft
        said = self.attachments.take_back(content)
        self.attachments.entries += attached
        self.widget.fill("say", "\n".join(filter(None, (said, typed))))

    def _undo_edit(self) -> None:
        """Take the message of the last `edit` out of the input line, unless it was changed there."""
        edit, self._edit = self._edit, None
        if edit is not None and self._draft == edit[1]:
            text, self.attachments.entries = edit[0]
            self.widget.fill("say", text)

    def send(self, text: str) -> None:
        """Send a message with its attached pictures. An unfinished answer is stopped, and its text so far is kept.

        Another text in the input line stays there.
        """
        attached = self.attachments.entries
        if text or attached:
            self._finish_answer()
            self.messages.append({"role": "user", "content": self.attachments.content(text)})
            self.attachments.entries, line = (), self.widget.value("say")
            if line == text:
                self.widget.fill("say", "")
            try:
                self._answer()
            except BaseException:
                self.messages.pop()  # it was not sent, so it stays in the input line
                self.attachments.entries = attached
                self.widget.fill("say", line)
                raise
            if line == text:
                self._edit = None

    def attach(self, picture: object) -> None:
        """Attach a picture, in any form that `session.chat` takes, to the next message."""
        self.attachments.add(picture, self._contents())
        self._mark(self.marked)

    def detach(self) -> None:
        """Remove the pictures that are attached to the next message."""
        self.attachments.entries = ()
        self._mark(self.marked)

    def halt(self) -> None:
        """Stop the answer. Its text so far stays."""
        if self.handle is not None:
            self.handle.cancel()

    def again(self, at: int | None = None, **options: object) -> None:
        """Request another answer to the last message, with another seed if the temperature is above 0.

        `at` is the place of an earlier answer in `messages`. The answer stays as another version, and so does all that
        follows it.
        """
        self._settle()
        answers = self.handle is not None or (self.messages and self.messages[-1]["role"] == "assistant")
        place = len(self.whole()) - bool(answers and self._said()) if at is None else at
        if place and self.whole()[place - 1]["role"] == "user":
            self._cut(place)
            self._answer(**{"seed": None, **options})

    def edit(self, at: int | None = None) -> None:
        """Put the last message, or the one at a place of `messages`, into the input line, to be written anew.

        The message stays as another version, and so does all that follows it. A text that was typed follows it in the
        input line.
        """
        self._settle()
        users = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        for place in users[-1:] if at is None else [place for place in users if place == at]:
            content = self.messages[place]["content"]
            self._cut(place)
            self._undo_edit()
            before = self._draft
            self._take_back(content)
            self._edit = before, self._draft
            self._mark(None)

    def switch(self, at: int, by: int = 1) -> None:
        """Show another version of the message at a place of `messages`: the next one, or the one `by` versions on."""
        self._settle()
        whole = self.whole()
        if not 0 <= at <= len(whole):
            return
        branch = self._branches.turned(whole[:at], whole[at] if at < len(whole) else None, by)
        if branch is None:
            return
        self._cut(at)
        self.last_answer = branch.answer
        self.messages += map(dict, branch.messages[:-1] if branch.answer is not None else branch.messages)
        self._undo_edit()
        self._mark(None)

    def whole(self) -> list[Message]:
        """Return the messages with the last answer so far."""
        said = self._said()
        return (
            [*self.messages, {"role": "assistant", "content": said}]
            if self.handle is not None and said
            else self.messages
        )

    def _said(self) -> str:
        """Return the text of the last answer."""
        if self.handle is not None:
            return self.answer
        last = self.messages[-1] if self.messages else {"role": ""}
        return text_in(last["content"]) if last["role"] == "assistant" else ""

    def _cut(self, at: int) -> None:
        """End the conversation before the message at a place. What stands there from it on is kept as a branch."""
        whole = self.whole()
        answer = self.last_answer if len(whole) > len(self.messages) else None
        self._branches.keep(whole[:at], Branch(tuple(whole[at:]), answer))
        self.messages = self.messages[:at]
        self._drop()

    def fork(self, at: int, edit: str = "", **options: object) -> None:
        """Continue from token `at` of the last answer, with `edit` in place of the tokens there.

        Without `edit`, the rest is sampled again with another seed; a greedy answer then repeats itself.
        """
        last, length = self.last_answer, len(self.answer_ids)
        if last is None:
            return
        if not 0 <= at <= length:
            raise InvalidRequest("at", at, f"is outside of the answer's {length} tokens so far", f"Use 0 to {length}")
        tokenizer = last.session.tokenizer
        # Events of a reply lag behind its text, so the events of its beginning are unknown.
        pieces = [piece._replace(events=None) for piece in last.until(at, tokenizer.decode)]
        if edit:
            ids = tuple(tokenizer.encode(edit, add_special_tokens=False))
            pieces.append(Piece(edit, ids, None))
        beginning = len(tokens_of(pieces))
        budget = max(1, max(last.origin.sampling.max_tokens, length) - beginning)
        forked = self._gone_on(last, pieces, {"seed": None, "max_tokens": budget, **options})
        self._cut(len(self.messages))
        self.last_answer = forked
        self._mark(None)

    # Called from the page.

    def press(self, name: str) -> None:
        marked = self.marked
        kind, _, choice = name.partition(":")
        if name in ("send", "say:enter"):
            self.send(self.widget.value("say"))
        elif name in ("fork", "instead:enter") and marked is not None:
            self.fork(marked, self.widget.value("instead"))
        elif name == "keep":
            self._picking = False
            self._mark(None)
        elif name == "settings":
            self._sliders_shown = not self._sliders_shown
            self._mark(self.marked)
        elif kind == "preset":
            self.widget.values = {**self.widget.values, **settings.presets(self._settings).get(choice, {})}
            self._mark(self.marked)
        elif kind == "suggest":
            self.send(next(iter(self.suggestions[int(choice) :][:1]), "") if choice.isdecimal() else "")
        elif name == "continue":
            self.continue_answer()
        elif name == "forget":
            self._make_room()
        elif name == "model":
            self._choose(self.widget.value("model"))
        elif name in ("halt", "again", "edit", "detach"):
            getattr(self, name)()

    def act(self, name: str, at: int) -> None:
        if name == "edit":
            self.edit(at)
        elif name == "again":
            if 0 < at < len(self.whole()):
                self.again(at)
        elif name in ("earlier", "later"):
            self.switch(at, -1 if name == "earlier" else 1)
        elif name == "continue":
            self.continue_answer()
        elif name == "pick":
            self._picking = not self._picking
            self._mark(None)
        elif name == "use" and self.marked is not None:
            choices = self.alternatives(self.marked)
            if 0 <= at < len(choices):
                self.widget.fill("instead", choices[at].text)

    def token(self, index: int) -> None:
        self._mark(index if 0 <= index < len(self.answer_ids) else None)

    def file(self, value: Mapping[str, object]) -> None:
        if value.get("at") == 0:
            self.widget.note = ""  # what was wrong with one of several stays while the others come
        self.attachments.add_file(value, self._contents())
        self.widget.controls = self._controls()
        self.refresh()

    def _mark(self, index: int | None) -> None:
        if index != self.marked:
            self._ask(index)
        self.marked = index
        self.widget.fill("instead", "")
        self.widget.note = ""
        self.refresh()
        self._changed.set()

    def _ask(self, index: int | None) -> None:
        """Ask the model what could stand at a token of the answer, unless its request has brought that."""
        peek, self._peek = self._peek, None
        if peek is not None:
            peek.cancel()
        last = self.last_answer
        if index is None or last is None or last.logprobs(index) is not None:
            return
        if not last.follows or index < last.joined:
            return
        options = {"max_tokens": 1, "logprobs": CHOICES, "ignore_eos": True}
        with contextlib.suppress(RekindleError):  # no place, or a model that can't: the token is marked all the same
            edit = list(last.token_ids[last.joined : index])
            peek = last.session.fork(last.origin, at=0, edit=edit, **options)
            peek.submit()
            self._peek = peek

    def _choose(self, name: str) -> None:
        """Let the open session of this name answer from now on."""
        session = self._models().get(name)
        if session is None or session is self.session:
            return
        moved = self.moved()
        self._finish_answer()
        try:
            self._use(session)
        finally:
            self.widget.fill("model", self._model())
        self._settings["system"] = self.system
        kept = {name: str(value) for name, value in moved.items()}
        self.widget.values = {**self.widget.values, **self._settings, **kept}
        self._mark(None)

    def _models(self) -> dict[str, SessionLike]:
        """Return the open sessions by the names of their models, with numbers where several have one."""
        opened = [session for session in self._sessions() if not session.closed]
        named: dict[str, SessionLike] = {}
        for session in opened if self.session in opened else [self.session, *opened]:
            name = short_model(session.model)
            same = sum(short_model(one.model) == name for one in named.values())
            named[f"{name} ({same + 1})" if same else name] = session
        return named

    def _model(self) -> str:
        return next(name for name, session in self._models().items() if session is self.session)

    def alternatives(self, index: int) -> list[bubbles.Alternative]:
        """Return the alternatives at a token of the last answer, the likeliest first."""
        last = self.last_answer
        if last is None:
            return []
        found = last.logprobs(index)
        if found is None and self._peek is not None and self._peek.done:
            found = next((delta.logprobs[0] for delta in self._peek.deltas if delta.logprobs), None)
        if found is None or index >= len(self.answer_ids):
            return []
        chosen, decode = self.answer_ids[index], last.session.tokenizer.decode
        likely = dict(zip(found.top_ids[:CHOICES], found.top_logprobs, strict=False))
        likely |= {chosen: found.logprob} if found.token_id == chosen else {}
        return [
            bubbles.Alternative(decode([token], skip_special_tokens=False), math.exp(logprob), token == chosen)
            for token, logprob in likely.items()
        ]

    def _controls(self) -> list[Control]:
        start = [
            button(f"suggest:{place}", text, group="start")
            for place, text in enumerate(self.suggestions)
            if not self.messages and self.handle is None
        ]
        tune = button(
            "settings", "Settings", title="System prompt and sampling, for the next answer", group="say",
            look="on" if self._sliders_shown else "quiet",
        )  # fmt: skip
        fork = () if self.marked is None else _FORK
        drawer = settings.controls(self.widget.values, self._settings) if self._sliders_shown else []
        models = list(self._models())
        if models != self._listed:  # a session's name may have another number
            self._listed = models
            self.widget.fill("model", self._model())
        several = [choice("model", "Model", models, title="Who answers from now on", group="say")]
        room = () if self.refused is None or not self.refused.too_long else (_RESEND,)
        room = (_PROCEED,) if self._full else room
        room = room if self.options["overflow"] == "refuse" else ()
        room = room if self._droppable(turns_of(self.messages)) else ()
        return [
            *start, *fork, *room, *drawer, _SAY, *self.attachments.controls, tune,
            *(several if len(models) > 1 else ()), _HALT if self.answering else _SEND,
        ]  # fmt: skip

    def _contents(self) -> list[Any]:
        return [message["content"] for message in self.messages]

    # Making and drawing answers.

    def _answer(self, **options: Any) -> None:
        if (system := self.widget.value("system")) != self._settings["system"]:
            self._settings["system"] = self.system = system
        call = self.session.chat(self.messages, **{**self.options, **self.moved(), **options})
        call.submit()
        self.refused = None
        self.last_answer = LastAnswer(call, call, self.session)
        self._mark(None)

    def moved(self) -> dict[str, float]:
        """Return the sampling options that were moved in the settings."""
        return settings.moved(self.widget.values, self._settings)

    def _finish_answer(self) -> None:
        """Stop the answer, and add its text so far to the messages."""
        self._settle()
        if self.last_answer is not None:
            self.last_answer.handle.cancel()
            if (reply := self.last_answer.reply) is not None:
                self._replies[self.answer] = reply, self.last_answer.figures
            self._facts[self.answer] = self._quiet()
            self.messages.append({"role": "assistant", "content": self.answer})
        self._drop()

    def _drop(self) -> None:
        if self.last_answer is not None:
            self.last_answer.handle.cancel()
        self.last_answer = None
        self._picking = False
        self.refused = None
        self._mark(None)

    # Outliving the kernel.

    def keep(self) -> None:
        """Write the current conversation to the cache folder."""
        with self._keeping:
            messages = [dict(message) for message in self.messages]
            # Sending has two steps: the answer is added to the messages, and then its request is dropped.
            said = messages and messages[-1]["role"] != "assistant"
            if self.handle is not None and (answer := self.answer) and said:
                messages.append({"role": "assistant", "content": answer})
            if self._keeps and messages != self._written and any(message["role"] == "user" for message in messages):
                self._keeps = self._transcripts.save(self.name, self.session.model, messages)
                self._written = messages

    def epitaph(self) -> str:
        if not (self._keeps and self.messages):
            return ""
        return html.line(f'If its kernel is gone: session.view.chat(restore="{self.name}") takes the conversation up')

    def wait(self) -> None:
        """Block until there is more of the answer. After its end, return twice a second."""
        handle = self.handle
        if handle is not self._watched:
            self._watched, self._shown_deltas, self._over = handle, 0, handle is None
        if handle is None or self._over:
            peeking = self._peek is not None and not self._peek.done
            self._changed.wait(0.05 if peeking else 0.5)
            self._changed.clear()
            return
        # If an answer ends between two pictures, the next picture is due at once, not half a second later.
        self._shown_deltas = handle.wait_for_more(self._shown_deltas)
        self._over = handle.done

    def stop(self) -> None:
        super().stop()
        self._changed.set()

    def _bubble(self, index: int, role: str, content: Any, most: int, place: Place) -> str:
        """Return a complete message with at most `most` thumbnails, which is drawn once."""
        said = content if isinstance(content, str) else ""
        reply, figures = self._replies.get(said, (None, NO_FIGURES))
        reply, results = reply or reply_of(self.messages[index]), results_of(self.messages, index)
        facts = self._facts.get(said, ()) if role == "assistant" else ()
        shown = (role, content, reply, results, most, place, facts)
        if index < len(self._bubbles) and self._bubbles[index][0] == shown:
            return self._bubbles[index][1]
        del self._bubbles[index:]
        key, attached = f"reasoning {index}", drawn_of(content, most)
        body = bubbles.body(role, text_in(content), reply, figures=figures, results=results, key=key, attached=attached)
        actions = {"user": (bubbles.COPY, bubbles.EDIT), "assistant": (bubbles.COPY, bubbles.AGAIN)}.get(role, ())
        drawn = bubbles.turn(role, body, at=index, actions=actions, quiet=facts, place=place)
        self._bubbles.append((shown, drawn))
        return self._bubbles[index][1]

    def _quiet(self) -> tuple[str, ...]:
        """Return the line below the last answer: the model, its speed, why it ended."""
        last = self.last_answer
        if last is None or not last.handle.done:
            return ()
        handle, ids = last.handle, last.token_ids
        limit = last.session.config.max_model_len
        facts = facts_of(short_model(last.session.model), handle.so_far(), self._reason, len(ids), limit)
        repeats = repetition(ids)
        hint = "" if repeats is None else html.with_hint(str(repeats), "Settings: a higher temperature")
        return (*facts, hint)

    def _drawn_answer(self, whole: list[Message]) -> Iterator[str]:
        """Yield the last answer, its error, and the alternatives at its marked token."""
        last, at = self.last_answer, len(self.messages)
        if last is None:
            return
        handle, pieces = last.handle, [(piece.text, len(piece.token_ids)) for piece in last.pieces]
        body = bubbles.answer(
            pieces, marked=self.marked, complete=handle.done, picking=self._picking, reply=last.reply,
            figures=last.figures, key=f"reasoning {at}",
        )  # fmt: skip
        actions: tuple[bubbles.Action, ...] = ()
        if handle.done and not self.ended:
            more = (bubbles.CONTINUE,) if self.can_continue else ()
            actions = (*more, bubbles.COPY, bubbles.AGAIN, *((bubbles.FORK,) if pieces else ()))
        place = self._place(whole, at) if len(whole) > at else Place(1, 1)
        yield bubbles.turn("assistant", body, at=at, actions=actions, quiet=self._quiet(), place=place)
        error = handle.error
        if error is not None and not isinstance(error, RequestAborted):
            yield html.line(f"{type(error).__name__}: {error}")
        if not handle.done and (found := repetition(self.answer_ids)) is not None:
            yield html.line(f"the answer {found}", "Stop ends it")
        if self._full and not self.ended:
            yield html.line("Edit takes the last message back")
        if self._picking and self.marked is None:
            yield html.line("Click a token to write something else there, and go on from it")

    def _place(self, whole: Sequence[Message], at: int) -> Place:
        """Return the place of a message among its versions."""
        return self._branches.place(whole[:at], whole[at]) if self._branches else Place(1, 1)

    def _head(self) -> str:
        """Return the title, the model, and the name under which the conversation is kept."""
        first = next((text_in(one["content"]) for one in self.messages if one["role"] == "user"), "")
        hint = f'After a restart session.view.chat(restore="{self.name}") goes on with it'
        kept = html.with_hint(f'kept as "{self.name}"', hint) if self._keeps and self.messages else ""
        return bubbles.head(" ".join(first.split()) or "New chat", short_model(self.session.model), kept)

    def draw(self) -> str:
        self._settle()
        said = [(message["role"], message["content"]) for message in self.messages]
        room, whole = rooms([content for _, content in said]), self.whole()
        rows = [
            self._bubble(index, *message, room[index], self._place(whole, index)) for index, message in enumerate(said)
        ]
        del self._bubbles[len(rows) :]
        rows += self._drawn_answer(whole)
        if self._branches and self.handle is None:
            rows.append(bubbles.lost(len(whole), self._branches.place(whole, None)))
        if attached := self.attachments.draw():
            rows.append(attached)
        if not self.ended and (controls := self._controls()) != self.widget.controls:
            self.widget.controls = controls  # an answer began or ended, or a session did
        if self.refused is not None and not self.ended:
            rows.append(html.line(self.refused.problem, "It is in the input line again"))
        head = self._head()
        if not rows:
            return html.Markup(f"{head}{html.line('Nothing was said yet')}")
        if self.marked is not None and (choices := self.alternatives(self.marked)):
            rows.append(bubbles.choices(choices))  # next to the field for what should come there instead
        look = f'role="log" aria-label="Conversation" aria-busy="{str(self.answering).lower()}"'
        return html.Markup(f'{head}<div {look} style="max-width:52em">{"".join(rows)}</div>')
