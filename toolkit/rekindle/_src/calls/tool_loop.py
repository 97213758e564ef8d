"""A chat that runs the tools its model calls, until the model answers."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from rekindle._src.calls.call import Call
from rekindle._src.calls.content import MOST_DRAWN, drawn, part_as_text
from rekindle._src.calls.handle import Handle, SyncStream
from rekindle._src.calls.tool_functions import Tool
from rekindle._src.core import words
from rekindle._src.core.drawable import Drawable
from rekindle._src.core.left_out import LeftOut
from rekindle._src.core.records import Completion, TextDelta, Usage
from rekindle._src.core.reply import ToolCall
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.threads import blocks, fresh
from rekindle._src.text.replies import ReplyPlan
from rekindle._src.text.replies.call_grammar import call_grammar
from rekindle._src.text.tokenizer import Tokenizer
from rekindle._src.views import html, replies
from rekindle.errors import InvalidRequest, RequestAborted

log = logging.getLogger("rekindle.tools")

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ToolRun:
    """The result of `await session.chat(..., run_tools=True)`: the last reply, and the messages that led to it."""

    completion: Completion  # the last reply; it calls tools itself if the bound on rounds was reached
    messages: tuple[Mapping[str, Any], ...]  # the chat's messages, then calls, results and the answer
    rounds: tuple[Completion, ...]  # every reply, the last one included

    @property
    def text(self) -> str:
        """Everything that the model wrote in its last reply."""
        return self.completion.text

    @property
    def content(self) -> str:
        """The answer of the last reply, without its reasoning and its calls."""
        return self.completion.content

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer."""
        return self.completion.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls that were not run because the bound on rounds was reached."""
        return self.completion.tool_calls

    @property
    def left_out(self) -> LeftOut | None:
        """The turns that the prompt of the last reply leaves out for want of room; None if it has the whole chat."""
        return self.completion.left_out

    @property
    def usage(self) -> Usage:
        """Tokens of all replies together."""
        figures = [reply.usage for reply in self.rounds]
        return Usage(
            sum(usage.prompt_tokens for usage in figures),
            sum(usage.cached_tokens for usage in figures),
            sum(usage.completion_tokens for usage in figures),
            sum(usage.reasoning_tokens for usage in figures),
        )

    def __str__(self) -> str:
        return self.content

    def __repr__(self) -> str:
        calls = sum(len(reply.tool_calls) for reply in self.rounds[:-1])
        rounds = words.count(len(self.rounds), "round")
        return f"<ToolRun: {words.shorten(self.content)!r}, {rounds}, {words.count(calls, 'call')} run>"

    def _repr_html_(self) -> str:
        return str(html.block(html.line(repr(self)), message_table(self.messages)))


def message_table(messages: Sequence[Mapping[str, Any]]) -> html.Markup:
    """Return messages as a table: reasoning folded, calls as cards with their results, thumbnails of first contents."""
    rows, most, shown = list[tuple[object, ...]](), MOST_DRAWN, set[str]()
    for at, message in enumerate(messages):
        if message.get("role") == "tool" and message.get("tool_call_id") in shown:
            continue  # it is in the card of its call
        attached, count = drawn(message.get("content"), most)
        text = html.escape(text_of(message))
        if reasoning := message.get("reasoning_content"):
            text = f"{html.details(replies.summary(str(reasoning)), html.text(str(reasoning)))}{text}"
        results, calls = replies.results_of(messages, at), replies.calls_of(message)
        shown = {call.id for call in calls} & results.keys() if calls else shown
        cards = [replies.card(call.name, call.arguments, results.get(call.id)) for call in calls]
        rows.append((message.get("role"), html.Markup(f"{text}{''.join(cards)}{attached}")))
        most -= count
    return html.table(["role", "content"], rows)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the content of a message as one text."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(map(_described_part, content))
    return (content if isinstance(content, str) else str(content)) if content else ""


def _described_part(part: Any) -> str:
    return part_as_text(part) if isinstance(part, Mapping) else str(part)


class ToolLoop(Call[ToolRun]):
    """A chat that runs its tools: await it for the answer, or iterate over the deltas of all its replies.

    The model gets the errors of functions as their results. Cancelling it leaves functions in worker threads to end by
    themselves.
    """

    _awaited = "await session.chat(…)"

    def __init__(
        self,
        ask: Callable[..., Handle[Completion]],
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Tool],
        max_rounds: int,
    ) -> None:
        if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1:
            raise InvalidRequest("max_rounds", max_rounds, "is not a number of rounds", "Use 1 or more")
        schema_only = [tool.name for tool in tools if tool.function is None]
        if schema_only or not tools:
            raise InvalidRequest(
                "run_tools", True, f"needs functions, and has none for {schema_only}" if schema_only else "needs tools",
                "Pass tools=[function, …], or run the calls of reply.tool_calls yourself",
            )  # fmt: skip
        self._ask = ask
        self._tools: dict[str, Tool] = {tool.name: tool for tool in tools}
        self._messages: list[Message] = [copy.deepcopy(dict(message)) for message in messages]
        self._initial = len(self._messages)
        self._max_rounds = max_rounds
        self._rounds: list[Completion] = []
        self._run: ToolRun | None = None
        self._handle: Handle[Completion] | None = None
        self._error: BaseException | None = None
        self._ran = False  # the reply of `_handle` is among the messages
        self._current()  # wrong messages are refused now

    @property
    def done(self) -> bool:
        """True once the answer is there, or an error in its place."""
        return self._run is not None or self.error is not None

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, or None."""
        return self._error or (None if self._handle is None else self._handle.error)

    @property
    def request(self) -> Handle[Completion] | None:
        """The request of the current reply, or of the answer; None while tools run."""
        return None if self._ran and self._run is None else self._handle

    @property
    def content(self) -> str:
        """The content so far of the current or latest reply."""
        return "" if self._handle is None or self._ran else self._handle.content

    @property
    def answered(self) -> tuple[Message, ...]:
        """The messages so far that the chat has added: complete replies with the results of their calls."""
        added = self._messages[self._initial :]
        if self._run is None and added and added[-1].get("tool_calls"):
            added = added[:-1]  # its calls are being run
        return tuple(copy.deepcopy(added))

    def completion(self) -> Completion:
        """Return the last reply. Raise the chat's error, or InvalidRequest before there is an answer."""
        if self.error is not None:
            raise fresh(self.error)
        if self._run is None:
            raise InvalidRequest("run_tools", True, "has no answer yet", "Await it")
        return self._run.completion

    def cancel(self) -> None:
        """End the current reply, from any thread."""
        if self._handle is not None:
            self._handle.cancel()

    async def _result(self) -> ToolRun:
        while self._run is None:
            await self._add_reply(await self._current())
        return self._run

    def _current(self) -> Handle[Completion]:
        """Return the request of the current reply, or make the next one."""
        if self._error is not None:
            raise fresh(self._error)
        if self._handle is None:
            self._handle = self._ask(self._messages, free=bool(self._rounds))  # a call is forced once
            self._ran = False
        return self._handle

    async def _add_reply(self, reply: Completion) -> None:
        """Add a reply, and the results of its calls."""
        try:
            self._rounds.append(reply)
            self._messages.append(reply.message)
            self._ran = True
            if not reply.tool_calls or len(self._rounds) > self._max_rounds:
                self._run = ToolRun(reply, tuple(self._messages), tuple(self._rounds))
                return
            self._messages += await run_calls(reply.tool_calls, self._tools)
            self._handle = None
        except BaseException:
            self._error = RequestAborted("the tools of this chat were cancelled. What was said is in its rounds")
            raise

    def __aiter__(self) -> ToolStream:
        return ToolStream(self)

    def stream_sync(self) -> SyncStream:
        """Return an iterator over the deltas that blocks this thread; for code without an event loop."""
        return SyncStream(aiter(self))

    def __repr__(self) -> str:
        state = "over" if self.done else "await it"
        return f"<ToolLoop over {', '.join(self._tools)}: {words.count(len(self._rounds), 'round')}, {state}>"

    def _repr_html_(self) -> str:
        return str(html.line(repr(self))) if self._run is None else self._run._repr_html_()


