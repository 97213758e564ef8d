"""Adapters as a capability of requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from rekindle._src.core.extension import Extension
from rekindle._src.core.records import IntArray
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.backend import Front, SessionService, Submission
from rekindle._src.dispatch.capability import Capability, KeyedPrompt
from rekindle.errors import InvalidRequest


class AdaptersLike(Protocol):
    """The adapters of a session or a fleet."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def use(self, value: str | Mapping[str, float]) -> Extension:
        """Return the extension of a request with this option. Raise `InvalidRequest` for an unknown name."""
        ...


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
class AdapterUse(Extension):
    """An adapter is added to the model's weights."""

    adapter: AdapterLike
    digests: tuple[str, ...]  # of its weights

    @property
    def altered(self) -> tuple[str, ...]:
        return self.digests


ADAPTERS: SessionService[AdaptersLike] = SessionService("adapters")


class AdapterIntake(Capability[None]):
    """Adapters of the session."""

    def admit(self, submission: Submission, token_ids: IntArray, front: Front, resource: None) -> Extension | None:
        return self._use(submission.sampling, front)

    def keying(self, prompt: KeyedPrompt, front: Front) -> Extension | None:
        return self._use(prompt.sampling, front)

    def _use(self, sampling: Sampling, front: Front) -> Extension | None:
        if sampling.adapter is None:
            return None
        adapters = ADAPTERS.of(front)
        if adapters is None:
            fix = "Use a session of one device, opened with rekindle.open"
            raise InvalidRequest("adapter", sampling.adapter, "can't be used here", fix)
        return adapters.use(sampling.adapter)
