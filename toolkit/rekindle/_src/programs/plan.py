"""The plan of a session's programs: a model's shapes, its devices, and the options of one data shard."""

from __future__ import annotations

import dataclasses

import jax

from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import Graph, Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import store
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.draft_model import DraftShapes
from rekindle._src.programs.side_caches import DevicePlan, side_caches, slots_of
from rekindle._src.programs.user_functions import LogitsProcessor, Tap


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramPlan:
    """All that decides what programs do. Those of plans with one `key` are the same."""

    model: ModelConfig
    graph: Graph
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # of the whole model, as they lie on the devices
    config: EngineConfig  # resolved, of one data shard
    placement: Placement
    processors: tuple[LogitsProcessor, ...] = ()
    taps: tuple[Tap, ...] = ()
    ahead: ProgramVariant = PLAIN_VARIANT  # whose programs are made ahead although most sessions make them as needed
    name: str = ""  # the model's in `rekindle cache ls`
    drafter: DraftShapes | None = None  # the small model or assistant that drafts, if there is one

    @property
    def sides(self) -> tuple[DevicePlan, ...]:
        """The plans of the model's side caches."""
        return side_caches(self.model, self.config, self.placement)

    @property
    def key(self) -> str:
        """The digest that programs are stored under."""
        return store.digest(self.fields)

    @property
    def fields(self) -> dict[str, object]:
        """Everything that programs depend on, in the session and outside it."""
        model, config = self.model, self.config
        leaves = zip(self.graph.paths, self.leaves, strict=True)
        return {
            "environment": store.environment(),
            "model": model.digest(),
            "leaves": [(path, leaf.shape, str(leaf.dtype)) for path, leaf in leaves],
            "config": store.config_fields(config),
            "sides": slots_of(self.sides),
            "drafts": self.config.drafts == "mtp",
            "spare": {plan.name: plan.spare for plan in self.sides if plan.spare},
            "processors": [processor.key for processor in self.processors],
            "taps": [tap.key for tap in self.taps],
            **({} if self.drafter is None else {"drafter": self.drafter.facts()}),
            **self.placement.key(),
        }
