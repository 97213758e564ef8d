"""What the server has in hand: the requests that run, what it takes on, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rekindle._src.serve.contract import HandleLike
from rekindle._src.serve.errors import Refused, unavailable
from rekindle.errors import ConfigError

CHARACTERS_PER_TOKEN = 4  # an estimate, until the prompt was tokenized
LONGEST_DRAIN = 86_400  # seconds
_LONGEST_WAIT = 60.0  # seconds that Retry-After asks for at most


class Active:
    """One HTTP request that has requests in a session."""

    __slots__ = ("_waiting", "began", "handles", "id", "key", "life", "named")

    def __init__(self, life: Life, request_id: str, key: bytes, tokens: int, *, named: bool) -> None:
        self.life, self.id, self.key, self.named = life, request_id, key, named
        self.handles: list[HandleLike] = []
        self.began = time.perf_counter()
        self._waiting = tokens  # of its prompts, while none of them has run
        life.queued_tokens += tokens

    def started(self) -> None:
        """Its first token is there, so that its prompts no longer wait."""
        self.life.queued_tokens -= self._waiting
        self._waiting = 0

    def cancel(self) -> None:
        """Abort what is left of it."""
        for handle in self.handles:
            if not handle.done:
                handle.cancel()


class Life:
    """Owned by the server's loop; only `draining` may be set in another thread or a signal handler."""

    def __init__(self, *, max_queued_tokens: int) -> None:
        self.draining: bool = False
        self.max_queued_tokens: int = max_queued_tokens
        self.queued_tokens: int = 0  # of prompts that have not begun to be answered, about
        self.cut: bool = False  # what ran when the server ended was aborted
        self.active: set[Active] = set()
        self._mean_seconds = 1.0  # of a request, lately
        self.on_idle: Callable[[], object] | None = None  # called when the last request has ended

    def check(self) -> None:
        """Raise `Refused` if no request is taken on any more."""
        if self.draining:
            raise unavailable("the server is shutting down. Send the request again, to the server that follows it")

    @contextmanager
    def request(self, request_id: str, key: bytes, tokens: int, *, named: bool = True) -> Iterator[Active]:
        """Take a request on, whose prompts have about `tokens` tokens; at its end, whatever it left is aborted.

        `named`: the request was given this id by its sender, so that no other one may have it; proxies trace several
        by one header. Raises `Refused`: the server drains, too many tokens wait already, or a request with the id
        lives.
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
        if named and any(one.named and one.id == request_id for one in self.active):
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
        """Seconds after which a refused client may try again: about what a request takes."""
        return min(_LONGEST_WAIT, max(1.0, self._mean_seconds))

    def abort(self, request_id: str, key: bytes) -> bool:
        """Abort what this key has sent with an id; false if there is nothing."""
        meant = [active for active in self.active if active.id == request_id and active.key == key]
        for active in meant:
            active.cancel()
        return bool(meant)

    def abort_all(self) -> None:
        """Abort every request, because the server ends; each answer ends with an error that clients may retry."""
        self.cut = True
        for active in tuple(self.active):
            active.cancel()


def seconds_to_drain(option: str, value: float) -> float:
    """How long answers may go on when the server ends. Raises `ConfigError` for what is no such time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_DRAIN:
        raise ConfigError(option, value, f"is not a number of seconds from 0 to {LONGEST_DRAIN:,}", "Use 30")
    return float(value)


def check_connections(most: int | None) -> None:
    """Raise `ConfigError` for a bound on connections that is none."""
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ConfigError("max_connections", most, "is not a whole number above 0", "Leave it out for the default")


def estimate(prompts: Sequence[str | Sequence[int]]) -> int:
    """About how many tokens prompts have."""
    return sum(len(one) // CHARACTERS_PER_TOKEN + 1 if isinstance(one, str) else len(one) for one in prompts)
