"""Uvicorn with a shutdown of its own, and bounds on connections.

At shutdown it refuses at once, lets answers finish, and cuts them on a second signal.

Uvicorn's protocols don't bound a connection before a request is complete and the app sees it: a head may have any
length and take any time, and a client that reads nothing keeps its connection. `protocol` returns one with such bounds,
over httptools or h11.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rekindle._src.core.words import count
from rekindle._src.serve.life import Life, address_of
from rekindle.errors import ConfigError
from rekindle_kernels import system

try:
    import httptools
    from starlette.types import ASGIApp
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # uvicorn without its extra `standard`
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    _Protocol = H11Protocol
else:
    _Protocol = object

log = logging.getLogger("rekindle.server")
CUT_SECONDS = 5.0  # for answers to end after they are cut
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

HEAD_BYTES = 64 << 10  # of request line and headers; and of anything else outside the body, such as trailers
HEAD_SECONDS = 10.0  # from a connection, or the first byte of its next request, to the end of that request's headers
# Idle seconds after which a connection is closed. Clients and proxies reuse one after 60 s at most: if it were closed
# at that moment, it would look like a failure of the server.
KEPT_SECONDS = 75
STALLED_SECONDS = 60.0  # a client's limit for reading from a connection whose buffers are full
AHEAD = 16  # requests sent before the first is answered, at most
# Seconds, after a client closed its half, at which interim responses show whether it is still there. One more is sent
# at once: if the client has left, a reset answers it, and the next one fails. The later ones are for a client that
# leaves later. Go's client takes five at most.
PROBE_SECONDS = (0.0, 5.0, 50.0)
SWEEP_SECONDS = 0.5
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


class Listener(uvicorn.Server):
    """Serves one app on one socket."""

    def __init__(
        self,
        app: ASGIApp,
        life: Life,
        sock: socket.socket,
        *,
        started: Callable[[], object],
        access_log: bool = False,
        max_connections: int | None = None,
    ) -> None:
        self.connections = Connections(max_connections or most_connections())
        http: Any = protocol(self.connections)
        config = uvicorn.Config(
            app,
            http=http,
            h11_max_incomplete_event_size=HEAD_BYTES,
            log_config=None,
            log_level="warning",
            access_log=access_log,
            server_header=False,
            ws="none",
            lifespan="on",
            timeout_keep_alive=KEPT_SECONDS,
            timeout_graceful_shutdown=None,
        )
        super().__init__(config)
        if access_log:
            lines = logging.getLogger("uvicorn.access")
            lines.setLevel(logging.INFO)
            lines.propagate = False
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            lines.handlers = [handler]
        self.life, self.sock = life, sock
        self.drain_seconds = 0.0
        self._on_started = started
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve_forever(self) -> None:
        """Serve in this thread until `stop`."""
        self.run(sockets=[self.sock])

    def stop(self, drain: float) -> None:
        """Refuse requests, and let answers go on for `drain` seconds. A second call cuts them. Thread-safe."""
        again, self.life.draining = self.life.draining, True
        if not again:
            self.drain_seconds = drain
        self.should_exit = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cut if again else self._refuse)

    def _refuse(self) -> None:
        for server in self.servers:
            server.close()

    def _cut(self) -> None:
        self.life.abort_all()

    # Called by uvicorn.

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.life.draining = True
        self._refuse()
        waited, began = len(self.life.active), time.monotonic()
        told = bool(waited or self.drain_seconds)
        if told:
            log.info("shutting down: waiting for %s, at most %.0f s", count(waited, "answer"), self.drain_seconds)
        drain = asyncio.create_task(self._drain())
        self.config.timeout_graceful_shutdown = int(self.drain_seconds + 2 * CUT_SECONDS)
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()
            if told:
                cut = "; answers that had not ended were cut" if waited and self.life.cut else ""
                log.info("shut down after %.1f s%s", time.monotonic() - began, cut)

    async def _drain(self) -> None:
        await asyncio.sleep(self.drain_seconds)
        if self.life.active:
            log.warning("%d answers were not ready after %.0f s and are cut", len(self.life.active), self.drain_seconds)
        self._cut()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller; see `signals`."""
        yield

    @contextlib.contextmanager
    def signals(self, drain: float) -> Iterator[None]:
        """Let SIGINT and SIGTERM stop the server, and a second one cut its answers. Main thread only."""

        def stop(number: int, frame: FrameType | None) -> None:
            if hasattr(signal, "alarm"):
                signal.alarm(0)  # Ray's handler came first, and would abort the process after three seconds
            self.stop(drain)

        previous = {number: signal.signal(number, stop) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raise `ConfigError` if that fails."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65_536:
        raise ConfigError("port", port, "is not a port", "Use 0 for any free one, or 1 to 65535")
    try:
        kinds = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP, "flags": socket.AI_PASSIVE}
        addresses = socket.getaddrinfo(host, port, **kinds)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "host", host, f"is not known: {error}", "Use 127.0.0.1, or 0.0.0.0 for all networks"
        ) from None
    family, kind, protocol, _, address = addresses[0]
    # asyncio turns Nagle's algorithm off only if the socket has a protocol; it would hold small events back.
    listening_socket = socket.socket(family, kind, protocol)
    try:
        system.reuse_address(listening_socket)
        listening_socket.bind(address)
    except OSError as error:
        listening_socket.close()
        raise ConfigError(
            "port", port, f"can't be had on {host}: {error.strerror}", "Use port=0 for a free one"
        ) from None
    listening_socket.setblocking(False)
    return listening_socket


