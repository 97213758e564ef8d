"""Declaring a statistic's figure once: a property, its words, its group in a notebook, and its metrics.

A figure's docstring is what `help()`, a notebook's table and the server's `/metrics` say about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

G = TypeVar("G", bound=Callable[..., object])
Group = Literal["requests", "tokens", "steps", "pages"]


class FigureSpec(NamedTuple):
    """The declaration of one figure."""

    name: str
    group: Group
    words: str
    gauge: str  # the metric that shows it; empty if there is none
    counters: tuple[str, ...]  # the metrics that count it
    own: bool  # vLLM has no metric of that name


FIGURES: dict[str, FigureSpec] = {}


def figure(group: Group, *, gauge: str = "", counters: tuple[str, ...] = (), own: bool = False) -> Callable[[G], G]:
    """Declare the getter below a `@property` as a figure. One name means the same figure everywhere."""

    def declare(getter: G) -> G:
        words = " ".join((getter.__doc__ or "").split())
        FIGURES[getter.__name__] = FigureSpec(getter.__name__, group, words, gauge, counters, own)
        return getter

    return declare


class EngineFigures:
    """The figures that a session has of its engine, and a fleet as the sums over its replicas."""

    __slots__ = ()

    def _figure(self, name: str) -> Any:
        """Return the figure of the engine, or the sum over the replicas."""
        raise NotImplementedError

    @property
    @figure("requests", gauge="num_requests_running")
    def running(self) -> int:
        """Sequences that steps compute now."""
        return int(self._figure("running"))

    @property
    @figure("requests", counters=("requests_aborted",), own=True)
    def aborted(self) -> int:
        """Sequences that were cancelled, timed out, or abandoned by the loop over them."""
        return int(self._figure("aborted"))

    @property
    @figure("requests", counters=("requests_failed",), own=True)
    def failed(self) -> int:
        """Sequences that an error ended."""
        return int(self._figure("failed"))

    @property
    @figure("requests", counters=("num_preemptions",))
    def preemptions(self) -> int:
        """How often a sequence lost its pages to an older one and resumed later."""
        return int(self._figure("preemptions"))

    @property
    @figure("tokens", counters=("prompt_tokens", "prefix_cache_queries"))
    def prompt_tokens(self) -> int:
        """Tokens of all admitted prompts, which are looked up in the prefix cache."""
        return int(self._figure("prompt_tokens"))

    @property
    @figure("tokens", counters=("prefix_cache_hits",))
    def cached_tokens(self) -> int:
        """Prompt tokens that hit the prefix cache."""
        return int(self._figure("cached_tokens"))

    @property
    @figure("tokens")
    def hit_rate(self) -> float:
        """Share of prompt tokens that hit the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    @figure("tokens", counters=("generation_tokens",))
    def generated_tokens(self) -> int:
        """Tokens sampled."""
        return int(self._figure("generated_tokens"))

    @property
    @figure("tokens", counters=("drafted_tokens",), own=True)
    def drafted_tokens(self) -> int:
        """Tokens that drafters proposed and steps computed along with others."""
        return int(self._figure("drafted_tokens"))

    @property
    @figure("tokens", counters=("accepted_tokens",), own=True)
    def accepted_tokens(self) -> int:
        """Drafted tokens that sampling confirmed."""
        return int(self._figure("accepted_tokens"))

    @property
    @figure("tokens")
    def tokens(self) -> int:
        """Positions that steps computed, prompts and decoding together."""
        return int(self._figure("tokens"))

    @property
    @figure("steps", counters=("steps",), own=True)
    def steps(self) -> int:
        """Steps so far."""
        return int(self._figure("steps"))

    @property
    @figure("steps")
    def step_sizes(self) -> dict[int, int]:
        """Steps by their number of tokens, rounded up to a power of two."""
        sizes: dict[int, int] = self._figure("step_sizes")
        return sizes

    @property
    @figure("pages")
    def pages_total(self) -> int:
        """KV pages of the devices."""
        return int(self._figure("pages_total"))

    @property
    @figure("pages")
    def pages_held(self) -> int:
        """KV pages held by running requests."""
        return int(self._figure("pages_held"))
