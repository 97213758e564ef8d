"""Followers: keep a step feature's state for one request, and take the request's results.

Most requests have none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rekindle._src.core.extension import Extension
from rekindle._src.core.records import FinishReason, Request, Row, RowResult
from rekindle._src.kvcache import PrefixCache


class Follower:
    """Follows one request; the base of all others."""

    __slots__ = ()
    keeps = False  # what it follows goes to the cache, too: `published` is called

    def reusable(self, known: int) -> int:
        """Return how many of the `known` tokens may have pages from the cache: of others results are still needed."""
        return known

    def begin(self, start: int) -> None:
        """Begin anew: the request was admitted, with the positions before `start` from the cache."""

    def take(self, row: Row, output: RowResult) -> RowResult:
        """Take the result of a committed row. Return the result for the caller."""
        return output

    def ends(self, output: RowResult) -> FinishReason | None:
        """Return why the text ends with a row's token; None if it may go on.

        LENGTH stands for the request's own limit. A text that ends before `min_tokens` is an error, unless by EOS.
        """
        return None

    def describe(self) -> str:
        """Return a line of the explanation of a request that has generated tokens, after their number; or nothing."""
        return ""

    def published(self, names: Sequence[bytes]) -> None:
        """Note that the request's leading pages are in the cache by these names."""


class CostlyFollower(Follower):
    """A follower of a request with tokens that take time on the host while a step waits; see `slow_rows`."""

    __slots__ = ()
    cost: float  # seconds that it is likely to take for the next token
    turn: int  # when it last ran although it is slow

    @abstractmethod
    def ran(self, turn: int) -> None:
        """Note that it runs in this turn although it is slow."""

    @abstractmethod
    def seconds(self, output: RowResult) -> float:
        """Return how long the host worked for the token of a row."""


class FollowedExtension(Extension):
    """An extension with a follower in the scheduler. The base of all others."""

    __slots__ = ()

    @abstractmethod
    def follower(self, request: Request, cache: PrefixCache | None) -> Follower | None:
        """Return a new follower of the request; None if it needs none. Requests share pages through the `cache`."""


class SequenceExtensions:
    """The decisions of a request's extensions for its sequence, and their followers. Most requests have none."""

    __slots__ = ("_holding", "costly", "cutting", "ends_in_row", "followers")

    def __init__(self, request: Request, cache: PrefixCache | None = None) -> None:
        """Make the followers; the `cache` has the request's pages, if requests share any."""
        extensions, last = request.extensions, request.prompt_length - 1
        self._holding = extensions.holding
        self.cutting = extensions.cutting  # decide where the prompt is cut
        self.ends_in_row = any(start <= last < stop for start, stop in extensions.embedded)
        followed = [one for one in extensions.values() if isinstance(one, FollowedExtension)] if extensions else ()
        made = [follower for one in followed if (follower := one.follower(request, cache)) is not None]
        self.followers: tuple[Follower, ...] = tuple(made)
        self.costly = next((one for one in made if isinstance(one, CostlyFollower)), None)

    @property
    def steady(self) -> bool:
        """True if nothing follows its tokens, and steps may always have the sequence."""
        return not self.followers and not self._holding

    @property
    def held(self) -> bool:
        """True while no step may have the sequence, because too many of its captures wait for their disk."""
        return bool(self._holding) and any(extension.held for extension in self._holding)

    def reusable(self, known: int) -> int:
        """Return how many of the `known` tokens may have pages from the cache."""
        return min((one.reusable(known) for one in self.followers), default=known)

    def begin(self, start: int) -> None:
        """Begin anew: the request was admitted, with the positions before `start` from the cache."""
        for follower in self.followers:
            follower.begin(start)

    def take(self, row: Row, output: RowResult) -> RowResult:
        """Take the result of a committed row. Return the result for the caller."""
        for follower in self.followers:
            output = follower.take(row, output)
        return output

    def ends(self, output: RowResult) -> FinishReason | None:
        """Return why the text ends with a row's token; None if it may go on. See `Follower.ends`."""
        for follower in self.followers:
            if (reason := follower.ends(output)) is not None:
                return reason
        return None

    def describe(self) -> list[str]:
        """Return the followers' lines of an explanation."""
        return [line for follower in self.followers if (line := follower.describe())]
