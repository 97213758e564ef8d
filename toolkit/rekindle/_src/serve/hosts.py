"""Checks of a request's headers before its key: their size, and the host in them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from rekindle._src.serve.bodies import Scope
from rekindle._src.serve.errors import Refused
from rekindle.errors import ConfigError

MOST_HEADERS = 128
MOST_HEADER_BYTES = 64 << 10  # including the path and the query
_HOST = re.compile(r"(\[[0-9a-f:.]{2,64}\]|[^][:/@\s]{1,253})(:\d{0,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")


class Hosts:
    """The names of a server. The Host header of a request must have one of them.

    A web page can point its own name to 127.0.0.1, and its browser then takes the server for the page's origin. The
    Host header reveals that. Addresses and loopback names are always allowed. Unless names are `allowed` explicitly,
    every name is allowed in a request with a key, which such a page does not know, and from another machine.
    """

    def __init__(self, allowed: str | Sequence[str] = ()) -> None:
        names = [allowed] if isinstance(allowed, str) else list(allowed)
        for name in names:
            if not isinstance(name, str) or not re.fullmatch(r"\*|(\*\.)?[^][:/@\s*]{1,253}", name):
                fix = 'Pass names without a port, such as "llm.example.org" or "*.example.org"'
                raise ConfigError("allowed_hosts", name, "is not the name of a host", fix)
        self._explicit = bool(names)
        self._names = {name.lower().rstrip(".") for name in names}

    def add(self, name: str) -> None:
        """Allow the name of the server's own address, too."""
        self._names.add(name.lower().rstrip("."))

    def check(self, scope: Scope, *, keyed: bool) -> None:
        """Raise `Refused` (400, 403) for a request to another name."""
        values = [value for name, value in scope["headers"] if name == b"host"]
        if len(values) > 1:
            raise Refused(400, f"there are {len(values)} Host headers. Send one", code="bad_host")
        if not values or not (self._explicit or (not keyed and _is_loopback((scope.get("server") or ("",))[0]))):
            return
        host = values[0].decode("latin-1").lower()
        match = _HOST.fullmatch(host)
        if match is None or not self._allows(match[1].strip("[]").rstrip(".")):
            raise Refused(
                403,
                f"Host {host[:200]!r} is not a name of this server. Use its address or localhost, or start it with "
                "--allowed-host and this name",
                code="host_not_allowed",
            )

    def _allows(self, name: str) -> bool:
        if name in self._names or "*" in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        if any(allowed.startswith("*.") and name.endswith(allowed[1:]) for allowed in self._names):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _is_loopback(address: object) -> bool:
    try:
        parsed = ipaddress.ip_address(str(address))
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def check_size(scope: Scope) -> None:
    """Raise `Refused` (431) for more headers than clients send."""
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers) + len(scope.get("raw_path") or b"")
    if len(headers) > MOST_HEADERS or size + len(scope.get("query_string") or b"") > MOST_HEADER_BYTES:
        raise Refused(
            431,
            f"the request has {len(headers):,} headers and {size:,} bytes of them; {MOST_HEADERS} and "
            f"{MOST_HEADER_BYTES:,} are the most. Send fewer",
            code="headers_too_large",
        )


def check_origins(origins: Sequence[str]) -> None:
    """Raise `ConfigError` for an origin that no browser sends."""
    for origin in origins:
        if not isinstance(origin, str) or not (origin == "*" or _ORIGIN.fullmatch(origin)):
            fix = "Use what browsers send, such as https://example.com or http://localhost:3000, or * for all"
            raise ConfigError("cors_origins", origin, "is not an origin", fix)
