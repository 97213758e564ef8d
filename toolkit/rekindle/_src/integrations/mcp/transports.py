"""The ways to a tool server, a program, a URL or an object of this process, and the bounds on its messages.

The protocol's own transports read a program's line, or the body of a response, whatever its length. Here a line and a
body are bounded in bytes, and a message in values, before the library makes typed results of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from rekindle._src.core.json_values import count_values
from rekindle._src.core.names import printable
from rekindle._src.integrations.mcp.limits import (
    LAST_WORDS,
    MOST_ASKED,
    MOST_MARKS,
    MOST_MESSAGE,
    TOO_MANY_VALUES,
    id_of,
    problem_of,
    said,
    unparsed_problem,
)
from rekindle.errors import InvalidRequest, MissingExtra

try:
    import httpx2
    from mcp.client import Transport
    from mcp.client.stdio import get_default_environment
    from mcp.client.streamable_http import streamable_http_client
    from mcp.server import MCPServer, Server
    from mcp.shared.message import SessionMessage
    from mcp.types import ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
    from mcp.types.jsonrpc import jsonrpc_message_adapter
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

ServerLike = str | Sequence[str] | Mapping[str, Any] | MCPServer | Server[Any] | Transport
log = logging.getLogger("rekindle.tools")
GRACE = 2.0  # seconds in which a program may end by itself, and then after SIGTERM
FIX = 'Pass a URL, ["program", "argument", …], {"command": …, "args": …}, or an MCPServer'
_OF_PROGRAM, _OF_URL = {"command", "args", "env", "cwd"}, {"url", "headers"}
BURST, RATE = 1_024, 500.0  # messages besides answers that are read at once, and then a second
LINES_OF_EVENT = 4
RECONNECTION_SECONDS = 0.25  # between two of a connection's streams of events that were cut
TOO_LARGE = 4_130  # the code of an answer that is not passed on
Messages = Any  # a stream of the protocol's library


class MessagePace:
    """Slows down a server that sends more than calls need: reading it would take the time of other work."""

    def __init__(self) -> None:
        self._left, self._since = float(BURST), 0.0

    async def wait(self, messages: float = 1.0) -> None:
        """Count messages, and wait if there are more than may be read now."""
        now = anyio.current_time()
        self._left = min(BURST, self._left + RATE * (now - self._since)) - messages
        self._since = now
        if self._left < 0.0:
            await anyio.sleep(-self._left / RATE)


class ServerTarget(NamedTuple):
    """A server to connect to."""

    shown: str  # as its user is shown it: no secrets, no unprintable characters
    opened: Callable[[float], Any]  # makes what the protocol's client takes, for a timeout in seconds
    words: Callable[[], str] = str  # how a program or connection ended, in words, once it did
    identity: bytes = b""  # a digest of everything that names it, secrets as well


def target_of(server: object) -> ServerTarget:
    """Return the server that an argument names. Raise `InvalidRequest` for anything else."""
    match server:
        case str():
            return _url(server, {})
        case Mapping():
            return _configured(server)
        case MCPServer() | Server():
            return ServerTarget(f"{printable(str(server.name))}, in this process", lambda _: server)
        case list() | tuple() if server:
            return _program(server, None, None)
        case AbstractAsyncContextManager():
            return ServerTarget(printable(repr(server)), lambda _: _checked(server))
    raise InvalidRequest("server", server, "is no tool server", FIX)


def _configured(server: Mapping[str, Any]) -> ServerTarget:
    """Return the target of an entry such as `{"command": "uvx", "args": ["mcp-server-time"]}`."""
    known = _OF_URL if "url" in server else _OF_PROGRAM
    if unknown := [key for key in server if key not in known and key != "type"]:
        raise InvalidRequest("server", unknown[0], "is no entry of a tool server", f"Use {', '.join(sorted(known))}")
    if "url" in server:
        return _url(server["url"], _texts("headers", server.get("headers") or {}))
    args = server.get("args") or []
    if not isinstance(args, list | tuple):
        raise InvalidRequest("server.args", args, "must be a list of texts", 'Pass "args": ["argument", …]')
    return _program([server.get("command"), *args], server.get("env"), server.get("cwd"))


def _texts(field: str, values: object) -> dict[str, str]:
    if not isinstance(values, Mapping) or not all(isinstance(one, str) for pair in values.items() for one in pair):
        raise InvalidRequest(f"server.{field}", "…", "must map texts to texts", f'Pass "{field}": {{"NAME": "value"}}')
    return dict(values)


def _url(url: object, headers: Mapping[str, str]) -> ServerTarget:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        port = parts.port
    except ValueError:
        raise InvalidRequest("server", "…", "is no URL", FIX) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest("server", "…", "is no http:// or https:// URL", FIX)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    place = host if port is None else f"{host}:{port}"
    shown = urlunsplit((parts.scheme, place, parts.path, "", ""))  # users, passwords and keys are left out
    identity = _digest(url, headers)
    return ServerTarget(printable(shown), lambda timeout: _over_http(str(url), headers, timeout), identity=identity)


def _program(command: Sequence[Any], env: object, cwd: object) -> ServerTarget:
    if not all(isinstance(one, str) and one and "\0" not in one for one in command):
        raise InvalidRequest("server", "…", "is no command", 'Pass ["program", "argument", …]')
    if cwd is not None and not isinstance(cwd, str | os.PathLike):
        raise InvalidRequest("server.cwd", cwd, "is no folder", "Pass a path")
    environment, folder = _texts("env", env or {}), None if cwd is None else os.fspath(cwd)
    program, identity = Program(command, environment, folder), _digest(list(command), environment, folder)
    return ServerTarget(
        printable(" ".join(_masked(command))), lambda _: _checked(program.opened()), program.words, identity
    )


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def _masked(command: Sequence[str]) -> list[str]:
    """Return a command without the values of options such as --api-key, and of variables such as TOKEN=…."""
    shown, hides = list[str](), False
    for one in command:
        name, is_pair, _ = one.partition("=")
        secret = any(word in name.lower() for word in _SECRETS)
        if hides and not one.startswith("-"):
            shown.append("…")
        else:
            shown.append(f"{name}=…" if secret and is_pair else one)
        hides = secret and not is_pair and one.startswith("-")
    return shown


_SECRETS = ("key", "token", "secret", "password", "passwd", "credential", "authorization")


class Program:
    """A program that speaks the protocol on its standard input and output."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        self._command, self._env, self._cwd = list(command), env, cwd
        self._problem = ""
        self._last = bytearray()  # of its standard error

    def words(self) -> str:
        """Say how it ended, and its last words."""
        last = said(self._last.decode(errors="replace"))
        return self._problem or (f"ended, and wrote: {last}" if last else "")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Messages, Messages]]:
        """Start the program; end it at the end of the block, with its own children."""
        env = {**get_default_environment(), **self._env}
        path = shutil.which(self._command[0], path=env.get("PATH"))  # a program of Windows may end in .cmd
        command = [path or self._command[0], *self._command[1:]]
        process = await anyio.open_process(command, env=env, cwd=self._cwd, start_new_session=os.name == "posix")
        silent = anyio.Event()
        to_client, received = anyio.create_memory_object_stream[Any](0)
        sent, to_program = anyio.create_memory_object_stream[Any](0)
        async with anyio.create_task_group() as tasks, to_client, received, sent, to_program:
            tasks.start_soon(self._hear, process, silent)
            tasks.start_soon(self._read, process, to_client, silent)
            tasks.start_soon(self._write, process, to_program, to_client)
            try:
                yield received, sent
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process)
                tasks.cancel_scope.cancel()

    async def _read(self, process: anyio.abc.Process, to_client: Messages, silent: anyio.Event) -> None:
        assert process.stdout is not None, "it is a pipe"
        lines, pace = BufferedByteReceiveStream(process.stdout), MessagePace()
        async with to_client:
            with contextlib.suppress(*_ENDS):
                while True:
                    try:
                        line = await lines.receive_until(b"\n", MOST_MESSAGE)
                    except anyio.DelimiterNotFound:
                        self._problem = f"sent a line of more than {MOST_MESSAGE / 2**20:.0f} MiB"
                        break
                    if (problem := unparsed_problem(line)) is not None:
                        if (number := id_of(line)) is not None:
                            await to_client.send(_refusal(number, problem))
                        await pace.wait()
                        continue
                    try:
                        message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    except ValueError:
                        log.debug("a tool server wrote a line that is no message: %s", said(line[:MOST_MESSAGE]))
                        await pace.wait()
                        continue
                    await to_client.send(message)
            with anyio.move_on_after(GRACE):  # the reason may still be on its way
                await silent.wait()

    async def _write(self, process: anyio.abc.Process, to_program: Messages, to_client: Messages) -> None:
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(*_ENDS):
            async for message in to_program:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.stdin.send(f"{text}\n".encode())
            return
        await to_client.aclose()  # a request waits for no answer that can't come

    async def _hear(self, process: anyio.abc.Process, silent: anyio.Event) -> None:
        assert process.stderr is not None, "it is a pipe"
        with contextlib.suppress(*_ENDS):
            while True:
                self._last += await process.stderr.receive()
                del self._last[:-LAST_WORDS]
        silent.set()


