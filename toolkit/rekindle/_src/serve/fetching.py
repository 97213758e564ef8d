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
import string
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
import h11
from anyio.abc import SocketAttribute
from anyio.streams.tls import TLSStream

from rekindle._src.core.version import VERSION
from rekindle._src.dispatch.intake import Turns
from rekindle._src.serve.errors import unavailable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PORTS = {"http": 80, "https": 443}  # of the schemes
_LONGEST = 8_192  # characters of a URL
_PLAIN = frozenset(string.ascii_letters + string.digits + "-._~!$&'()*+,;=:@/?%[]")  # what may follow the scheme
_OF_NAMES = frozenset(string.ascii_lowercase + string.digits + "-")
_HEX = frozenset(string.hexdigits)
_HEAD_BYTES = 16 << 10
_BLOCK = 64 << 10
_INTERIM = 8  # responses before the one that counts
_PIECES, _PIECE_BYTES = 1_024, 64  # a body may have so many pieces, and one more for each so many bytes
_TRIES, _TRY_SECONDS = 4, 3.0  # addresses of a name that are tried, and the time that a connection to one may take
_REDIRECTS = frozenset((301, 302, 303, 307, 308))

_SEND = "send the picture itself, as data:image/png;base64,…"
_PUBLIC = f"Name a public host, or {_SEND}"
_CHECK = f"Check it, or {_SEND}"

_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/3",  # multicast, reserved, broadcast
        "168.63.129.16/32",  # the host of a machine at Azure
        "2001::/23", "2002::/16",  # Teredo and other protocols, 6to4
        "2001:db8::/32", "3fff::/20",  # documents
    )
)  # fmt: skip
# All other addresses of the sixth version are refused: unspecified, loopback, mapped, NAT64, local, multicast.
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


