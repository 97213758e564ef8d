"""Uvicorn with a shutdown of its own: it refuses at once, lets answers finish, and cuts them on a second signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from rekindle._src.serve.connections import HEAD_BYTES, KEPT_SECONDS, Connections, most_connections, protocol
from rekindle._src.serve.life import Life
from rekindle.errors import ConfigError

log = logging.getLogger("rekindle.server")
CUT_SECONDS = 5.0  # for answers to end after they are cut
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Listener(uvicorn.Server):
    """Serves one app on one socket."""

    def __init__(
        self,
        app: Any,
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
        drain = asyncio.create_task(self._drain())
        self.config.timeout_graceful_shutdown = int(self.drain_seconds + 2 * CUT_SECONDS)
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()

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
        addresses = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "host", host, f"is not known: {error}", "Use 127.0.0.1, or 0.0.0.0 for all networks"
        ) from None
    family, kind, protocol, _, address = addresses[0]
    # asyncio turns Nagle's algorithm off only if the socket has a protocol; it would hold small events back.
    listening_socket = socket.socket(family, kind, protocol)
    try:
        listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening_socket.bind(address)
    except OSError as error:
        listening_socket.close()
        raise ConfigError(
            "port", port, f"can't be had on {host}: {error.strerror}", "Use port=0 for a free one"
        ) from None
    listening_socket.setblocking(False)
    return listening_socket
