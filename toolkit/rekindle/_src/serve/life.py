"""Admission of requests, the requests in progress, and the server's shutdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rekindle._src.serve.contract import HandleLike
from rekindle._src.serve.errors import Refused, unavailable
from rekindle.errors import ConfigError

CHARACTERS_PER_TOKEN = 4  # an estimate, until the prompt is tokenized
LONGEST_DRAIN = 86_400  # seconds
_LONGEST_WAIT = 60.0  # seconds, the most that Retry-After asks for


class Active:
    """One HTTP request with its requests in a session."""

    __slots__ = ("_waiting", "began", "handles", "id", "key", "life", "named")

    def __init__(self, life: Life, request_id: str, key: bytes, tokens: int, *, named: bool) -> None:
        self.life, self.id, self.key, self.named = life, request_id, key, named
        self.handles: list[HandleLike] = []
        self.began = time.perf_counter()
        self._waiting = tokens  # tokens of its prompts, until one of them runs
        life.queued_tokens += tokens

    def started(self) -> None:
        """Note the first token: the prompts no longer wait."""
        self.life.queued_tokens -= self._waiting
        self._waiting = 0

    def cancel(self) -> None:
        """Abort its unfinished handles."""
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
        """Raise `Refused` if the server takes no more requests."""
        if self.draining:
            raise unavailable("the server is shutting down. Send the request again, to the server that follows it")

    @contextmanager
    def request(self, request_id: str, key: bytes, tokens: int, *, named: bool = True) -> Iterator[Active]:
        """Admit a request with about `tokens` tokens in its prompts. At its end, abort its unfinished handles.

        `named`: the id comes from the body, so it must be unique; a header's id need not be, since proxies trace
        several requests by one. Raise `Refused` if the server drains, too many tokens wait, or a request with this
        id is in progress.
        """
        self.check()
        if self.queued_tokens and self.queued_tokens + tokens > self.max_queued_tokens:
            raise Refused(
                429,
                f"{self.queued_tokens:,} prompt tokens wait already, and {self.max_queued_tokens:,} may. "
                "Send the request again later",
                type="rate_limit_error",
                code="queue_full",
                retry_after=self.retry_after,
            )
        if named and any(other.named and other.id == request_id for other in self.active):
            raise Refused(400, f"request_id={request_id!r}: lives already. Use a new one", param="request_id")
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

    def abort(self, request_id: str, key: bytes) -> bool:
        """Abort this key's requests with an id. Return False if there are none."""
        matches = [active for active in self.active if active.id == request_id and active.key == key]
        for active in matches:
            active.cancel()
        return bool(matches)

    def abort_all(self) -> None:
        """Abort every request, because the server ends. Each answer ends with an error that clients may retry."""
        self.cut = True
        for active in tuple(self.active):
            active.cancel()


def seconds_to_drain(option: str, value: float) -> float:
    """Return the seconds that answers may go on when the server ends. Raise `ConfigError` if out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_DRAIN:
        raise ConfigError(option, value, f"is not a number of seconds from 0 to {LONGEST_DRAIN:,}", "Use 30")
    return float(value)


def check_connections(most: int | None) -> None:
    """Raise `ConfigError` for an invalid bound on connections."""
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ConfigError("max_connections", most, "is not a whole number above 0", "Leave it out for the default")


def estimate(prompts: Sequence[str | Sequence[int]]) -> int:
    """Return an estimate of the number of tokens of prompts."""
    return sum(len(text) // CHARACTERS_PER_TOKEN + 1 if isinstance(text, str) else len(text) for text in prompts)