_ENDS = (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)


async def _end(process: anyio.abc.Process) -> None:
    """End a program: close its input, wait, ask it, wait, and kill it with all that it has started."""
    assert process.stdin is not None, "it is a pipe"
    with contextlib.suppress(*_ENDS):
        await process.stdin.aclose()
    for name in ("", "SIGTERM", "SIGKILL"):
        if name:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.name == "posix":
                    os.killpg(process.pid, getattr(signal, name))
                else:
                    process.kill()
        with anyio.move_on_after(GRACE):
            while process.returncode is None:  # noqa: ASYNC110 (`wait` waits for the pipes of its children, too)
                await anyio.sleep(0.01)
            break
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # programs that it has started, and left
    for pipe in filter(None, (process.stdout, process.stderr)):
        with contextlib.suppress(*_ENDS):
            await pipe.aclose()
    transport = getattr(getattr(process, "_process", None), "_transport", None)  # asyncio's, which has no other end
    if transport is not None:
        with contextlib.suppress(PermissionError):
            transport.close()


@asynccontextmanager
async def _over_http(url: str, headers: Mapping[str, str], timeout: float) -> AsyncIterator[tuple[Messages, Messages]]:
    """Connect to a URL. Redirects stay on its host."""
    async with httpx2.AsyncClient(
        headers={**headers, "accept-encoding": "identity"},  # what is packed has no bound
        timeout=httpx2.Timeout(timeout, read=max(timeout, 300.0)),  # an answer may take its time
        event_hooks={"request": [Reconnections().wait], "response": [_bound_body]},
    ) as client:
        opened = streamable_http_client(url, http_client=client, max_sse_event_size=MOST_MESSAGE)
        async with _checked(opened) as streams:
            yield streams


