"""The extensions of requests that need no more than the records do. `RequestTaps` is another one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from rekindle._src.core.extension import DeviceLoad, Extension

if TYPE_CHECKING:
    from rekindle._src.core.records import GuideLike, Pooling

UNIT = 16  # rows of an adapter's rank


class AdapterLike(Protocol):
    """An adapter's weights, in host memory."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str:
        """A digest of its weights."""
        ...

    @property
    def rank(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptPooling(Extension):
    """The prompt is embedded: its hidden states are pooled, and nothing is generated."""

    kind: Pooling

    @property
    def generates(self) -> bool:
        return False

    def reusable(self, prompt_length: int) -> int:
        return prompt_length - 1 if self.kind == "last" else 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PromptScoring(Extension):
    """The prompt's own tokens have log-probabilities."""

    first: int  # position of the first scores to read, which are for the token after it

    def reusable(self, prompt_length: int) -> int:
        return min(prompt_length, self.first)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterUse(Extension):
    """An adapter is added to the model's weights."""

    adapter: AdapterLike
    digests: tuple[str, ...]  # of its weights

    @property
    def altered(self) -> tuple[str, ...]:
        return self.digests


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterLoad(DeviceLoad):
    """An adapter that is put into a slot and units of the device before a step, in place of their content.

    It takes as many units of `UNIT` rows as its rank needs. The slot's number tells its tokens from others; slot 0
    means none.
    """

    slot: int
    units: tuple[int, ...]
    adapter: AdapterLike


def units_for(rank: int) -> int:
    """Return how many units an adapter of this rank needs."""
    return -(-rank // UNIT)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Guidance(Extension):
    """A guide decides how the text may go on. It changes with each token, on the device's thread."""

    guide: GuideLike

    def another(self) -> Guidance:
        return Guidance(self.guide.copy())
