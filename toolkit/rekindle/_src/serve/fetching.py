"""Fetches what requests name by URL: from public addresses alone, within bounds on time, bytes and places.

A stranger chooses the URL, and the server stands where the stranger can't reach. So one parser makes what is checked
and what is requested; a name is resolved once, every address of it is checked, and the connection goes to one of these
addresses; a redirect begins all of this again. A client learns the same about a name that does not exist and about one
of an inside host. No proxy, cookie or key is used.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.abc
import anyio.to_thread
import h11
from anyio.abc import SocketAttribute
from anyio.streams.tls import TLSStream

from rekindle._src.core.version import VERSION
from rekindle._src.dispatch.intake import Turns
from rekindle._src.serve.errors import unavailable
from rekindle._src.serve.web_urls import PORTS, SEND, Address, FetchProblem, WebUrl, is_public, parse_url

_HEAD_BYTES = 16 << 10
_BLOCK = 64 << 10
_INTERIM = 8  # responses before the one that counts
_PIECES, _PIECE_BYTES = 1_024, 64  # a body may have so many pieces, and one more for each so many bytes
_TRIES, _TRY_SECONDS = 4, 3.0  # addresses of a name that are tried, and the time that a connection to one may take
_REDIRECTS = frozenset((301, 302, 303, 307, 308))

_CHECK = f"Check it, or {SEND}"
_PUBLIC = f"Name a public host, or {SEND}"


def resolved(name: str) -> list[str]:
    """Return the addresses of a name, as the system resolves it."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


@dataclass(frozen=True)
class FetchRules:
    """Where may be fetched from, and within which bounds."""

    resolve: Callable[[str], Sequence[str]] = resolved  # called in a thread
    allows: Callable[[Address], bool] = is_public
    own: bool = False  # True: addresses of this machine may be fetched from
    ports: frozenset[int] = frozenset(PORTS.values())
    redirects: int = 3
    seconds: float = 10.0  # for all URLs of a request, from its turn on
    places: int = 8  # requests that fetch at a time
    present: int = 16  # requests of one caller that fetch or wait for a place
    lookups: int = 32  # names that are resolved at a time, those included that no request waits for any more
    lookups_of_one: int = 16  # of them, those of one caller
    context: ssl.SSLContext | None = None  # None: the system's authorities are trusted


class _Lookups:
    """Counts the names that are being resolved, by caller. A lookup can't be cut short: with a resolver that hangs,
    it goes on long after its request has left."""

    def __init__(self, rules: FetchRules) -> None:
        self._most, self._most_of_one = rules.lookups, rules.lookups_of_one
        self._of_callers = Counter[str]()
        self._lock = threading.Lock()  # lookups end in threads

    def begin(self, caller: str) -> None:
        """Count a lookup. Raise `ApiError` (503) if there are too many, of all callers or of this one."""
        with self._lock:
            if self._of_callers.total() >= self._most or self._of_callers[caller] >= self._most_of_one:
                raise unavailable("too many names of hosts are being resolved")
            self._of_callers[caller] += 1

    def end(self, caller: str) -> None:
        """Count a lookup no more."""
        with self._lock:
            self._of_callers[caller] -= 1
            if not self._of_callers[caller]:
                del self._of_callers[caller]