class Reconnections:
    """Keeps a server that closes each stream of events at once from having the library connect without a pause."""

    def __init__(self) -> None:
        self._next = 0.0

    async def wait(self, request: httpx2.Request) -> None:
        if "last-event-id" in request.headers:
            now = anyio.current_time()
            self._next = max(now, self._next) + RECONNECTION_SECONDS
            await anyio.sleep(self._next - now)


async def _bound_body(response: httpx2.Response) -> None:
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx2.StreamError("sent a body that is packed")
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        response.stream = _BoundedBody(response.stream)
        return
    if (response.charset_encoding or "utf-8").lower() not in ("utf-8", "utf8"):
        raise httpx2.StreamError("sent events in another encoding than UTF-8")
    response.stream = BoundedEvents(response.stream)


class _BoundedBody(httpx2.AsyncByteStream):
    """A body that ends with an error after `MOST_MESSAGE` bytes, or if it has too many values to be parsed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = bytearray()
        async for chunk in self._stream:
            body += chunk
            if len(body) > MOST_MESSAGE:
                raise httpx2.StreamError(f"sent a body of more than {MOST_MESSAGE / 2**20:.0f} MiB")
        if (problem := unparsed_problem(body)) is not None:
            if (number := id_of(body)) is None:
                raise httpx2.StreamError(problem)
            body = bytearray(_refusal(number, problem).message.model_dump_json(by_alias=True).encode())
        yield bytes(body)

    async def aclose(self) -> None:
        """Close the body beneath."""
        await self._stream.aclose()


class BoundedEvents(httpx2.AsyncByteStream):
    """A stream of events that ends with an error at one with too many values to be parsed.

    A string of JSON ends on its line, so that each line is counted by itself.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        held, values, pace = bytearray(), 0, MessagePace()
        async for chunk in self._stream:
            before = max(0, len(held) - 1)
            held += chunk
            # a "\r" at the end may be the first half of a line's end
            end = max(held.rfind(b"\n", before), held.rfind(b"\r", before, len(held) - 1)) + 1
            if end:
                lines = bytes(held[:end])
                del held[:end]
                values = _checked_lines(lines, values)
                await pace.wait((lines.count(b"\n") + lines.count(b"\r")) / LINES_OF_EVENT)
                yield lines
            if len(held) > MOST_MESSAGE:
                raise httpx2.SSEError(f"sent a line of more than {MOST_MESSAGE / 2**20:.0f} MiB")
        _checked_lines(bytes(held), values)
        yield bytes(held)

    async def aclose(self) -> None:
        """Close the body beneath."""
        await self._stream.aclose()


