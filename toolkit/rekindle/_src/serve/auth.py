"""API keys, and the guard in front of the app."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from rekindle._src.serve.bodies import header
from rekindle._src.serve.errors import Refused
from rekindle._src.serve.exchange import Dialect, Exchange, OpenAI, Receive, Scope, Send
from rekindle._src.serve.hosts import check_size
from rekindle._src.serve.service import Service
from rekindle.errors import ConfigError

OPEN_PATHS = frozenset(("/health", "/ping"))  # for load balancers


class Keys:
    """The API keys of a server, compared in constant time. Without any, every request may pass."""

    def __init__(self, keys: str | Sequence[str] | None) -> None:
        entries = [keys] if isinstance(keys, str) else list(keys or ())
        for key in entries:
            if not isinstance(key, str) or not key or not key.isascii() or key != key.strip():
                raise ConfigError("api_key", "…", "is not a key", "Pass printable ASCII without spaces around it")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in entries]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, scope: Scope) -> bytes:
        """Return the digest of the sender's key, or b"" without keys. Raise `Refused` (401) for a wrong key."""
        if not self._digests:
            return b""
        bearer = header(scope, b"authorization") or ""
        kind, _, token = bearer.partition(" ")
        key = token.strip() if kind.lower() == "bearer" else header(scope, b"x-api-key") or ""
        digest = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        match = b""
        for candidate in self._digests:  # compare with all, so that the time reveals nothing
            match = candidate if hmac.compare_digest(candidate, digest) else match
        if not match:
            raise Refused(
                401, "the API key is missing or wrong. Send it as Authorization: Bearer … or x-api-key",
                type="authentication_error", code="invalid_api_key",
            )  # fmt: skip
        return match


class Guard:
    """ASGI middleware that passes requests with a valid key, bounded headers and an allowed host."""

    def __init__(self, app: object, keys: Keys, service: Service, dialects: Mapping[str, Dialect]) -> None:
        self._app, self._keys, self._service, self._dialects = app, keys, service, dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_size(scope)
                self._service.hosts.check(scope, keyed=bool(self._keys))
                if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                    scope["rekindle.key"] = self._keys.owner(scope)
            except Refused as refused:
                dialect = self._dialects.get(scope["path"], OpenAI())
                await Exchange(self._service, scope, send).fail(refused, dialect)
                path = (
                    scope["path"] if scope["path"] in self._dialects else "other"
                )  # clients can invent any number of paths
                self._service.metrics.http(path, refused.status)
                return
        await self._app(scope, receive, send)  # type: ignore[operator]
