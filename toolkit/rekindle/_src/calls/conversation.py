"""Conversations: chats that keep their own messages, so that a program never has to add a turn itself.

chat = session.conversation(system="Answer in one sentence.")
done = await chat.say("What is a page?")
"""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, Unpack

from rekindle._src.calls import content
from rekindle._src.calls.call import Call
from rekindle._src.calls.content import PromptOptions, RequestOptions
from rekindle._src.calls.handle import Handle, SyncStream
from rekindle._src.calls.tool_loop import ToolLoop, message_table, text_of
from rekindle._src.capabilities.overflow.turns import PINNED, turns_of
from rekindle._src.core import words
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.foreign_calls import CONVERSATION, ForeignNames
from rekindle._src.core.json_values import TooMuchJson, parse_with_long_strings
from rekindle._src.core.options import refuse_missing, takes_options
from rekindle._src.core.plain_files import read_plain
from rekindle._src.core.records import Completion, FinishReason, TextDelta
from rekindle._src.core.sampling import ANSWER_TOKENS, Sampling, SamplingOptions
from rekindle._src.dispatch.backend import Front
from rekindle._src.views import html
from rekindle.errors import InvalidRequest, PromptTooLong, StoreError
from rekindle_kernels import private_files

FORMAT, VERSION, WITH_CONTENT = "rekindle conversation", 1, 2  # the version of those with text alone, and with more
MOST_TEXT = 32 << 20  # bytes of a file without its pictures
MOST_VALUES = 1 << 19  # of a file; a message without calls has three
MOST_BYTES = content.MOST_WRITTEN + MOST_TEXT  # of a file
Message = dict[str, Any]


Decode = Callable[[list[int]], str]

_WITH_TOOLS = ("run_tools", "max_rounds", "tool_choice")  # the rest of an answer calls nothing by force


class Answer(NamedTuple):
    """How the last answer of a conversation ended."""

    request: Handle[Completion] | None  # None once it no longer follows the messages
    request_tokens: int  # tokens of the request that are in the answer
    tokens: int  # of the whole answer, which several requests may have made
    reason: FinishReason
    edit: tuple[int, ...] = ()  # written after the request's tokens, in place of others
    before: Answer | None = None  # the answer as it was when the request went on with it
    edited: bool = False  # the rest is drawn anew

    @property
    def start(self) -> int:
        """The place in the answer of the request's first token."""
        return self.tokens - self.request_tokens - len(self.edit)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's tokens; empty if they are unknown."""
        if self.request is None:
            return ()
        before = () if self.before is None else self.before.token_ids
        return (*before, *self.request.token_ids[: self.request_tokens], *self.edit)

    def text(self, count: int, decode: Decode) -> str:
        """Return the text of its first tokens, as far as it was final after them."""
        parts = ["" if self.before is None else self.before.text(count, decode)]
        remaining = min(count - self.start, self.request_tokens)
        for delta in () if self.request is None else self.request.deltas:
            held = len(delta.token_ids)
            if remaining > 0:
                parts.append(delta.text if held <= remaining else decode(list(delta.token_ids[:remaining])))
            remaining -= held
        edit = self.edit[: max(0, count - self.start - self.request_tokens)]
        return "".join([*parts, decode(list(edit)) if edit else ""])

    @property
    def cut(self) -> bool:
        return self.reason.cut

    @property
    def full(self) -> bool:
        """True if the context ended it."""
        return self.reason is FinishReason.CONTEXT

    @property
    def open(self) -> bool:
        """True if the model had not ended the answer itself."""
        return self.cut or self.reason is FinishReason.ABORTED


