"""The server over a session, in a thread of its own, that `await session.serve()` returns."""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Self

from rekindle._src.dispatch.threads import OneShot, run_sync
from rekindle._src.serve.app import app
from rekindle._src.serve.life import check_bound, seconds_to_drain
from rekindle._src.views import html
from rekindle.errors import ConfigError, MissingExtra, SessionClosed

log = logging.getLogger("rekindle.server")


class Server:
    """An HTTP server in a thread of its own. Close it with `aclose`, or with an `async with` block.

    It does not close the sessions that it serves. Closing a session closes its servers.
    """

    def __init__(
        self,
        session: object,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_connections: int | None = None,
        **options: Any,
    ) -> None:
        try:
            from rekindle._src.serve.listening import Listener, bind
        except ImportError as error:
            raise MissingExtra("uvicorn", "serve") from error
        if not isinstance(host, str):
            raise ConfigError("host", host, "is not a name or an address", "Use 127.0.0.1")
        asgi = app(session, **options)
        if max_connections is not None:
            check_bound("max_connections", max_connections)
        listening_socket = bind(host, port)
        asgi.state.rekindle.hosts.add(host)
        warn_if_open(host, options.get("api_key"))
        self.models: tuple[str, ...] = tuple(asgi.state.rekindle.models.by_name)
        self.host: str = host
        self.port: int = listening_socket.getsockname()[1]
        self._pid = os.getpid()
        self._needs_key = bool(options.get("api_key"))
        self._opened: OneShot[None] = OneShot()
        self._ended: OneShot[None] = OneShot()
        self._listener = Listener(
            asgi,
            asgi.state.rekindle.life,
            listening_socket,
            started=lambda: self._opened.put(None),
            max_connections=max_connections,
        )
        self._thread = threading.Thread(target=self._run, name="rekindle server", daemon=True)

    @property
    def url(self) -> str:
        """The address of the server, without a path. OpenAI's clients want `server.url + "/v1"` as their base URL."""
        return address(self.host, self.port)

    @property
    def closed(self) -> bool:
        """True if the server takes no more requests."""
        return self._ended.filled or self._listener.life.draining

    async def start(self) -> Self:
        """Start the thread, and wait until it listens."""
        if not _servers:
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _servers.add(self)
        self._thread.start()
        await self._opened.get()
        return self

    def _run(self) -> None:
        try:
            self._listener.serve_forever()
        except BaseException as error:
            log.exception("the server at %s failed", self.url)
            self._opened.fail(error if isinstance(error, Exception) else SessionClosed("the server did not start"))
        finally:
            self._listener.sock.close()
            self._opened.fail(SessionClosed("the server was closed while it started"))
            self._ended.put(None)

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Refuse new connections, and let answers go on for `drain` seconds. Closing again is harmless."""
        drain = seconds_to_drain("drain", drain)
        if not self._ended.filled:
            if not (self._listener.life.draining and drain):  # drain=0 cuts a drain in progress
                self._listener.stop(drain)
            await self._ended.get()

    def close(self, *, drain: float = 0.0) -> None:
        """Call `aclose` from code without an event loop."""
        run_sync(self.aclose(drain=drain))

    def stop_at_exit(self) -> None:
        """Cut all answers, and wait half a second for the thread. A forked child does nothing: it has no thread."""
        if os.getpid() == self._pid and not self._ended.filled:
            self._listener.stop(0.0)
            self._thread.join(0.5)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<rekindle.Server {self.url}, {', '.join(self.models)}{', closed' if self.closed else ''}>"

    def _repr_html_(self) -> str:
        model, key = self.models[0], "$API_KEY" if self._needs_key else "none"
        bearer = ' -H "Authorization: Bearer $API_KEY"' if self._needs_key else ""
        curl = (
            f'curl {self.url}/v1/chat/completions{bearer} -H "Content-Type: application/json" \\\n'
            f'  -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
        )
        client = (
            "from openai import OpenAI\n\n"
            f'client = OpenAI(base_url="{self.url}/v1", api_key="{key}")\n'
            "reply = client.chat.completions.create(\n"
            f'    model="{model}", messages=[{{"role": "user", "content": "Hello"}}]\n'
            ")"
        )
        return str(
            html.block(
                html.line("closed" if self.closed else "open", *self.models),
                html.text(curl),
                html.text(client),
                title=f"rekindle server: {self.url}",
            )
        )


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _close_all() -> None:
    """Close all servers at interpreter exit, before the sessions: a running server would still use them."""
    for server in tuple(_servers):
        server.stop_at_exit()


def address(host: str, port: int) -> str:
    """Return the URL of a listening address for a client on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def warn_if_open(host: str, api_key: str | Sequence[str] | None) -> None:
    """Log a warning if other hosts can reach the server without an API key."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not api_key:
        log.warning(
            "every host that reaches %s may use this server. Give it an api_key, or host='127.0.0.1'", host or "it"
        )