class Fetcher:
    """Fetches URLs for requests, which take turns between callers. It belongs to one event loop."""

    def __init__(self, rules: FetchRules | None = None) -> None:
        self.rules: FetchRules = rules or FetchRules()
        self._turns = Turns(self.rules.places)
        self._present = Counter[str]()  # requests of each caller
        self._lookups = _Lookups(self.rules)
        self._context = self.rules.context or ssl.create_default_context()

    def parse(self, text: str) -> WebUrl:
        """Return a URL that may be fetched, if its addresses may. Raises `FetchProblem`."""
        return parse_url(text, self.rules.ports)

    async def fetch(
        self,
        urls: Sequence[WebUrl],
        *,
        most: int,
        caller: str = "",
        hold: Callable[[int], object] = lambda size: None,
    ) -> list[bytes]:
        """Return the contents of URLs, at most `most` bytes in all.

        `hold` is called with the bytes that have come so far, and may raise. Raises `FetchProblem`, and `ApiError`
        (503) if too many requests of the caller wait.
        """
        rules, bodies = self.rules, list[bytes]()
        if self._present[caller] >= rules.present:
            raise unavailable(f"{rules.present} requests of this client wait for pictures that are fetched")
        self._present[caller] += 1
        try:
            async with self._turns.turn(caller):
                with anyio.fail_after(rules.seconds):
                    for url in urls:
                        bodies.append(await self._followed(url, most, hold, sum(map(len, bodies)), caller))
        except TimeoutError:
            raise FetchProblem(f"did not come within {rules.seconds:g} s", _CHECK, index=len(bodies)) from None
        except FetchProblem as refused:
            refused.index = len(bodies)
            raise
        finally:
            self._present[caller] -= 1
            if not self._present[caller]:
                del self._present[caller]
        return bodies

    async def _followed(self, url: WebUrl, most: int, hold: Callable[[int], object], before: int, caller: str) -> bytes:
        for _ in range(self.rules.redirects + 1):
            async with self._connection(url, caller) as stream:
                try:
                    body = await _get(stream, url, most - before, lambda size: hold(before + size))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError, h11.ProtocolError, OSError):
                    raise FetchProblem("was not answered as HTTP has it", _CHECK) from None
            if isinstance(body, bytes):
                return body
            url = self._redirected(url, body)
        raise FetchProblem(f"is redirected more than {self.rules.redirects} times", _CHECK)

    def _redirected(self, url: WebUrl, location: str) -> WebUrl:
        """Return the URL of a redirect. Raises `FetchProblem`, which does not show it."""
        if location.startswith("//"):
            location = f"{url.scheme}:{location}"
        elif location.startswith("/"):
            location = f"{url.scheme}://{url.authority}{location}"
        try:
            target = self.parse(location)
        except FetchProblem:
            raise FetchProblem("is redirected to a URL that is not fetched", _CHECK) from None
        if (url.scheme, target.scheme) == ("https", "http"):
            raise FetchProblem("is redirected from https to http", _CHECK)
        return target

    @asynccontextmanager
    async def _connection(self, url: WebUrl, caller: str) -> AsyncIterator[anyio.abc.ByteStream]:
        """Connect to one of the checked addresses of a URL's host."""
        stream = await self._connected(await self._addresses(url, caller), url.port)
        try:
            if url.scheme == "http":
                yield stream
            else:
                yield await self._encrypted(stream, url.host)
        finally:
            await anyio.aclose_forcefully(stream)

    async def _addresses(self, url: WebUrl, caller: str) -> list[Address]:
        """Return the addresses of a URL's host; all are allowed. Raises `FetchProblem`."""
        literal = url.address
        addresses = [literal] if literal is not None else await self._resolved(url.host, caller)
        if not addresses or not all(map(self.rules.allows, addresses)):
            raise _refused()
        return addresses

    async def _resolved(self, name: str, caller: str) -> list[Address]:
        def look() -> list[Address]:
            self._lookups.begin(caller)  # here: a thread that is not begun ends none
            try:
                return [ipaddress.ip_address(one) for one in self.rules.resolve(name)]
            except (OSError, ValueError):
                return []
            finally:
                self._lookups.end(caller)

        return await anyio.to_thread.run_sync(look, abandon_on_cancel=True)

    async def _connected(self, addresses: Sequence[Address], port: int) -> anyio.abc.SocketStream:
        for address in addresses[:_TRIES]:
            try:
                with anyio.fail_after(_TRY_SECONDS):
                    stream = await anyio.connect_tcp(str(address), port)
            except OSError:  # the time is up, too
                continue
            if not self.rules.own and _is_own(stream, address):
                await anyio.aclose_forcefully(stream)
                raise _refused()
            return stream
        raise FetchProblem("could not be reached", _CHECK)

    async def _encrypted(self, stream: anyio.abc.SocketStream, host: str) -> anyio.abc.ByteStream:
        try:
            return await TLSStream.wrap(
                stream, server_side=False, hostname=host, ssl_context=self._context, standard_compatible=False
            )
        except ssl.SSLCertVerificationError:
            raise FetchProblem("has a host whose certificate can't be verified", _CHECK) from None
        except (anyio.BrokenResourceError, anyio.EndOfStream, OSError):
            raise FetchProblem("has a host that does not speak TLS", _CHECK) from None


def _is_own(stream: anyio.abc.SocketStream, address: Address) -> bool:
    """True if a connection leads to this machine itself: both of its ends have the same address."""
    local = str(stream.extra(SocketAttribute.local_address)[0]).partition("%")[0]
    return ipaddress.ip_address(local) == address


def _refused() -> FetchProblem:
    """Return the problem of inside hosts and of names that do not exist."""
    return FetchProblem("is at no public host", _PUBLIC)


async def _get(stream: anyio.abc.ByteStream, url: WebUrl, most: int, hold: Callable[[int], object]) -> bytes | str:
    """Request a URL. Return the body of the response, or where it redirects to."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
    headers = [
        ("Host", url.authority), ("User-Agent", f"rekindle/{VERSION}"), ("Accept", "image/*"),
        ("Accept-Encoding", "identity"), ("Connection", "close"),
    ]  # fmt: skip
    request = connection.send(h11.Request(method="GET", target=url.target, headers=headers))
    await stream.send((request or b"") + (connection.send(h11.EndOfMessage()) or b""))
    body, interim, pieces = bytearray(), 0, 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(await stream.receive(_BLOCK))
            except anyio.EndOfStream:
                connection.receive_data(b"")
        elif isinstance(event, h11.InformationalResponse):
            interim += 1
            if interim > _INTERIM:
                raise FetchProblem("was not answered as HTTP has it", _CHECK)
        elif isinstance(event, h11.Response):
            location = _checked(event, most)
            if location is not None:
                return location
        elif isinstance(event, h11.Data):
            body += event.data
            pieces += 1
            if len(body) > most:
                raise _too_large(most)
            hold(sys.getsizeof(body))
            if pieces > _PIECES + len(body) // _PIECE_BYTES:
                raise FetchProblem("comes in too many pieces", _CHECK)
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        else:
            raise FetchProblem("was not answered as HTTP has it", _CHECK)


def _checked(response: h11.Response, most: int) -> str | None:
    """Return where a response redirects to; None if its body is to be read. Raises `FetchProblem` for all others."""
    fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers]
    if response.status_code in _REDIRECTS:
        locations = [value for name, value in fields if name == "location"]
        if len(locations) != 1:
            raise FetchProblem("is redirected to nowhere", _CHECK)
        return locations[0]
    if response.status_code != 200:
        raise FetchProblem(f"is answered with the status {response.status_code}", _CHECK)
    for name, value in fields:
        if name == "content-encoding" and value.lower() != "identity":
            raise FetchProblem("comes compressed, which was not asked for", _CHECK)
        if name == "content-length" and int(value[:20]) > most:
            raise _too_large(most)
    return None


def _too_large(most: int) -> FetchProblem:
    return FetchProblem(f"has more than the {most:,} bytes that the request may still have", "Send less", large=True)
