"""Guides of requests that run in another process: placeholders where they are taken in, descriptions on their way."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NoReturn

from rekindle._src.capabilities.guides.guidance import Guidance
from rekindle._src.core.extension import Extension, SentExtension
from rekindle._src.core.records import GuideReport, Mask, Request

if TYPE_CHECKING:
    from rekindle._src.structured.reasoning import ReasoningRules
    from rekindle._src.structured.spec import Spec


class RemoteGuide:
    """A placeholder for a guide: its description, and the tokens that it must consume first."""

    ended: bool = False
    spent: float = 0.0
    ahead: tuple[int, ...] = ()

    def __init__(
        self, spec: Spec | None, eos_ids: Collection[int], rules: ReasoningRules | None, budget: int | None
    ) -> None:
        self.spec = spec  # None: the answer is free
        self.eos_ids, self.rules, self.budget = tuple(eos_ids), rules, budget
        self.covered: list[int] = []
        self.consumed: int = 0

    def fill(self, mask: Mask) -> str:
        raise AssertionError("a guide was asked in a process that runs no steps")

    def consume(self, token: int) -> GuideReport:
        """Note a token of the prompt that belongs to the structured text."""
        self.covered.append(token)
        return GuideReport()

    def copy(self) -> RemoteGuide:
        """Return the placeholder of another sequence."""
        clone = RemoteGuide(self.spec, self.eos_ids, self.rules, self.budget)
        clone.covered, clone.consumed, clone.ended = [*self.covered], self.consumed, self.ended
        return clone


class RemoteGrammar:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def guide(
        self, eos_ids: Collection[int], rules: ReasoningRules | None = None, budget: int | None = None
    ) -> RemoteGuide:
        return RemoteGuide(self.spec, eos_ids, rules, budget)


class RemoteGrammars:
    """A placeholder for `Grammars`. It accepts every spec; an invalid one is refused where it is compiled."""

    def find(self, spec: Spec) -> RemoteGrammar:
        return RemoteGrammar(spec)

    def reasoning_guide(self, rules: ReasoningRules) -> RemoteGuide:
        return RemoteGuide(None, (), rules, None)

    def begin(self, spec: Spec, caller: str = "") -> NoReturn:
        raise AssertionError("every grammar was found")

    def leave(self, job: object) -> None:
        """Do nothing: nothing is compiled here."""

    def compile(self, spec: Spec, *, patience: float | None = None) -> RemoteGrammar:
        return RemoteGrammar(spec)

    def close(self) -> None:
        """Do nothing: nothing is compiled here."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SentGuide(Extension):
    """Of a submission from another process: the description of its guide, which is built at intake."""

    remote: RemoteGuide


def sent(request: Request) -> SentExtension | None:
    """Return the description of a request's guide. Rules for tokens follow from its options, and are built there."""
    guidance = request.extensions.get(Guidance)
    if guidance is None:
        return None
    from rekindle._src.structured.token_rules import RestrictedGuide  # with the guides of requests

    guide: Any = guidance.guide
    if isinstance(guide, RestrictedGuide):
        guide = guide.inner
    if guide is None:
        return None
    assert isinstance(guide, RemoteGuide), "a fleet compiles no grammars"
    fields = {
        "spec": None if guide.spec is None else dataclasses.asdict(guide.spec),
        "eos_ids": sorted(guide.eos_ids),
        "rules": None if guide.rules is None else guide.rules.values(),
        "budget": guide.budget,
        "covered": guide.covered,
    }
    return SentExtension(fields, slow=True)


def received(fields: Any) -> SentGuide:
    """Return the guide of a description. Raise an error of wrong types or values if it is malformed."""
    from rekindle._src.structured.reasoning import ReasoningRules
    from rekindle._src.structured.spec import Spec

    rules = None if fields["rules"] is None else ReasoningRules.read(fields["rules"])
    spec = None if fields["spec"] is None else Spec(**fields["spec"])
    if spec is None and rules is None:
        raise ValueError("its guide has nothing to guide")
    guide = RemoteGuide(spec, fields["eos_ids"], rules, fields["budget"])
    guide.covered = list(fields["covered"])
    return SentGuide(guide)
