"""Guides: grammars and rules for the tokens that a text may go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rekindle._src.capabilities.entry import CapabilityEntry

if TYPE_CHECKING:
    from rekindle._src.capabilities.plans import CapabilityPlan, OpenArguments
    from rekindle._src.core.config import ResolvedConfig
    from rekindle._src.core.contracts import TokenizerLike
    from rekindle._src.core.extension import Extension, SentExtension
    from rekindle._src.core.records import Request
    from rekindle._src.dispatch.backend import Front, Services, SessionService
    from rekindle._src.dispatch.capability import Capability


class GuidesEntry(CapabilityEntry):
    """Structures of texts, and tokens that may not come."""

    name = "guide"
    # The structure of a text: its guide has the same in a form that can be sent.
    own_options = frozenset(("schema", "regex", "choice", "grammar", "json", "lenient", "whitespace_flexible"))

    def intake(self) -> Sequence[Capability]:
        from rekindle._src.capabilities.guides.request import StructureIntake

        return (StructureIntake(),)

    def plan(self, arguments: OpenArguments) -> CapabilityPlan:
        from rekindle._src.capabilities.guides.owner import GuidesPlan

        return GuidesPlan()

    def services(self, tokenizer: TokenizerLike, vocab_size: int | None, config: ResolvedConfig) -> Services:
        from rekindle._src.capabilities.guides.request import GRAMMARS
        from rekindle._src.structured.grammar import Grammars
        from rekindle._src.text.tokenizer import Tokenizer

        if not isinstance(tokenizer, Tokenizer):
            return {}
        return {GRAMMARS: Grammars(tokenizer, vocab_size or tokenizer.vocab_size, config.max_requests)}

    def sent(self, request: Request) -> SentExtension | None:
        from rekindle._src.capabilities.guides import remote

        return remote.sent(request)

    def received(self, fields: Any) -> Extension:
        from rekindle._src.capabilities.guides import remote

        return remote.received(fields)

    def facts(self, front: Front) -> tuple[int, int] | None:
        from rekindle._src.capabilities.guides.request import THINK_IDS

        return THINK_IDS.of(front)

    def remote(self, facts: tuple[int, int] | None, tokenizer: TokenizerLike) -> Services:
        from rekindle._src.capabilities.guides.remote import RemoteGrammars
        from rekindle._src.capabilities.guides.request import GRAMMARS, THINK_IDS

        services: dict[SessionService[Any], Any] = {} if facts is None else {THINK_IDS: facts}
        return services | {GRAMMARS: RemoteGrammars()} if tokenizer.has_text else services
