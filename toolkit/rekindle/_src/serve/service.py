"""What all endpoints of a server share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rekindle._src.core.records import Completion, TextDelta
from rekindle._src.core.version import VERSION
from rekindle._src.serve.contract import SessionLike
from rekindle._src.serve.fields import UnknownFields
from rekindle._src.serve.life import Life
from rekindle._src.serve.logprobs import TokenNames
from rekindle._src.serve.models import Models

FINGERPRINT = f"rekindle-{VERSION}"


class Recorder(Protocol):
    """Takes what the metrics are made of."""

    def http(self, path: str, status: int) -> None:
        """A response was sent; 499 if the client went away first."""

    def clock(self) -> Callable[[TextDelta], object]:
        """To be called with each delta of one request when it is there."""
        ...

    def ended(self, completions: Sequence[Completion]) -> None:
        """The sequences of one prompt have ended."""


class NoMetrics:
    """Records nothing."""

    def http(self, path: str, status: int) -> None: ...

    def clock(self) -> Callable[[TextDelta], object]:
        return _nothing

    def ended(self, completions: Sequence[Completion]) -> None: ...


def _nothing(delta: TextDelta) -> None: ...


class Service:
    """The models, the limits and the state of a server. Its loop owns it."""

    def __init__(
        self,
        models: Models,
        life: Life,
        *,
        strict: bool = False,
        body_limit: int = 32 << 20,
        body_seconds: float = 60.0,
        trust_templates: bool = False,
        metrics: Recorder | None = None,
    ) -> None:
        self.models, self.life, self.strict = models, life, strict
        self.body_limit, self.body_seconds, self.trust_templates = body_limit, body_seconds, trust_templates
        self.metrics: Recorder = metrics or NoMetrics()
        self.unknown: UnknownFields = UnknownFields()
        self._names: dict[str, tuple[SessionLike, TokenNames]] = {}

    def token_names(self, name: str, session: SessionLike) -> TokenNames:
        """The texts of a model's tokens, kept from request to request."""
        found = self._names.get(name)
        if found is None or found[0] is not session:
            found = self._names[name] = session, TokenNames(session.tokenizer)
        return found[1]
