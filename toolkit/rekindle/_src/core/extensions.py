"""The extensions of requests that need no more than the records do. `RequestTaps` is another one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rekindle._src.core.extension import Extension

if TYPE_CHECKING:
    from rekindle._src.core.records import GuideLike, Pooling


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
class Guidance(Extension):
    """A guide decides how the text may go on. It changes with each token, on the device's thread."""

    guide: GuideLike

    def another(self) -> Guidance:
        return Guidance(self.guide.copy())
