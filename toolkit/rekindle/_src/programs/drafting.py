"""The seam of drafters in programs: what a session's drafters add to steps and to pages, and calls of their own.

`DraftPrograms` is part of a session's plan, a value that needs shapes alone. Most drafters work on the host, and most
sessions have `NO_DRAFTS`.
"""

from __future__ import annotations

from typing import Protocol

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.records import StepPlan
from rekindle._src.models.config import Pages
from rekindle._src.programs.buckets import Helper, ProgramVariant
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.partitioning import Recipe
from rekindle._src.programs.recipes import Recipes
from rekindle._src.programs.row_option import RowOption
from rekindle._src.programs.step_part import StepPart


class DraftCalls(Protocol):
    """The programs that a drafter calls before steps."""

    @property
    def keys(self) -> tuple[Helper, ...]:
        """All of them."""
        ...

    def recipe(self, key: Helper) -> Recipe:
        """Return the recipe of one of `keys`."""
        ...


class NoCalls:
    """The calls of drafters that work on the host."""

    keys: tuple[Helper, ...] = ()

    def recipe(self, key: Helper) -> Recipe:
        raise KeyError(key)


NO_CALLS = NoCalls()


class DraftPrograms:
    """The part of drafters in a session's programs. This one adds nothing."""

    # The layers whose inputs in the residual stream are kept of each token for a drafter, where the model's number of
    # layers stands for the last one's output; empty: the final hidden state. None: nothing is kept.
    reads: tuple[int, ...] | None = None
    pages: tuple[Pages, ...] = ()  # what it keeps of each token in the session's pages, after those of the layers

    def features(self) -> tuple[Feature, ...]:
        """Return the features of steps that it adds."""
        return ()

    def calls(self, config: ResolvedConfig, target: Recipes) -> DraftCalls:
        """Return its own programs, in addition to the programs of the session's model."""
        return NO_CALLS

    def facts(self) -> dict[str, object]:
        """Return all that its programs depend on, to be stored by."""
        return {}


NO_DRAFTS = DraftPrograms()


class DraftedRows(RowOption):
    """Rows that draft."""

    def in_plan(self, plan: StepPlan) -> bool:
        return any(row.draft for row in plan.decode)


class DraftChains(StepPart):
    """Drafts that follow each other where layers have states: a step without drafts need not look for them."""

    variant, warmed = ProgramVariant.DRAFTS, True
    inside = True  # programs made of parts share what layers get
