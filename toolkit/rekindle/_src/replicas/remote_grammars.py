"""Grammars of requests that run in other processes: only the description is sent, and compiled there."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from rekindle._src.core.guides import Guided, Mask
from rekindle._src.dispatch.backend import GrammarLike
from rekindle._src.structured.guide import Guide, Reasoning
from rekindle._src.structured.spec import Spec
from rekindle.errors import InvalidRequest


class RemoteGuide:
    """A placeholder for a guide: its description, and the tokens that it must consume first."""

    ended: bool = False
    spent: float = 0.0

    def __init__(self, spec: Spec, eos_ids: Collection[int], reasoning: Reasoning | None, budget: int | None) -> None:
        self.spec, self.eos_ids, self.reasoning, self.budget = spec, tuple(eos_ids), reasoning, budget
        self.covered: list[int] = []
        self.consumed: int = 0

    def fill(self, mask: Mask) -> str:
        raise AssertionError("a guide was asked in a process that runs no steps")

    def consume(self, token: int) -> Guided:
        """Note a token of the prompt that belongs to the structured text."""
        self.covered.append(token)
        return Guided()

    def copy(self) -> RemoteGuide:
        raise AssertionError("a guide was asked in a process that runs no steps")

    def build(self, grammar: GrammarLike) -> Guide:
        """Return the guide itself, behind the covered tokens. Raise `InvalidRequest` if they don't match."""
        guide: Guide = grammar.guide(self.eos_ids, self.reasoning, self.budget)
        for token in self.covered:
            if guide.consume(token).problem:
                kind = self.spec.kind
                raise InvalidRequest(
                    "edit",
                    self.covered,
                    f"does not follow the {kind} of what is forked, or nothing may follow it",
                    f"Change it, fork earlier, or pass {kind}=None",
                )
        guide.consumed, guide.ended = 0, False  # behind a complete text, the end may come
        return guide


class RemoteGrammar:
    """A placeholder for a compiled grammar."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def guide(
        self, eos_ids: Collection[int], reasoning: Reasoning | None = None, budget: int | None = None
    ) -> RemoteGuide:
        return RemoteGuide(self.spec, eos_ids, reasoning, budget)


class RemoteGrammars:
    """A placeholder for `Grammars`. It accepts every spec; an invalid one is refused where it is compiled."""

    def find(self, spec: Spec) -> RemoteGrammar:
        return RemoteGrammar(spec)

    def begin(self, spec: Spec, caller: str = "") -> NoReturn:
        raise AssertionError("every grammar was found")

    def leave(self, job: object) -> None:
        """Do nothing: nothing is compiled here."""

    def compile(self, spec: Spec, *, patience: float | None = None) -> RemoteGrammar:
        return RemoteGrammar(spec)

    def close(self) -> None:
        """Do nothing: nothing is compiled here."""
