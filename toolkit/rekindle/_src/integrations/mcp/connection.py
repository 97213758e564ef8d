"""The client of one tool server, on an event loop in a thread of its own: tools are called from any thread and loop."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    REQUEST_TIMEOUT,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    InputRequiredResult,
    PaginatedRequestParams,
)
from pydantic import TypeAdapter, ValidationError

from rekindle._src.dispatch.threads import LoopWaker, OneShot, current_waker, fresh
from rekindle._src.integrations.mcp.limits import (
    MOST_LISTED,
    MOST_PAGES,
    MOST_SERVER_NAME,
    safe_name,
    said,
    text_of,
)
from rekindle._src.integrations.mcp.transports import TOO_LARGE, ServerTarget
from rekindle.errors import RekindleError, ToolServerError

_RESULT: TypeAdapter[Any] = TypeAdapter(CallToolResult | InputRequiredResult)
log = logging.getLogger("rekindle.tools")
AGAIN = "Connect again with rekindle.mcp_tools"
EXIT_SECONDS = 5.0


class ListedTool(NamedTuple):
    """A tool as its server describes it; nothing of it is checked."""

    name: str
    description: str
    parameters: Any


class Listing(NamedTuple):
    """A server's own name, and its tools."""

    name: str
    tools: tuple[ListedTool, ...]


class _ToolRequest:
    """One call of a tool."""

    def __init__(self, tool: str, arguments: Mapping[str, Any]) -> None:
        self.tool, self.arguments = tool, arguments
        self.reply: OneShot[str] = OneShot()
        self.left = False  # nobody waits for it
        self.scope: anyio.CancelScope | None = None

    def leave(self) -> None:
        """End the call. Called on the connection's loop."""
        self.left = True
        if self.scope is not None:
            self.scope.cancel()


