"""URLs of strangers, taken apart once, and the addresses that may be connected to for them."""

from __future__ import annotations

import ipaddress
import string
from collections.abc import Iterable
from typing import NamedTuple

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"http": 80, "https": 443}  # of the schemes
LONGEST_URL = 8_192  # characters of a URL
_PLAIN = frozenset(string.ascii_letters + string.digits + "-._~!$&'()*+,;=:@/?%[]")  # what may follow the scheme
_OF_NAMES = frozenset(string.ascii_lowercase + string.digits + "-")
_HEX = frozenset(string.hexdigits)
SEND = "send the picture itself, as data:image/png;base64,…"  # the end of a fix

NETWORKS = tuple(
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
    """A refused URL: its `index` in the request, the `problem`, and a `fix` for the client."""

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
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def address(self) -> Address | None:
        """The address that stands in the place of a name; None for a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


def parse_url(text: str, ports: Iterable[int] = PORTS.values()) -> WebUrl:
    """Return a URL's parts. Raises `FetchProblem` for everything that two readers could take for two hosts."""
    if len(text) > LONGEST_URL:
        raise FetchProblem(f"has {len(text):,} characters; at most {LONGEST_URL:,} are read", f"Shorten it, or {SEND}")
    scheme, mark, rest = text.partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in PORTS:
        raise FetchProblem("is neither an http nor an https URL", f"Pass one of them, or {SEND}")
    rest = rest.partition("#")[0]
    escapes = rest.split("%")[1:]
    if not _PLAIN.issuperset(rest) or not all(len(one) > 1 and _HEX.issuperset(one[:2]) for one in escapes):
        raise FetchProblem("has characters that a URL has to escape", f"Escape them as %20 and so on, or {SEND}")
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
        raise FetchProblem("has no full name of a host", f"Write https://name.example/path, or {SEND}")
    port = PORTS[scheme]
    if colon:
        known = {str(number): number for number in ports}
        if port_text not in known:
            raise FetchProblem("has a port that nothing is fetched from", f"Use 80 or 443, or {SEND}")
        port = known[port_text]
    return WebUrl(scheme, host, port, target if target.startswith("/") else f"/{target}")


def _named_host(text: str) -> str:
    """Return a host in lower case; an empty string unless it is a name of labels or a dotted address."""
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
    return not any(address in network for network in NETWORKS if network.version == address.version)