class ToolStream(Drawable, AsyncIterator[TextDelta]):
    """An iterator over the deltas of all replies of a `ToolLoop`; tools run between two replies."""

    def __init__(self, loop: ToolLoop) -> None:
        self._loop = loop
        self._deltas: AsyncIterator[TextDelta] | None = None

    async def __anext__(self) -> TextDelta:
        """Wait for the next delta and return it."""
        loop = self._loop
        while True:
            if self._deltas is None:
                if loop._run is not None:
                    raise StopAsyncIteration
                self._deltas = aiter(loop._current())
            try:
                return await anext(self._deltas)
            except StopAsyncIteration:
                self._deltas = None
                await loop._add_reply(loop._current().completion())

    async def aclose(self) -> None:
        """Stop reading. The current reply is aborted."""
        self._leave()

    def _leave(self) -> None:
        if not self._loop.done:
            self._loop.cancel()

    def __repr__(self) -> str:
        return f"<ToolStream of {self._loop!r}>"


ToolChoice = str | Mapping[str, Any] | Callable[..., Any]


class ResolvedToolChoice(NamedTuple):
    """The meaning of a `tool_choice` for a chat's tools."""

    value: ToolChoice | None
    shown: tuple[Tool, ...]  # to the model
    required: tuple[Tool, ...] = ()  # one of these has to be called
    parallel: bool = False  # more than one may be called