class ServerConnection:
    """An open connection. `listed` has what the server offers, or the error that kept it from connecting."""

    def __init__(self, target: ServerTarget, name: str | None, timeout: float, mode: str) -> None:
        self._target, self._given, self._timeout, self._mode = target, name, timeout, mode
        self.name: str = name or target.shown  # for errors, until the server has said its own
        self.listed: OneShot[Listing] = OneShot()
        self.ended: OneShot[None] = OneShot()
        self._lock = threading.Lock()
        self._closed: ToolServerError | None = None  # why there are no more calls
        self._jobs: deque[_ToolRequest] = deque()  # that have not begun
        self._live: set[_ToolRequest] = set()  # those, and others that have no answer yet
        self._waker: LoopWaker | None = None
        self._changed: anyio.Event | None = None
        self._scope: anyio.CancelScope | None = None
        self._thread = threading.Thread(target=self._run, name="rekindle mcp", daemon=True)
        self._thread.start()
        _open.add(self)
        if not _registered:
            _registered.append(True)
            atexit.register(_close_all)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text. Raise `ToolServerError`."""
        job = _ToolRequest(tool, arguments)
        with self._lock:
            if self._closed is not None:
                raise fresh(self._closed)
            self._jobs.append(job)
            self._live.add(job)
        self._post(self._look)
        try:
            return await job.reply.get()
        finally:
            with self._lock:
                self._live.discard(job)
            if not job.reply.filled:
                self._post(job.leave)

    def close(self) -> None:
        """End the connection, from any thread. Returns at once; `ended` is filled when its thread is done."""
        with self._lock:
            if self._closed is None:
                self._closed = self._error(None, "was disconnected", AGAIN)
        self._post(self._leave)

    def join(self, seconds: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _post(self, callback: Callable[[], object]) -> None:
        waker = self._waker
        if waker is not None:
            waker.post(callback)

    def _look(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _leave(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    # The thread.

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            anyio.run(self._main)
        except BaseException as error:
            failure = error
        with self._lock:
            if self._closed is None:
                self._closed = self._failure(None, failure or ConnectionError())
            closed, jobs = self._closed, [*self._live]
        self.listed.fail(closed)
        for job in jobs:
            job.reply.fail(closed)
        self.ended.put(None)

    async def _main(self) -> None:
        with anyio.CancelScope(deadline=anyio.current_time() + self._timeout) as self._scope:
            with self._lock:
                self._waker = current_waker()
                if self._closed is not None:  # before it began
                    return
            client = Client(
                self._target.opened(self._timeout),
                read_timeout_seconds=self._timeout,
                client_info=Implementation(name="rekindle", version="1"),
                mode=self._mode,
                cache=None,
            )
            async with client:
                listing = await self._list(client)
                self._scope.deadline = math.inf
                self.name = listing.name
                self.listed.put(listing)
                async with anyio.create_task_group() as tasks:
                    while True:
                        self._changed = anyio.Event()
                        while self._jobs:
                            tasks.start_soon(self._serve, client, self._jobs.popleft())
                        await self._changed.wait()
        if self._closed is None:
            raise TimeoutError

    async def _list(self, client: Client) -> Listing:
        info = client.server_info
        name = self._given or safe_name("" if info is None else info.name)[:MOST_SERVER_NAME].strip("_") or "mcp"
        tools = list[ListedTool]()
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            tools += (ListedTool(one.name, one.description or one.title or "", one.input_schema) for one in page.tools)
            cursor = page.next_cursor
            if cursor is None or len(tools) > MOST_LISTED:
                break
        if cursor is not None or len(tools) > MOST_LISTED:
            problem = f"lists more than {MOST_LISTED:,} tools, or more than {MOST_PAGES} pages of them"
            raise self._error(None, problem, "Use another server")
        return Listing(name, tuple(tools))

    async def _serve(self, client: Client, job: _ToolRequest) -> None:
        try:
            with anyio.CancelScope() as job.scope:
                if job.left:
                    return
                # `client.call_tool` would validate the result against a schema of the server's, with its patterns.
                result = await client.session.send_request(
                    CallToolRequest(params=CallToolRequestParams(name=job.tool, arguments=dict(job.arguments))),
                    _RESULT,
                    request_read_timeout_seconds=self._timeout,
                )
                job.reply.put(self._text(job.tool, result))
        except Exception as error:
            job.reply.fail(self._failure(job.tool, error))
        finally:
            if not job.reply.filled:  # the connection ends
                job.reply.fail(self._closed or self._failure(job.tool, ConnectionError()))

    def _text(self, tool: str, result: Any) -> str:
        if isinstance(result, InputRequiredResult):
            raise self._error(tool, "asks its user a question, and tools of a chat can't", "Use another tool")
        text = text_of(result.content, result.structured_content)
        if result.is_error:
            raise self._error(tool, f"failed: {text}" if text else "failed without a word", "Check its arguments")
        return text

    def _error(self, tool: str | None, problem: str, fix: str) -> ToolServerError:
        return ToolServerError(self.name, tool, problem, fix)

    def _failure(self, tool: str | None, error: BaseException) -> ToolServerError:
        """Return the one error for an error of the protocol's library, or a group of them."""
        error = _innermost(error)
        if isinstance(error, ToolServerError):
            return error
        failed = self._described(tool, error)
        failed.__cause__ = error if isinstance(error, RekindleError) else None
        log.debug("a tool server failed", exc_info=error)
        return failed

    def _described(self, tool: str | None, error: BaseException) -> ToolServerError:
        match error:
            case MCPError() if error.code == REQUEST_TIMEOUT:
                return self._late(tool)
            case TimeoutError():
                return self._late(tool)
            case MCPError() if error.code == TOO_LARGE:
                return self._error(tool, said(error), "Ask for less, or use another tool")
            case MCPError() if error.code != CONNECTION_CLOSED:
                return self._error(tool, f"answered with an error: {said(error)}", "Check its arguments")
            case FileNotFoundError() | PermissionError() | NotADirectoryError():
                return self._error(tool, f"can't be started: {said(error)}", "Check the command")
            case ValidationError():
                return self._error(tool, "sent an answer that is none of the protocol", "Use another server")
        words = self._target.words()  # of a program
        if not words and said(error) not in ("", "Connection closed"):
            words = f"failed: {said(error)}"
        return self._error(tool, f"is gone: it {words or 'has closed the connection'}", AGAIN)

    def _late(self, tool: str | None) -> ToolServerError:
        problem = f"did not answer within {self._timeout:g} s"
        return self._error(tool, problem, "Pass a larger timeout, in seconds, or check the server")


def _innermost(error: BaseException) -> BaseException:
    """Return the first error of a group that is no consequence of another."""
    while isinstance(error, BaseExceptionGroup):
        streams = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)
        error = next((one for one in error.exceptions if not isinstance(one, streams)), error.exceptions[0])
    return error


_open: weakref.WeakSet[ServerConnection] = weakref.WeakSet()
_registered: list[bool] = []
_pid = os.getpid()


def _close_all() -> None:
    """End every connection at interpreter exit, with the programs that were started."""
    if os.getpid() != _pid:
        return
    connections: Sequence[ServerConnection] = tuple(_open)
    for connection in connections:
        connection.close()
    for connection in connections:
        connection.join(EXIT_SECONDS)
