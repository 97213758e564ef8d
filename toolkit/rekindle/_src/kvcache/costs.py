"""The costs of bringing a cached page back and of computing it, as measured in this session."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Literal

from rekindle._src.core import html
from rekindle._src.core.records import StepResult

_MEMORY = 9  # measurements
_RETRY = 16  # a refused copy is tried every so often, or a bad measurement would never be corrected
_MOST_DECODE = 0.25  # a step with a larger share of decode rows says little about the cost of prefill


class _Rate:
    """Seconds per unit: the median of the latest measurements. A single one can be a thousand times too long when it
    shared its time with a compilation or with another process."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_MEMORY)

    def record(self, units: float, seconds: float) -> None:
        self._latest.append(seconds / units)

    @property
    def value(self) -> float | None:
        ordered = sorted(self._latest)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[~middle]) / 2 if ordered else None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Rates(html.Record):
    """Seconds, None where nothing was measured yet."""

    compute_token: float | None
    copy_page: float | None  # host to device
    load_page: float | None  # disk to host, checksum included

    _seconds = ("compute_token", "copy_page", "load_page")

    def __str__(self) -> str:
        lines = (
            f"{label} {'not measured yet' if value is None else html.seconds(value)}"
            for label, value in (
                ("computing a token:", self.compute_token),
                ("copying a page from host memory:", self.copy_page),
                ("reading a page from disk:", self.load_page),
            )
        )
        return "\n".join(lines)


class CostModel:
    """Decides whether to copy a prefix or to compute it again. A copy that was not measured yet counts as free.

    `mode` overrides the decision: "always" or "never" copy.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.mode: Literal["measured", "always", "never"] = "measured"
        self.refused = 0  # copies that would have cost more than computing
        self._compute, self._copy, self._load = _Rate(), _Rate(), _Rate()

    def observe(self, result: StepResult) -> None:
        """Measure the cost of a committed step's tokens. Steps that copied pages, decoded much or had few tokens say
        little about that and are left out."""
        plan = result.plan
        if (
            not plan.restore
            and plan.prefill_tokens >= self.page_size
            and len(plan.decode) <= _MOST_DECODE * plan.tokens
        ):
            self._compute.record(plan.tokens, result.device_seconds)

    def record_copy(self, pages: int, seconds: float) -> None:
        self._copy.record(pages, seconds)

    def record_load(self, pages: int, seconds: float) -> None:
        self._load.record(pages, seconds)

    def fetch_seconds(self, pages: int, *, from_disk: int = 0) -> float:
        """Return the seconds to bring `pages` to the device, `from_disk` of which are not in host memory yet."""
        return pages * (self._copy.value or 0.0) + from_disk * (self._load.value or 0.0)

    def compute_seconds(self, pages: int) -> float | None:
        rate = self._compute.value
        return None if rate is None else pages * self.page_size * rate

    def worth(self, pages: int, *, from_disk: int = 0) -> bool:
        """True if bringing `pages` back is expected to be quicker than computing them."""
        if self.mode != "measured":
            return self.mode == "always"
        compute = self.compute_seconds(pages)
        if not pages or compute is None or self.fetch_seconds(pages, from_disk=from_disk) <= compute:
            return True
        self.refused += 1
        return self.refused % _RETRY == 0

    @property
    def rates(self) -> Rates:
        return Rates(self._compute.value, self._copy.value, self._load.value)