def most_connections() -> int:
    """Return the number of connections that leaves the process enough file descriptors for everything else."""
    limit = system.most_descriptors()
    if limit is None:
        return 1 << 16
    return max(16, min(limit - max(64, limit // 8), 1 << 16))


class Connections:
    """The connections of a server, owned by its loop.

    One address may hold three quarters of the places, so that others get some. If none is free, the connection that has
    been idle longest is closed. A connection with a request in progress is never closed.
    """

    def __init__(self, most: int) -> None:
        self.most: int = most
        self.most_of_one: int = max(1, most * 3 // 4)
        self._by_address: dict[str, dict[_BoundedProtocol, None]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self.count: int = 0

    def enter(self, connection: _BoundedProtocol, address: str) -> bool:
        """Add a connection. Return False if there is no room for it."""
        peers = self._by_address.get(address, {})
        if len(peers) >= self.most_of_one:
            room = self._close_longest_waiting(peers)
        elif self.count >= self.most:
            room = self._close_longest_waiting({peer: None for group in self._by_address.values() for peer in group})
        else:
            room = True
        if room:
            connection.address = address
            self._by_address.setdefault(address, {})[connection] = None
            self.count += 1
            if self._sweeping is None:
                self._sweeping = connection.loop.call_later(SWEEP_SECONDS, self._sweep, connection.loop)
        return room

    def leave(self, connection: _BoundedProtocol) -> None:
        """Forget a connection. An unknown one is ignored."""
        peers = self._by_address.get(connection.address)
        if peers is not None and connection in peers:
            del peers[connection]
            self.count -= 1
            if not peers:
                del self._by_address[connection.address]

    def _close_longest_waiting(self, among: dict[_BoundedProtocol, None]) -> bool:
        idle = [peer for peer in among if peer.waiting_since is not None]
        if not idle:
            return False
        oldest = min(idle, key=lambda peer: peer.waiting_since or 0.0)
        self.leave(oldest)
        oldest.refuse(503)
        if oldest.transport.get_write_buffer_size():  # its client does not read, so closing would never finish
            oldest.transport.abort()
        return True

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections past their time limits."""
        now = loop.time()
        for group in tuple(self._by_address.values()):
            for connection in tuple(group):
                connection.check_time(now)
        self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep, loop) if self._by_address else None


class _BoundedProtocol(_Protocol):
    """Bounds added to uvicorn's protocols of httptools and h11."""

    connections_of_server: Connections
    address: str = ""
    waiting_since: float | None = None  # no request is being answered
    head_since: float | None = None  # a head is being sent, or the connection is new
    stalled_since: float | None = None  # its buffers are full, or it is closing and they are not empty
    unsent: int = 0  # bytes in its buffers when `stalled_since` was set
    unframed: int = 0  # bytes since the end of the last whole head or part of a body
    answered: Any = None  # the request being answered; `cycle` is the latest one
    probes: list[float] | None = None  # times of the next probes, once the client has closed its half

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.waiting_since = self.head_since = self.loop.time()
        if not self.connections_of_server.enter(self, address_of(self.client)):
            self.refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_of_server.leave(self)
        if self.answered is not None and not self.answered.response_complete:  # uvicorn notifies `cycle` only
            self.answered.disconnected = True
            self.answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.unframed += len(data)
        super().data_received(data)
        if self.unframed > HEAD_BYTES or self._ahead > AHEAD:
            self.refuse(431)
        elif not self._answering:
            self.head_since = self.head_since or self.loop.time()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes it, uvicorn returns None
        """Return True to keep the connection of a client that sends nothing more and awaits its answer.

        RFC 9112 lets clients close their half after a request. One that has left looks the same: both send a FIN. But
        the system of a client that has left resets the connection when something arrives, and the write after that
        fails. So parts of an answer that has begun tell the two apart, and before that, interim responses (100), which
        clients have to skip. HTTP/1.0 has none, so there a client that awaits an answer is taken for one that left, as
        is one that has sent only a part of a request.
        """
        answered = self.answered
        if not self._answering or answered.more_body or self.transport.is_closing():
            return False
        if not answered.response_started and answered.scope["http_version"] == "1.0":
            return False
        now = self.loop.time()
        self.probes = [now + seconds for seconds in PROBE_SECONDS]
        self._probe()
        return True

    def _probe(self) -> None:
        if self._answering and not self.answered.response_started and not self.transport.is_closing():
            self.transport.write(_CONTINUE)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.probes is not None and (not self._answering or self.answered.more_body):
            self.transport.close()  # what was sent ahead is answered, or the client left in the middle of it
        if self.transport.is_closing():
            self._stalls()
        elif not self._answering:
            self.waiting_since, self.head_since = self.loop.time(), None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalls()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.stalled_since = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _ahead(self) -> int:
        return 0

    def head_complete(self) -> None:
        """Note that a request's headers are complete, and its answer begins."""
        self.unframed = 0
        self.waiting_since = self.head_since = None

    def check_time(self, now: float) -> None:
        """End the connection if its client has taken too long, and probe one that sends nothing more."""
        if self.probes and now > self.probes[0]:
            del self.probes[0]
            self._probe()
        if self.stalled_since is not None:
            left = self.transport.get_write_buffer_size()
            if left < self.unsent:
                self._stalls()
            elif now - self.stalled_since > STALLED_SECONDS:
                self.transport.abort()
        elif self.head_since is not None and now - self.head_since > HEAD_SECONDS:
            self.refuse(408)

    def refuse(self, status: int) -> None:
        """Close the connection. Send the status first, unless a request is being answered."""
        if self.transport.is_closing():
            return
        if not self._answering:
            head = b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-length: 0\r\n" % (status, _REASONS[status])
            self.transport.write(head + (b"retry-after: 1\r\n\r\n" if status == 503 else b"\r\n"))
        self.head_since = None
        self._stalls()
        self.transport.close()

    def _stalls(self) -> None:
        self.stalled_since, self.unsent = self.loop.time(), self.transport.get_write_buffer_size()


class _H11(_BoundedProtocol, H11Protocol):
    """Bounds for h11, which limits the bytes of heads, trailers and chunk headers itself."""

    def handle_events(self) -> None:
        previous = self.cycle
        super().handle_events()
        self.unframed = 0
        if self.cycle is not previous and self._answering:
            self.answered = self.cycle
            self.head_complete()


if HttpToolsProtocol is not None:

    class _RestOfRequest:
        """The callbacks of a parser that reads a request's body, and what follows, after another read its head."""

        def __init__(self, connection: _HttpTools) -> None:
            self._connection, self._repeated = connection, True
            self.on_body = connection.on_body
            self.on_message_complete = connection.on_message_complete

        def on_message_begin(self) -> None:
            if not self._repeated:
                self._connection.on_message_begin()

        def on_url(self, url: bytes) -> None:
            if not self._repeated:
                self._connection.on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._repeated:
                self._connection.on_header(name, value)

        def on_headers_complete(self) -> None:
            if not self._repeated:
                self._connection.on_headers_complete()
            self._repeated = False

    class _RequestParser:
        """httptools' parser for a server that upgrades no connection.

        Where a client offers another protocol, as Java's does with each first request, httptools takes the body for
        that protocol's bytes. A proxy takes it for the body: two readers of one request. So another parser goes on.
        """

        def __init__(self, connection: _HttpTools, parser: Any) -> None:
            self._connection, self._parser = connection, parser

        def feed_data(self, data: bytes) -> None:
            rest = memoryview(data)
            while True:
                try:
                    self._parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as offered:
                    rest = rest[offered.args[0] :]
                    self._go_on()

        def _go_on(self) -> None:
            connection, version = self._connection, self._parser.get_http_version().encode()
            lines = [b"POST / HTTP/" + version]  # a method that may have a body
            framing = (b"content-length", b"transfer-encoding")
            lines += [b"%b: %b" % header for header in connection.headers if header[0] in framing]
            self._parser = httptools.HttpRequestParser(_RestOfRequest(connection))
            with contextlib.suppress(AttributeError):  # httptools before 0.6.3; as uvicorn has it
                self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")

        @property
        def stops_at_the_head(self) -> bool:
            """True if another parser is to go on after the head that was read."""
            upgrades: bool = self._parser.should_upgrade()
            return upgrades

        def should_upgrade(self) -> bool:
            return False

        def should_keep_alive(self) -> bool:
            keeps: bool = self._parser.should_keep_alive()
            return keeps

        def get_http_version(self) -> str:
            version: str = self._parser.get_http_version()
            return version

        def get_method(self) -> bytes:
            method: bytes = self._parser.get_method()
            return method

    class _HttpTools(_BoundedProtocol, HttpToolsProtocol):  # type: ignore[misc]
        """Bounds for httptools, which has none; it also joins a header's parts in quadratic time."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._reader = _RequestParser(self, self.parser)
            self.parser: Any = self._reader

        @property
        def _ahead(self) -> int:
            return len(self.pipeline)

        def on_headers_complete(self) -> None:
            self.head_complete()
            super().on_headers_complete()

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self.answered = cycle
            super()._start_asgi_task(cycle, app)

        def on_body(self, body: bytes) -> None:
            self.unframed = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            if self._reader.stops_at_the_head:
                return  # its body is to come
            self.unframed = 0
            super().on_message_complete()


def protocol(connections: Connections) -> Callable[..., asyncio.Protocol]:
    """Return a factory of a connection's protocol, as uvicorn's option `http` takes it."""
    kind: Any = _H11 if HttpToolsProtocol is None else _HttpTools

    def make(**options: Any) -> asyncio.Protocol:
        connection: _BoundedProtocol = kind(**options)
        connection.connections_of_server = connections
        return connection

    return make
