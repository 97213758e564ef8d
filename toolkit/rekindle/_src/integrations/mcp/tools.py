"""`rekindle.mcp_tools`: the tools of a Model Context Protocol server, as tools of a chat."""

from __future__ import annotations

import math
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, overload

from rekindle._src.calls.call import Call
from rekindle._src.core import words
from rekindle._src.core.drawable import Drawable
from rekindle._src.dispatch.threads import run_sync
from rekindle._src.integrations.mcp.consent import Consent, ToolServerOffer, ask
from rekindle._src.integrations.mcp.limits import (
    MOST_NAME,
    MOST_SERVER_NAME,
    MOST_TOOLS,
    safe_name,
    said,
    schema_problem,
)
from rekindle._src.views import html
from rekindle.errors import InvalidRequest, ToolServerError

if TYPE_CHECKING:
    from typing import Self

    from rekindle._src.integrations.mcp.connection import ListedTool, Listing, ServerConnection
    from rekindle._src.integrations.mcp.transports import ServerLike, ServerTarget

LONGEST = 86_400.0  # seconds


RemoteFunction = Callable[..., Awaitable[str]]


class ServerLease:
    """Keeps a connection open until `end` is called, or no tool of it is held any more."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection: ServerConnection = connection
        self.end: weakref.finalize[[], ServerLease] = weakref.finalize(self, connection.close)
        self.end.atexit = False  # the connection has an end of its own there


class RemoteTool:
    """A tool of a server as an async function of its arguments; a chat shows `tool_schema` to the model."""

    def __init__(self, lease: ServerLease, tool: str, name: str, schema: Mapping[str, object]) -> None:
        self._lease, self._tool, self.__name__, self.tool_schema = lease, tool, name, schema

    async def __call__(self, /, **arguments: object) -> str:
        """Call the tool, and return its result as text."""
        return await self._lease.connection.call(self._tool, arguments)

    def __repr__(self) -> str:
        return f"<RemoteTool {self.__name__}>"


class ToolServerTools(Sequence[RemoteFunction], Drawable):
    """The tools of an open server: `session.chat(…, tools=tools)`, or `tools=[*tools, my_function]`.

    Each is an async function, too: `await tools[0](city="Lima")`. They are called from any thread and event loop, until
    `aclose` or the end of an `async with` block; without either, until the last of them is let go.
    """

    def __init__(self, lease: ServerLease, offer: ToolServerOffer, tools: Sequence[RemoteFunction]) -> None:
        self._lease, self._offer, self._tools = lease, offer, tuple(tools)

    @property
    def server(self) -> str:
        """The server's name, which the names of the tools begin with."""
        return self._offer.server

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tools, as the model calls them."""
        return self._offer.names

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return not self._lease.end.alive

    @overload
    def __getitem__(self, index: int) -> RemoteFunction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RemoteFunction, ...]: ...
    def __getitem__(self, index: int | slice) -> RemoteFunction | tuple[RemoteFunction, ...]:
        """Return a tool, or several."""
        return self._tools[index]

    def __len__(self) -> int:
        return len(self._tools)

    async def aclose(self) -> None:
        """Disconnect, and end the program that was started. Calls that run end with an error."""
        self._lease.end()
        await self._lease.connection.ended.get()

    def close(self) -> None:
        """Call `aclose` from code without an event loop."""
        run_sync(self.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<ToolServerTools of {self.server}: {words.count(len(self), 'tool')}{state}>"

    def _repr_html_(self) -> str:
        return str(html.line(repr(self))) if self.closed else self._offer._repr_html_()


class Connecting(Call[ToolServerTools]):
    """`tools = await rekindle.mcp_tools(…)`, or `async with rekindle.mcp_tools(…) as tools`."""

    _awaited = "await rekindle.mcp_tools(…)"

    def __init__(
        self, target: ServerTarget, name: str | None, only: Sequence[str] | None, consent: Consent | None,
        timeout: float, mode: str,
    ) -> None:  # fmt: skip
        self._target, self._name, self._only, self._consent = target, name, only, consent
        self._timeout, self._mode = timeout, mode
        self._tools: ToolServerTools | None = None

    async def _result(self) -> ToolServerTools:
        from rekindle._src.integrations.mcp.connection import ServerConnection  # needs the extra

        if self._tools is None:
            connection = ServerConnection(self._target, self._name, self._timeout, self._mode)
            lease = ServerLease(connection)
            try:
                listing = await connection.listed.get()
                tools = _checked(listing, self._only, lease)
                schemas = tuple(tool.tool_schema for tool in tools)
                offer = ToolServerOffer(listing.name, self._target.shown, schemas, self._target.identity)
                await ask(offer, self._consent)
            except BaseException:
                connection.close()
                raise
            self._tools = ToolServerTools(lease, offer, tools)
        return self._tools

    async def __aenter__(self) -> ToolServerTools:
        return await self._result()

    async def __aexit__(self, *details: object) -> None:
        if self._tools is not None:
            await self._tools.aclose()

    def __repr__(self) -> str:
        return f"<rekindle.mcp_tools of {self._target.shown}: await it>"


def mcp_tools(
    server: ServerLike,
    *,
    name: str | None = None,
    only: Sequence[str] | None = None,
    consent: Consent | None = None,
    timeout: float = 30.0,
    mode: str = "auto",
) -> Connecting:
    """Connect to a Model Context Protocol server: its tools are tools of a chat.

        async with rekindle.mcp_tools(["uvx", "mcp-server-time"]) as tools:
            run = await session.chat("What time is it in Lima?", tools=tools, run_tools=True)

    `server` is a URL, a command as a list, an entry of a configuration such as `{"command": …, "args": …, "env": …,
    "cwd": …}` or `{"url": …, "headers": …}`, or an `MCPServer` of this process. Tools are named by the server and
    themselves, as in `time_convert`; `name` is another name for the server, and `only` lists the server's tools that
    the chat gets, by their own names.

    Before the model gets any, you are shown them, and asked in the notebook or the terminal; without a yes, there are
    none. A yes holds for the same server with the same tools while this process runs. In a program, `consent` is a
    function that gets the `ToolServerOffer` and returns True or False.

    A tool's result is text: pictures and sounds are named and left out. A server that does not answer within `timeout`
    seconds, ends, or sends more than may be read costs that call, with a `ToolServerError`. `mode="legacy"` is for
    servers that wait for the handshake of older versions. Needs the extra `mcp`.
    """
    from rekindle._src.integrations.mcp.transports import target_of  # needs the extra

    if name is not None and (safe_name(name) != name or not 0 < len(name) <= MOST_SERVER_NAME):
        problem = f"must be letters, digits, dashes and underscores, {MOST_SERVER_NAME} at most"
        raise InvalidRequest("name", name, problem, 'Use name="files"')
    if only is not None and (isinstance(only, str) or not all(isinstance(one, str) for one in only)):
        raise InvalidRequest("only", only, "is not a list of names", 'Use only=["read"]')
    if consent is not None and not callable(consent):
        raise InvalidRequest("consent", consent, "is not a function", "Pass a function that returns True or False")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and math.isfinite(timeout)
    if not is_number or not 0 < timeout <= LONGEST:
        raise InvalidRequest("timeout", timeout, f"is not a number of seconds up to {LONGEST:,.0f}", "Use 30")
    if not isinstance(mode, str) or (mode not in ("auto", "legacy") and not mode[:2].isdigit()):
        raise InvalidRequest("mode", mode, "is not known", 'Use "auto", "legacy", or a version of the protocol')
    return Connecting(target_of(server), name, None if only is None else tuple(only), consent, float(timeout), mode)


def _checked(listing: Listing, only: Sequence[str] | None, lease: ServerLease) -> list[RemoteTool]:
    """Return the tools that a chat gets. Raise `ToolServerError` for one that no model can be shown."""
    listed: Mapping[str, ListedTool] = {one.name: one for one in listing.tools}
    if only is not None and (unknown := [one for one in only if one not in listed]):
        known = said(", ".join(listed)) or "none"
        raise InvalidRequest("only", unknown[0], f"is no tool of {listing.name}", f"Its tools are: {known}")
    chosen = [*listed.values()] if only is None else [listed[one] for one in dict.fromkeys(only)]
    if len(chosen) > MOST_TOOLS:
        fix = "Pass only=[…] with the names of the tools that the model needs"
        raise ToolServerError(listing.name, None, f"offers {len(chosen)} tools, and a chat gets {MOST_TOOLS}", fix)
    tools: dict[str, RemoteTool] = {}
    for one in chosen:
        name = f"{listing.name}_{safe_name(one.name)}"
        problem = schema_problem(one.parameters, one.description)
        if len(name) > MOST_NAME or not one.name:
            problem = f"has a name of {len(name)} characters with the server's, over {MOST_NAME}"
        elif name in tools:
            problem = f"has the same name as another: {name}"
        if problem is not None:
            fix = "Pass only=[…] without it, or a shorter name=…"
            raise ToolServerError(listing.name, said(one.name), problem, fix)
        function = {"name": name, "description": one.description, "parameters": {"type": "object", **one.parameters}}
        tools[name] = RemoteTool(lease, one.name, name, {"type": "function", "function": function})
    return [*tools.values()]