def _checked_lines(data: bytes, values: int) -> int:
    """Return the values of the event that the last of some lines belongs to; its lines before have `values`."""
    for line in data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").removesuffix(b"\n").split(b"\n"):
        values = values + count_values(line, MOST_MARKS, MOST_MARKS).values if line else 0
        if values > MOST_MARKS:
            raise httpx2.SSEError(TOO_MANY_VALUES)
    return values


def _refusal(number: int | str | None, problem: str) -> SessionMessage:
    """Return the answer in place of one that is not passed on."""
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=ErrorData(code=TOO_LARGE, message=problem)))


@asynccontextmanager
async def _checked(opened: AbstractAsyncContextManager[Any]) -> AsyncIterator[tuple[Messages, Messages]]:
    """Check the messages of a transport before the library reads them."""
    async with opened as (received, sent):
        answers = AnswersDue(sent)
        yield MessageChecks(received, answers), answers


class AnswersDue:
    """A stream to a server, and its requests that are neither answered nor taken back yet."""

    def __init__(self, stream: Messages) -> None:
        self._stream = stream
        self._due = set[str]()  # the library takes 7 and "7" for one

    async def send(self, message: Any) -> None:
        """Send a message."""
        await self._stream.send(message)
        body = getattr(message, "message", None)
        if isinstance(body, JSONRPCResponse | JSONRPCError):
            self._due.discard(str(body.id))

    def problem_of(self, request: JSONRPCRequest) -> str | None:
        """Note a request of the server, and return None; or return why it can't be passed on."""
        if str(request.id) in self._due:
            return "asks two questions of one number"
        if len(self._due) >= MOST_ASKED:
            return f"asks more than {MOST_ASKED} questions at a time"
        self._due.add(str(request.id))
        return None

    def see(self, note: JSONRPCNotification) -> None:
        """Look at a notification of the server: it may take a question back, which nobody answers then."""
        if note.method == "notifications/cancelled":
            self._due.discard(str((note.params or {}).get("requestId")))

    async def aclose(self) -> None:
        """Close the stream beneath."""
        await self._stream.aclose()

    async def __aenter__(self) -> AnswersDue:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.aclose()


class MessageChecks:
    """A stream of messages that replaces answers with too many values by an error."""

    def __init__(self, stream: Messages, answers: AnswersDue) -> None:
        self._stream, self._answers, self._pace = stream, answers, MessagePace()

    @property
    def last_context(self) -> Any:
        """The context of the latest message's sender."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        """Wait for the next message."""
        while True:
            message = await self._stream.receive()
            body = getattr(message, "message", None)
            if not isinstance(body, JSONRPCResponse | JSONRPCError):
                await self._pace.wait()
            content = {name: getattr(body, name, None) for name in ("result", "params", "error") if hasattr(body, name)}
            if isinstance(body, JSONRPCError):
                content = {"error": body.error.data}
            problem = problem_of(content)
            if problem is None and isinstance(body, JSONRPCRequest):
                problem = self._answers.problem_of(body)
            elif problem is None and isinstance(body, JSONRPCNotification):
                self._answers.see(body)
            if problem is None:
                return message
            if isinstance(body, JSONRPCResponse | JSONRPCError):
                return _refusal(body.id, problem)
            log.debug("a tool server %s", problem)  # a notification, or a request that no tool needs

    async def aclose(self) -> None:
        """Close the stream beneath."""
        await self._stream.aclose()

    def __aiter__(self) -> MessageChecks:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> MessageChecks:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.aclose()
