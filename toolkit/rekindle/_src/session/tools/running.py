"""Runs the calls of a reply, all at once: async functions on the caller's loop, others in worker threads."""

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