class FetchProblem(Exception):
    """A URL that is not fetched: `index` of those that were given, the `problem` and a `fix` for the client."""

    def __init__(self, problem: str, fix: str, *, index: int = 0, large: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.fix, self.index, self.large = problem, fix, index, large


class WebUrl(NamedTuple):
    """An http or https URL, taken apart. Checks and requests read these parts, and never the text."""

    scheme: str
    host: str  # a name in lower case, or an address
    port: int
    target: str  # path and query

    @property
    def authority(self) -> str:
        """The host, and the port if it is not the scheme's: the value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def address(self) -> Address | None:
        """The address that stands in the place of a name; None for a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


def parse_url(text: str, ports: Iterable[int] = _PORTS.values()) -> WebUrl:
    """Return a URL's parts. Raises `FetchProblem` for everything that two readers could take for two hosts."""
    if len(text) > _LONGEST:
        raise FetchProblem(f"has {len(text):,} characters; at most {_LONGEST:,} are read", f"Shorten it, or {_SEND}")
    scheme, mark, rest = text.partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in _PORTS:
        raise FetchProblem("is neither an http nor an https URL", f"Pass one of them, or {_SEND}")
    rest = rest.partition("#")[0]
    escapes = rest.split("%")[1:]
    if not _PLAIN.issuperset(rest) or not all(len(one) > 1 and _HEX.issuperset(one[:2]) for one in escapes):
        raise FetchProblem("has characters that a URL has to escape", f"Escape them as %20 and so on, or {_SEND}")
    end = min((place for place in map(rest.find, "/?") if place >= 0), default=len(rest))
    authority, target = rest[:end], rest[end:]
    if authority.startswith("["):
        host, bracket, after = authority[1:].partition("]")
        host = _address_of(host, ipaddress.IPv6Address) if bracket and after[:1] in ("", ":") else ""
        colon, port_text = bool(after), after[1:]
    else:
        host, mark, port_text = authority.partition(":")
        host, colon = _named_host(host), bool(mark)
    if not host:
        raise FetchProblem("has no full name of a host", f"Write https://name.example/path, or {_SEND}")
    port = _PORTS[scheme]
    if colon:
        known = {str(number): number for number in ports}
        if port_text not in known:
            raise FetchProblem("has a port that nothing is fetched from", f"Use 80 or 443, or {_SEND}")
        port = known[port_text]
    return WebUrl(scheme, host, port, target if target.startswith("/") else f"/{target}")


def _named_host(text: str) -> str:
    """Return a host in lower case; an empty string for what is neither a name of labels nor a dotted address."""
    text = text.lower()
    labels = text.split(".")
    if len(text) > 253 or len(labels) < 2 or not all(map(_is_label, labels)):
        return ""
    if labels[-1][0].isdigit():  # some readers take any such name for an address
        return _address_of(text, ipaddress.IPv4Address)
    return text


def _is_label(label: str) -> bool:
    return 0 < len(label) < 64 and _OF_NAMES.issuperset(label) and label[0] != "-" and label[-1] != "-"


def _address_of(text: str, kind: type[Address]) -> str:
    try:
        return "" if "%" in text else str(kind(text))
    except ValueError:
        return ""


def is_public(address: Address) -> bool:
    """True if an address is one of the public Internet, in no range that leads elsewhere."""
    if address.version == 6 and address not in _GLOBAL_UNICAST:
        return False
    return not any(address in network for network in _NETWORKS if network.version == address.version)


def resolved(name: str) -> list[str]:
    """Return the addresses of a name, as the system resolves it."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


@dataclass(frozen=True)
class FetchRules:
    """Where may be fetched from, and within which bounds."""

    resolve: Callable[[str], Sequence[str]] = resolved  # called in a thread
    allows: Callable[[Address], bool] = is_public
    own: bool = False  # True: addresses of this machine may be fetched from
    ports: frozenset[int] = frozenset(_PORTS.values())
    redirects: int = 3
    seconds: float = 10.0  # for all URLs of a request, from its turn on
    places: int = 8  # requests that fetch at a time
    present: int = 16  # requests of one caller that fetch or wait for a place
    lookups: int = 32  # names that are resolved at a time, those included that nobody waits for any more
    context: ssl.SSLContext | None = None  # None: the system's authorities are trusted


class Fetcher:
    """Fetches URLs for requests, which take turns between callers. It belongs to one event loop."""

    def __init__(self, rules: FetchRules | None = None) -> None:
        self.rules: FetchRules = rules or FetchRules()
        self._turns = Turns(self.rules.places)
        self._present = Counter[str]()  # requests of each caller
        self._lookups = threading.BoundedSemaphore(self.rules.lookups)  # a lookup can't be cut short
        self._context = self.rules.context or ssl.create_default_context()

    def parse(self, text: str) -> WebUrl:
        """Return a URL that may be fetched, if its addresses may. Raises `FetchProblem`."""
        return parse_url(text, self.rules.ports)

    async def fetch(self, urls: Sequence[WebUrl], *, most: int, caller: str = "") -> list[bytes]:
        """Return what URLs lead to, at most `most` bytes in all.

        Raises `FetchProblem`, and `ApiError` (503) if too many requests of the caller wait.
        """
        rules, bodies = self.rules, list[bytes]()
        if self._present[caller] >= rules.present:
            raise unavailable(f"{rules.present} requests of this client wait for pictures that are fetched")
        self._present[caller] += 1
        try:
            async with self._turns.turn(caller):
                with anyio.fail_after(rules.seconds):
                    for url in urls:
                        bodies.append(await self._followed(url, most - sum(map(len, bodies))))
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

    async def _followed(self, url: WebUrl, most: int) -> bytes:
        for _ in range(self.rules.redirects + 1):
            async with self._connection(url) as stream:
                try:
                    body = await _get(stream, url, most)
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
    async def _connection(self, url: WebUrl) -> AsyncIterator[anyio.abc.ByteStream]:
        """Connect to one of the addresses of a URL's host, each of which was checked."""
        stream = await self._connected(await self._addresses(url), url.port)
        try:
            if url.scheme == "http":
                yield stream
            else:
                yield await self._encrypted(stream, url.host)
        finally:
            await anyio.aclose_forcefully(stream)

    async def _addresses(self, url: WebUrl) -> list[Address]:
        """Return the addresses of a URL's host, all of which are allowed. Raises `FetchProblem`."""
        literal = url.address
        addresses = [literal] if literal is not None else await self._resolved(url.host)
        if not addresses or not all(map(self.rules.allows, addresses)):
            raise _refused()
        return addresses

    async def _resolved(self, name: str) -> list[Address]:
        def look() -> list[Address] | None:
            if not self._lookups.acquire(blocking=False):
                return None
            try:
                return [ipaddress.ip_address(one) for one in self.rules.resolve(name)]
            except (OSError, ValueError):
                return []
            finally:
                self._lookups.release()

        addresses = await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
        if addresses is None:
            raise unavailable("too many names of hosts are being resolved")
        return addresses

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
    """Return the problem of inside hosts. It is that of names that do not exist, too."""
    return FetchProblem("is at no public host", _PUBLIC)


async def _get(stream: anyio.abc.ByteStream, url: WebUrl, most: int) -> bytes | str:
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
