"""Admission of requests (their headers' size and host, how many may wait), those in progress, and the shutdown."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rekindle._src.serve.bodies import Scope
from rekindle._src.serve.errors import ApiError, unavailable
from rekindle.errors import ConfigError

CHARACTERS_PER_TOKEN = 4  # an estimate, until the prompt is tokenized
LONGEST_DRAIN = 86_400  # seconds
_LONGEST_NAME = 64  # of a client that a proxy on this machine names, in X-Forwarded-For: any text of a header
_LONGEST_WAIT = 60.0  # seconds, the most that Retry-After asks for

MOST_HEADERS = 128
MOST_HEADER_BYTES = 64 << 10  # including the path and the query
_HOST = re.compile(r"(\[[0-9a-f:.]{2,64}\]|[^][:/@\s]{1,253})(:\d{0,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")


class Cancellable(Protocol):
    """A request in a session, or its place in the line of a model."""

    @property
    def done(self) -> bool: ...
    def cancel(self) -> None: ...


class Active:
    """One HTTP request with its requests in a session."""

    __slots__ = ("_waiting", "began", "handles", "id", "key", "life", "named")

    def __init__(self, life: Life, request_id: str, key: bytes, tokens: int, *, named: bool) -> None:
        self.life, self.id, self.key, self.named = life, request_id, key, named
        self.handles: list[Cancellable] = []
        self.began = time.perf_counter()
        self._waiting = tokens  # tokens of its prompts, until one of them runs
        life.queued_tokens += tokens

    def started(self) -> None:
        """Note the first token: the prompts no longer wait."""
        self.life.queued_tokens -= self._waiting
        self._waiting = 0

    def cancel(self) -> None:
        for handle in self.handles:
            if not handle.done:
                handle.cancel()


class Life:
    """The requests in progress and the bounds on them.

    The server's loop owns it; only `draining` may be set in another thread or a signal handler.
    """

    def __init__(self, *, max_queued_tokens: int) -> None:
        self.draining: bool = False
        self.max_queued_tokens: int = max_queued_tokens
        self.queued_tokens: int = 0  # about, of prompts without a first token
        self.cut: bool = False  # the requests in progress were aborted at shutdown
        self.active: set[Active] = set()
        self._mean_seconds = 1.0  # of recent requests
        self.on_idle: Callable[[], object] | None = None  # called after the last request ends

    def check(self) -> None:
        """Raise `ApiError` if the server takes no more requests."""
        if self.draining:
            raise unavailable("the server is shutting down. Send the request again, to the server that follows it")

    @contextmanager
    def request(
        self, request_id: str, key: bytes, tokens: int, *, named: bool = True, since: Active | None = None
    ) -> Iterator[Active]:
        """Admit a request with about `tokens` tokens in its prompts. At its end, abort its unfinished handles.

        `named`: the id comes from the body, so it must be unique; a header's id need not be, since proxies trace
        several requests by one. Raise `ApiError` if the server drains, too many tokens wait, or a request of this key
        with this id is in progress; what others call theirs is no reason. `since` is this request while it waited for
        its model: it is admitted, also if the server drains by now.
        """
        if since is None or self.cut:
            self.check()
        if self.queued_tokens and self.queued_tokens + tokens > self.max_queued_tokens:
            raise ApiError(
                429,
                f"{self.queued_tokens:,} prompt tokens wait already, and {self.max_queued_tokens:,} may. "
                "Send the request again later",
                type="rate_limit_error",
                code="queue_full",
                retry_after=self.retry_after,
            )
        others = (other for other in self.active if other.named and other is not since)
        if named and any((other.id, other.key) == (request_id, key) for other in others):
            raise ApiError(400, f"request_id={request_id!r}: lives already. Use a new one", param="request_id")
        active = Active(self, request_id, key, tokens, named=named)
        self.active.add(active)
        try:
            yield active
        finally:
            active.started()
            active.cancel()
            self.active.discard(active)
            self._mean_seconds += (time.perf_counter() - active.began - self._mean_seconds) / 16
            if not self.active and self.on_idle is not None:
                self.on_idle()

    @property
    def retry_after(self) -> float:
        """Seconds after which a refused client may try again: about the duration of a request."""
        return min(_LONGEST_WAIT, max(1.0, self._mean_seconds))

    def abort(self, request_ids: Collection[str], key: bytes) -> set[str]:
        """Abort this key's requests with these ids. Return the ids found."""
        matches = [active for active in self.active if active.id in request_ids and active.key == key]
        for active in matches:
            active.cancel()
        return {active.id for active in matches}

    def abort_all(self) -> None:
        """Abort every request, because the server ends. Each answer ends with an error that clients may retry."""
        self.cut = True
        for active in tuple(self.active):
            active.cancel()


def address_of(client: Sequence[Any] | None) -> str:
    """Return the address that limits count by: an IPv4 address, or the first 64 bits of an IPv6 one."""
    if client is None:
        return ""
    host = str(client[0])
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:_LONGEST_NAME]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Address(int(address) >> 64 << 64))
    return str(address)


def seconds_to_drain(option: str, value: float) -> float:
    """Return the seconds that answers may go on when the server ends. Raise `ConfigError` if out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_DRAIN:
        raise ConfigError(option, value, f"is not a number of seconds from 0 to {LONGEST_DRAIN:,}", "Use 30")
    return float(value)


def check_bound(option: str, most: int) -> None:
    """Raise `ConfigError` for an invalid bound."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(option, most, "is not a whole number above 0", "Leave it out for the default")


def estimate(prompts: Sequence[str | Sequence[int]]) -> int:
    """Return an estimate of the number of tokens of prompts."""
    return sum(len(text) // CHARACTERS_PER_TOKEN + 1 if isinstance(text, str) else len(text) for text in prompts)


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
        """Raise `ApiError` (400, 403) for a request to another name."""
        values = [value for name, value in scope["headers"] if name == b"host"]
        if len(values) > 1:
            raise ApiError(400, f"there are {len(values)} Host headers. Send one", code="bad_host")
        if not values or not (self._explicit or (not keyed and _is_loopback((scope.get("server") or ("",))[0]))):
            return
        host = values[0].decode("latin-1").lower()
        match = _HOST.fullmatch(host)
        if match is None or not self._allows(match[1].strip("[]").rstrip(".")):
            raise ApiError(
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
    """Raise `ApiError` (431) for more headers than clients send."""
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers) + len(scope.get("raw_path") or b"")
    if len(headers) > MOST_HEADERS or size + len(scope.get("query_string") or b"") > MOST_HEADER_BYTES:
        raise ApiError(
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
