"""An entry in the list of capabilities.

Entries are imported wherever requests are made, also without JAX. So they import what they make when they make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle._src.capabilities.additions import Additions, CheckedAdditions
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.core.config import ResolvedConfig
    from rekindle._src.core.contracts import TokenizerLike
    from rekindle._src.core.extension import Extension, SentExtension
    from rekindle._src.core.records import Request
    from rekindle._src.dispatch.backend import Front, Services
    from rekindle._src.dispatch.capability import Capability


class CapabilityEntry:
    """A capability that does nothing, and the base of all others."""

    name: str = ""  # of its part of a request that is sent to another process

    def intake(self) -> Sequence[Capability]:
        """Return new objects that take part in intake, in the order of their checks."""
        return ()

    def plan(self, arguments: OpenArguments) -> CapabilityPlan | None:
        """Return its plan for an opening; None if it plans nothing. Raise typed errors for damaged files."""
        return None

    def services(self, tokenizer: TokenizerLike, vocab_size: int | None, config: ResolvedConfig) -> Services:
        """Return the services of a session that is made over existing parts, without an opening."""
        return {}

    # Its arguments of `open`.

    def checked(self, additions: Additions) -> CheckedAdditions:
        """Return its own among the arguments of `open`, as far as they are checked without JAX. Raise ConfigError."""
        return {}

    def complete(self, additions: CheckedAdditions) -> CheckedAdditions:
        """Return its own arguments, checked in full on the session's thread. Raise ConfigError."""
        return {}

    def refuse_processes(self, additions: CheckedAdditions) -> None:
        """Raise ConfigError for arguments that need a model in one process."""

    # Of requests that run in another process than the one that takes them in.

    own_options: frozenset[str] = frozenset()  # of `Sampling`, which stay in the process of the caller

    def sent(self, request: Request) -> SentExtension | None:
        """Return its part of a request for the process that runs it; None if it has none."""
        return None

    def received(self, fields: Any) -> Extension:
        """Return the sent fields as an extension of the submission in the other process.

        Raise TypeError, ValueError or LookupError for anything malformed: it comes from another process.
        """
        raise ValueError("it has no part of a request")

    def facts(self, front: Front) -> object:
        """Return a value for fronts in other processes. It is pickled."""
        return None

    def remote(self, facts: Any, tokenizer: TokenizerLike) -> Services:
        """Return the services of a front that runs no requests itself, from the `facts` of the front that does."""
        return {}