class Chats(Protocol):
    """The part of a session that a conversation uses."""

    @property
    def model(self) -> str: ...
    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling | None = None, /, **options: Any
    ) -> Handle[Completion] | ToolLoop: ...
    def fork(
        self,
        source: Handle[Completion],
        *,
        at: int,
        edit: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Handle[Completion]: ...


def open_conversation(
    session: Any,
    front: Front,
    *,
    system: str | None,
    restore: str | os.PathLike[str] | None,
    sampling: Mapping[str, Any],
    **options: Any,
) -> Conversation:
    """Return a conversation that begins with a system message, with saved messages, or empty."""
    Sampling.of(None, sampling)  # a misspelled option is refused now, not at the first turn
    if not (system is None or isinstance(system, str)):
        raise InvalidRequest("system", system, "is not text", "Pass a str")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if restore is not None:
        if messages:
            raise InvalidRequest("system", system, "can't be given with restore", "The saved conversation has its own")
        messages = read(restore)
        try:
            messages = content.restored_messages(front, messages)
        except InvalidRequest as error:
            raise InvalidRequest(
                "restore", str(restore), f"has {error.field}, which {error.problem}", error.fix
            ) from None
    plain = {name: value for name, value in options.items() if name not in _WITH_TOOLS}
    session.chat([{"role": "user", "content": "…"}], **plain)  # a model without a template is refused now, too
    return Conversation(session, front, messages, {**options, **sampling})


def read(path: str | os.PathLike[str]) -> list[Message]:
    """Return the messages of a file that `Conversation.save` wrote."""
    fix = "Pass a file that chat.save(path) wrote"
    try:
        data = read_plain(Path(path).expanduser(), MOST_BYTES)
        record = parse_with_long_strings(data, most_values=MOST_VALUES, most_text=MOST_TEXT)
    except OSError as error:
        raise InvalidRequest("restore", str(path), f"can't be read ({error.strerror})", fix) from None
    except TooMuchJson as error:
        raise InvalidRequest("restore", str(path), str(error), fix) from None
    except (ValueError, RecursionError):
        raise InvalidRequest("restore", str(path), "is no JSON", fix) from None
    versions = VERSION, WITH_CONTENT
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") not in versions:
        raise InvalidRequest("restore", str(path), f"is not a {FORMAT}, version {VERSION} or {WITH_CONTENT}", fix)
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise InvalidRequest("restore", str(path), "holds something other than messages", fix)
    return messages


class Conversation(ForeignNames):
    """A chat with its messages. Make one with `session.conversation()`.

    A turn is a message of the user's and the answer to it. It belongs to the conversation once the answer is complete:
    a turn that fails or is cancelled leaves nothing. A stream that is left early keeps the text that came until then.
    One turn is answered at a time.
    """

    _foreign = CONVERSATION

    def __init__(
        self, session: Chats, front: Front, messages: Sequence[Mapping[str, object]], options: Mapping[str, object]
    ) -> None:
        self._session, self._front = session, front
        self._messages: list[Message] = [copy.deepcopy(dict(message)) for message in messages]
        self._options = dict(options)
        self._last: Answer | None = None  # None if the last message's origin is unknown
        self._turn: Turn | None = None  # the latest turn, until it joins the messages or is dropped

    @takes_options(Sampling, also=PromptOptions, returns="Turn", max_tokens=ANSWER_TOKENS)
    def say(
        self,
        text: str,
        sampling: Sampling | None = None,
        /,
        **options: Unpack[RequestOptions],
    ) -> Turn:
        """Await it for the model's answer to `text`. Both then belong to the conversation.

        `images` is a picture or a list of them: `<image>` in the text marks their places, or they come first.
        """
        own, others = content.split(options)
        return Turn(self, self._user_message(text, own), sampling, others)

    @takes_options(Sampling, also=PromptOptions, returns="Turn", max_tokens=ANSWER_TOKENS)
    def stream(
        self,
        text: str,
        sampling: Sampling | None = None,
        /,
        **options: Unpack[RequestOptions],
    ) -> Turn:
        """Iterate over it with `async for` for the deltas of the model's answer to `text`, and `images` as in `say`."""
        own, others = content.split(options)
        return Turn(self, self._user_message(text, own), sampling, others)

    @takes_options(Sampling, returns="Turn", max_tokens=ANSWER_TOKENS)
    def answer(
        self,
        results: Sequence[Mapping[str, object]],
        sampling: Sampling | None = None,
        /,
        **options: Unpack[SamplingOptions],
    ) -> Turn:
        """Await it for the model's answer to the results of its calls, each made by `call.answer(result)`.

        With `run_tools` that happens by itself.
        """
        refuse_missing(Conversation.answer, results=results)
        messages = [] if isinstance(results, str | Mapping) else [dict(result) for result in results]
        if not messages or any(result.get("role") != "tool" for result in messages):
            raise InvalidRequest("results", results, "are no results of calls", "Pass [call.answer(result), …]")
        return Turn(self, messages, sampling, options)

    @takes_options(Sampling, returns="Turn", max_tokens=ANSWER_TOKENS)
    def continue_answer(self, sampling: Sampling | None = None, /, **options: Unpack[SamplingOptions]) -> Turn:
        """Await it, or iterate over it, for the rest of an answer that was cut or stopped, at most `max_tokens` more.

        The result is the rest alone; in the messages it joins the answer. It is the text that the answer would have
        gone on with: the same tokens from the same seed. After a change of the messages, such as `forget`, and in a
        restored conversation the answer's text is read anew instead.
        """
        return Turn(self, (), sampling, options)

    @property
    def cut(self) -> bool:
        """True if the last answer was cut, by `max_tokens` or by the end of the context: `continue_answer` goes on.

        With overflow="refuse" it does so at the end of the context once `forget` has made room.
        """
        self._settle()
        return self._last is not None and self._last.cut

    @property
    def messages(self) -> list[Message]:
        """A copy of all messages, as `session.chat` takes them; a turn that is being answered is not among them."""
        self._settle()
        return copy.deepcopy(self._messages)

    @property
    def system(self) -> str:
        """The system prompt; empty if there is none. Another one holds from the next turn on."""
        first = self.messages[0] if self.messages else {}
        return str(first.get("content", "")) if first.get("role") == "system" else ""

    @system.setter
    def system(self, prompt: str) -> None:
        self._check_idle()
        if not isinstance(prompt, str):
            raise InvalidRequest("system", prompt, "is not text", "Pass a str, empty for none")
        others = self._messages[1:] if self.system else self._messages
        self._messages = [{"role": "system", "content": prompt}, *others] if prompt else others
        self._last = None if self._last is None else self._last._replace(request=None)

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The token ids of the last answer; empty if they are unknown, as in a restored conversation."""
        self._settle()
        return () if self._last is None else self._last.token_ids

    def edit_answer(self, at: int, edit: str = "") -> None:
        """Keep the tokens of the last answer before token `at`, followed by `edit`.

        `continue_answer()` goes on from there: without `edit`, with another draw. The pages of what stays are shared.
        """
        self._check_idle()
        last, message = self._last, self._messages[-1] if self._messages else {}
        if last is None or last.request is None or set(message) & {"tool_calls", "reasoning_content"}:
            problem = "has no text-only answer with known tokens"
            raise InvalidRequest("conversation", words.count(len(self._messages), "message"), problem, "Say something")
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= last.tokens:
            raise InvalidRequest(
                "at", at, f"is outside of the answer's {last.tokens} tokens", f"Use 0 to {last.tokens}"
            )
        while at < last.start and last.before is not None:
            last = last.before
        tokenizer = self._front.tokenizer
        said = last.text(at, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        kept = at - last.start
        added = tokenizer.encode(edit, add_special_tokens=False) if edit else []
        ids = (*last.edit[: max(0, kept - last.request_tokens)], *added)
        message["content"] = said + edit
        self._last = last._replace(
            request_tokens=min(kept, last.request_tokens), tokens=at + len(added), edit=ids, edited=True,
            reason=FinishReason.ABORTED,
        )  # fmt: skip

    def fork(self) -> Conversation:
        """Return another conversation that begins with the same messages. Their pages in the cache are shared."""
        copied = Conversation(self._session, self._front, self.messages, self._options)
        copied._last = self._last
        return copied

    def undo(self) -> None:
        """Take the last turn back: the user's last message and all messages after it."""
        users = self._users()
        if not users:
            raise InvalidRequest("conversation", 0, "has no turn to take back", "Say something first")
        del self._messages[users[-1] :]
        self._last = None

    def forget(self, turns: int = 1) -> int:
        """Remove the oldest turns of a conversation for good. Return how many were removed.

        System messages at the beginning stay.
        """
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise InvalidRequest("turns", turns, "is not a number of turns", "Use 1 or more")
        users = self._users()
        if not users:
            return 0
        end = users[turns] if turns < len(users) else len(self._messages)
        del self._messages[users[0] : end]
        self._last = None if self._last is None else self._last._replace(request=None)
        return min(turns, len(users))

    def pin_turn(self, turn: int = -1, *, pinned: bool = True) -> None:
        """Keep a turn in the prompt when the oldest ones leave it: the last one, or number `turn` from 0.

        `pinned=False` lets it go again. A message of it has `"pinned": True`, in saved conversations, too.
        """
        self._check_idle()
        turns = turns_of(self._messages)
        if isinstance(turn, bool) or not isinstance(turn, int) or not -len(turns) <= turn < len(turns):
            fix = f"Use 0 to {len(turns) - 1}, or -1 for the last one" if turns else "Say something first"
            raise InvalidRequest("turn", turn, f"is none of the {words.count(len(turns), 'turn')}", fix)
        for at in turns[turn]:
            self._messages[at].pop(PINNED, None)
        if pinned:
            self._messages[turns[turn].start][PINNED] = True
        if self._last is not None:
            self._last = self._last._replace(request=None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages to a JSON file, for `session.conversation(restore=path)`. Pictures are in it: the files
        that were passed, or PNGs of arrays and figures.

        Raise `StoreError` if it can't be written; a file that was there before is as it was.
        """
        messages, count = content.written_messages(self._front, self.messages)
        version = WITH_CONTENT if count else VERSION
        record = {"format": FORMAT, "version": version, "model": self._session.model, "messages": messages}
        text = json.dumps(record, ensure_ascii=False, indent=1).encode()
        place = Path(path).expanduser()
        try:
            private_files.write(place, [text], mode=0o666, durable=True)
        except OSError as error:
            missing = not place.parent.is_dir()
            reason = f"the folder {place.parent} does not exist" if missing else error.strerror or error
            fix = "Create it first, or choose another place" if missing else "Choose another place"
            raise StoreError(f"The conversation can't be written to {place}: {reason}. {fix}.") from error

    def _user_message(self, text: object, own: PromptOptions) -> list[Message]:
        if not isinstance(text, str) or not (text or own):
            raise InvalidRequest("text", text, "is not a message", "Pass a non-empty str, without a name")
        return [{"role": "user", "content": content.message_content(text, content.read(self._front, own))}]

    if not TYPE_CHECKING:

        def __call__(self, *text: object, **options: object) -> NoReturn:
            raise TypeError(f"a conversation is no function. {CONVERSATION['ask']}")

    def _users(self) -> list[int]:
        """Return the indices at which turns begin. Raise while a turn is being answered."""
        self._check_idle()
        return [index for index, message in enumerate(self._messages) if message.get("role") == "user"]

    def _settle(self) -> None:
        """Add the latest turn to the messages if it is over."""
        turn = self._turn
        if turn is not None and turn.over:
            self._turn = None
            before = self._last.tokens if turn._continues and self._last is not None else 0
            answer, last = turn._outcome(before)
            if answer:
                if turn._continues:
                    answer = [_joined(self._messages.pop(), answer[0])]
                    last = None if last is None else last._replace(before=self._last)
                self._messages += [*map(dict, turn.asked), *answer]
                self._last = last

    def _check_idle(self) -> None:
        self._settle()
        if self._turn is not None:
            raise InvalidRequest(
                "conversation", self._turn.said, "is being answered", "Await that turn first, or fork the conversation"
            )

    def _begin(
        self, turn: Turn, sampling: Sampling | None, options: Mapping[str, Any]
    ) -> Handle[Completion] | ToolLoop:
        self._check_idle()
        if turn._continues:
            handle = self._continued(sampling, options)
        else:
            messages = [*self._messages, *turn.asked]
            handle = self._session.chat(messages, sampling, **{**self._options, **options})
        self._turn = turn
        return handle

    def _continued(self, sampling: Sampling | None, options: Mapping[str, Any]) -> Handle[Completion] | ToolLoop:
        """Return the request for the rest of the last answer."""
        message, last = self._messages[-1] if self._messages else {}, self._last
        problem = "has no answer that could go on"
        if message.get("role") == "assistant" and not message.get("tool_calls"):
            problem = "" if last is None or last.open else f"has a complete answer, ended by {last.reason}"
        if problem:
            raise InvalidRequest("conversation", words.count(len(self._messages), "message"), problem, "Say something")
        if last is not None and (request := last.request) is not None and not (self._drops and self._is_full(last)):
            bound = {} if sampling is not None else {"max_tokens": self._options.get("max_tokens") or ANSWER_TOKENS}
            merged = {**bound, **{name: value for name, value in options.items() if value is not None}}
            if last.edited and sampling is None:
                merged = {"seed": None, **merged}  # the same seed would draw the same tokens again
            edit = list(last.edit) or None
            return self._session.fork(request, at=last.request_tokens, edit=edit, sampling=sampling, **merged)
        plain = {name: value for name, value in self._options.items() if name not in _WITH_TOOLS}
        return self._session.chat(self._messages, sampling, **{**plain, **options}, continue_final_message=True)

    def _is_full(self, last: Answer) -> bool:
        """True if the request of an answer has no room for more of it."""
        used = 0 if last.request is None else len(last.request.prompt_token_ids) + last.request_tokens + len(last.edit)
        return last.full or used >= (self._front.config.max_model_len or used + 1)

    @property
    def _drops(self) -> bool:
        """True if the prompt leaves out turns once the context is full."""
        return self._options.get("overflow", "refuse") != "refuse"

    def _state(self) -> str:
        """Describe the state of the last answer; empty if it is complete."""
        if not self.cut or self._last is None:
            return ""
        cut = f"cut at {words.count(self._last.tokens, 'token')}"
        if self._last.reason is FinishReason.LENGTH:
            return f"{cut}: await chat.continue_answer() goes on"
        has_older = sum(message.get("role") == "user" for message in self._messages) > 1
        room = ": chat.forget() drops the oldest turn, and then chat.continue_answer() goes on"
        room = ": await chat.continue_answer() goes on without the oldest turns" if self._drops else room
        return f"{cut}, the end of the context{room if has_older else ''}"

    def __repr__(self) -> str:
        state = self._state()
        return f"<Conversation: {words.count(len(self.messages), 'message')}{state and f', the last is {state}'}>"

    def _repr_html_(self) -> str:
        state = self._state()
        shown = message_table(self.messages)
        return str(html.block(shown, html.line(state)) if state else shown)


def _joined(message: Message, rest: Mapping[str, Any]) -> Message:
    """Return an answer joined with its rest."""
    answer = {**message, "content": (message.get("content") or "") + rest["content"]}
    if reasoning := (message.get("reasoning_content") or "") + rest.get("reasoning_content", ""):
        answer["reasoning_content"] = reasoning
    if rest.get("tool_calls"):
        answer["tool_calls"] = rest["tool_calls"]
    return answer


class _Deltas(Drawable, AsyncIterator[TextDelta]):
    """The deltas of a turn; their errors say how a conversation makes room."""

    def __init__(self, turn: Turn, deltas: Any) -> None:
        self._turn, self._deltas = turn, deltas

    def __repr__(self) -> str:
        return repr(self._deltas)

    async def __anext__(self) -> TextDelta:
        """Wait for the next delta and return it."""
        try:
            delta: TextDelta = await anext(self._deltas)
        except PromptTooLong as error:
            raise self._turn._with_room(error) from None
        return delta

    async def aclose(self) -> None:
        """Stop reading."""
        self._leave()

    def _leave(self) -> None:
        self._deltas._leave()


class Turn(Call[Completion]):
    """A message and the answer to it: await it for the completion, or iterate over its deltas."""

    _awaited = "await chat.say(…)"

    def __init__(
        self,
        conversation: Conversation,
        asked: Sequence[Mapping[str, object]],
        sampling: Sampling | None,
        options: Mapping[str, object],
    ) -> None:
        self.asked: tuple[Mapping[str, Any], ...] = tuple(asked)  # none if the last answer is continued
        self._conversation, self._sampling, self._options = conversation, sampling, options
        self._handle: Handle[Completion] | ToolLoop | None = None
        self._left = False  # it was cancelled, or the wait for it was
        self._reader: weakref.ref[object] | None = None  # the loop over the deltas that began last

    @property
    def said(self) -> str:
        """The message to the model: the user's text, or the results of calls."""
        return "\n".join(map(text_of, self.asked))

    @property
    def _continues(self) -> bool:
        """True if it continues an answer."""
        return not self.asked

    @property
    def over(self) -> bool:
        """True once no more of the answer will come: it has ended, or the loop over it was left."""
        if self._handle is None:
            return False
        return self._left or self._handle.done or (self._reader is not None and self._reader() is None)

    def _outcome(self, before: int) -> tuple[list[Message], Answer | None]:
        """Return the messages that the conversation keeps, empty for a dropped turn, and the answer's end.

        `before` is the number of the answer's tokens that earlier turns have made.
        """
        handle = self._handle
        request = handle.request if isinstance(handle, ToolLoop) else handle
        messages = list(handle.answered) if isinstance(handle, ToolLoop) else []
        if handle is None:
            return [], None
        if handle.done and handle.error is None:
            completion, tokens = handle.completion(), 0 if request is None else len(request.token_ids)
            return messages or [completion.message], Answer(request, tokens, before + tokens, completion.finish_reason)
        # Tokens that arrive during the cancellation belong to no message.
        deltas = () if request is None else request.deltas
        handle.cancel()
        if self._reader is None:
            return [], None
        text, tokens = "".join(delta.content for delta in deltas), sum(len(delta.token_ids) for delta in deltas)
        if not text:
            return messages, None
        answer = Answer(request, tokens, before + tokens, FinishReason.ABORTED)
        return [*messages, {"role": "assistant", "content": text}], answer

    def cancel(self) -> None:
        """End the answer here, from any thread."""
        if self._handle is not None:
            self._left = True
            self._handle.cancel()

    async def _result(self) -> Completion:
        handle = self._start()
        try:
            if isinstance(handle, ToolLoop):
                return (await handle).completion
            return await handle
        except PromptTooLong as error:
            self._left = True
            raise self._with_room(error) from None
        except BaseException:
            self._left = True
            raise

    def _with_room(self, error: PromptTooLong) -> PromptTooLong:
        """Return the error with the remedy of a conversation, unless it has no turn to drop."""
        drops, messages = self._conversation._drops, self._conversation._messages
        if drops or not any(message.get("role") == "user" for message in messages):
            return error
        again = "await chat.continue_answer() again" if self._continues else "say it again"
        fix = f"Drop the oldest turn by chat.forget(), and {again}: the conversation is as it was before"
        return PromptTooLong(error.field, error.value, error.problem, fix)

    def _start(self) -> Handle[Completion] | ToolLoop:
        if self._handle is None:
            self._handle = self._conversation._begin(self, self._sampling, self._options)
        return self._handle

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        deltas = _Deltas(self, aiter(self._start()))
        self._reader = weakref.ref(deltas)
        return deltas

    def stream_sync(self) -> SyncStream:
        """Return an iterator over the deltas that blocks this thread; for code without an event loop."""
        deltas = SyncStream(_Deltas(self, aiter(self._start())))
        self._reader = weakref.ref(deltas)
        return deltas

    def _repr_html_(self) -> str:
        return str(html.block(html.text(self.said), "" if self._handle is None else self._handle._repr_html_()))

    def __repr__(self) -> str:
        return f"<Turn {words.shorten(self.said)!r}: {'over' if self.over else 'await it'}>"
