"""Runs the calls of a reply: async functions where they are awaited, others in worker threads, all of them at once."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from rekindle._src.core.reply import ToolCall
from rekindle._src.dispatch.wakeups import blocks
from rekindle._src.session.tools.tool import Tool

log = logging.getLogger("rekindle.tools")


async def run_calls(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """The messages that answer the calls, in their order. An error of a function is the answer, in words."""
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
            found = await function()
        else:
            # Who stops waiting does not wait for the thread.
            found = await anyio.to_thread.run_sync(function, abandon_on_cancel=True)
        return call.answer(await found if inspect.isawaitable(found) else found)
    except Exception as error:
        return _failed(call, error)


def _run_blocking(call: ToolCall, tools: Mapping[str, Tool]) -> dict[str, Any]:
    """The same in this thread, for code without an event loop. What is async runs on a loop of its own."""
    try:
        function = _bound(call, tools)
        found = None if _is_async(function.func) else function()
        if _is_async(function.func) or inspect.isawaitable(found):
            found = _on_own_loop(function if found is None else lambda: found)
        return call.answer(found)
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
    """The result of an async function on a new loop, in a thread of its own: this one may have a loop that runs."""
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
    found, error = outcome[0]
    if error is not None:
        raise error
    return found


def _failed(call: ToolCall, error: Exception) -> dict[str, Any]:
    log.warning("tool %s failed, and the model was told: %s: %s", call.name, type(error).__name__, error)
    return call.answer(f"Error: {type(error).__name__}: {error}")