def resolve_choice(choice: ToolChoice | None, tools: Sequence[Tool], *, parallel: bool = True) -> ResolvedToolChoice:
    """Return the choice among tools; several may be called if `parallel`. Raise `InvalidRequest` for no tool."""
    tools = tuple(tools)
    if choice is None or choice == "auto":
        return ResolvedToolChoice(choice, tools)
    if choice == "none":
        return ResolvedToolChoice(choice, ())
    if not tools:
        raise InvalidRequest("tool_choice", choice, "needs tools", "Pass tools=[…]")
    if choice == "required":
        return ResolvedToolChoice(choice, tools, tools, parallel=parallel)
    matches = tuple(tool for tool in tools if _names(choice, tool))
    if not matches:
        known = ", ".join(tool.name for tool in tools)
        raise InvalidRequest(
            "tool_choice", choice, "names no tool", f"Use 'auto', 'none', 'required', or one of: {known}"
        )
    return ResolvedToolChoice(choice, tools, matches)


def _names(choice: ToolChoice, tool: Tool) -> bool:
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = (function if isinstance(function, Mapping) else choice).get("name", "")
    return choice == tool.name or (tool.function is not None and choice == tool.function)


def forcing(choice: ResolvedToolChoice, sampling: Sampling, plan: ReplyPlan, tokenizer: object) -> Sampling:
    """Return the options of a request that has to reply with a call, enforced by a grammar of the family's syntax.

    Reasoning that the prompt has opened comes first, to its end; the model may also begin with it by itself.
    """
    if sampling.structured:
        raise InvalidRequest(
            "tool_choice", choice.value, "can't be combined with a schema or grammar of the text", "Leave one out"
        )
    if plan.format.calls is None or not isinstance(tokenizer, Tokenizer):
        raise InvalidRequest(
            "tool_choice", choice.value, "needs a model with a tokenizer and a chat template", "Use 'auto'"
        )
    if plan.format.template is not None and plan.format.is_guess:
        raise InvalidRequest(
            "tool_choice", choice.value, "can't be enforced in the syntax of this model's response_template",
            "Use 'auto', or open the model with reply_format=…",
        )  # fmt: skip
    schemas = [tool.schema for tool in choice.required]
    grammar = call_grammar(plan.format.calls, schemas, tokenizer.added_id, several=choice.parallel)
    return dataclasses.replace(sampling, grammar=grammar)


async def run_calls(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """Run the calls. Return the messages that answer them, in order. A function's error becomes its answer's text."""
    if blocks():
        return [_run_blocking(call, tools) for call in calls]
    answers: list[dict[str, Any]] = [{}] * len(calls)

    async def run(index: int) -> None:
        answers[index] = await _run(calls[index], tools)

    try:
        async with anyio.create_task_group() as tasks:
            for index in range(len(calls)):
                tasks.start_soon(run, index)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # SystemExit and the like; all other errors are answers
    return answers


async def _run(call: ToolCall, tools: Mapping[str, Tool]) -> dict[str, Any]:
    try:
        function = _bound(call, tools)
        if _is_async(function.func):
            result = await function()
        else:
            # A cancelled wait does not wait for the thread.
            result = await anyio.to_thread.run_sync(function, abandon_on_cancel=True)
        return call.answer(await result if inspect.isawaitable(result) else result)
    except Exception as error:
        return _failed(call, error)


def _run_blocking(call: ToolCall, tools: Mapping[str, Tool]) -> dict[str, Any]:
    """Run a call in this thread, for code without an event loop. Async functions run on a loop of their own."""
    try:
        function = _bound(call, tools)
        result = None if _is_async(function.func) else function()
        if _is_async(function.func) or inspect.isawaitable(result):
            result = _on_own_loop(function if result is None else lambda: result)
        return call.answer(result)
    except Exception as error:
        return _failed(call, error)


def _bound(call: ToolCall, tools: Mapping[str, Tool]) -> partial[Any]:
    tool = tools.get(call.name)
    if tool is None or tool.function is None:
        raise LookupError(f"there is no tool {call.name!r}. The tools are: {', '.join(tools)}")
    return partial(tool.function, **tool.arguments(call.arguments))


def _is_async(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _on_own_loop(function: Callable[[], Any]) -> Any:
    """Run an async function on a new loop, in a thread of its own: this thread may have a running loop."""
    outcome: list[Any] = []

    async def awaited() -> Any:
        return await function()

    def run() -> None:
        try:
            outcome.append((anyio.run(awaited), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="rekindle tool", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)  # in slices, so that an interrupt is seen everywhere
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _failed(call: ToolCall, error: Exception) -> dict[str, Any]:
    log.warning("tool %s failed, and the model was told: %s: %s", call.name, type(error).__name__, error)
    return call.answer(f"Error: {type(error).__name__}: {error}")
