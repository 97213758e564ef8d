"""The plan of a session's programs: a model's shapes, its devices, and the options of one data shard."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence

import jax

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.models.base import Graph, Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import store
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.drafting import NO_DRAFTS, DraftChains, DraftedRows, DraftPrograms
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.features import Features, features_of
from rekindle._src.programs.late_masks import NO_MASKS, LateMasks
from rekindle._src.programs.packing import StepPacking
from rekindle._src.programs.side_caches import DevicePlan, side_caches, slots_of
from rekindle._src.programs.user_functions import LogitsProcessor, check_processors


class ProgramAddition:
    """An addition to the programs of a session. This one adds nothing; it is the base of all others."""

    @property
    def ahead(self) -> ProgramVariant:
        """The variants of programs that are made ahead although most sessions make them as needed."""
        return PLAIN_VARIANT

    @property
    def key(self) -> Mapping[str, object]:
        """Further fields of the digest that programs are stored under."""
        return {}

    @property
    def masks(self) -> LateMasks | None:
        """The late masks of steps; one addition at most has some."""
        return None

    def features(self, plan: ProgramPlan) -> Sequence[Feature]:
        """Return the features of steps that it adds."""
        return ()


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramPlan:
    """Everything that decides what programs do. Plans with the same `key` have the same programs."""

    model: ModelConfig
    graph: Graph
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # of the whole model, as they lie on the devices
    config: ResolvedConfig
    placement: Placement
    processors: tuple[LogitsProcessor, ...] = ()
    parts: tuple[ProgramAddition, ...] = ()  # of capabilities, in their order
    name: str = ""  # the model's in `rekindle cache ls`
    drafter: DraftPrograms = NO_DRAFTS
    packed_by: Callable[[ResolvedConfig], StepPacking] = StepPacking.of

    @property
    def packing(self) -> StepPacking:
        """The packing of its steps."""
        return self.packed_by(self.config)

    @property
    def ahead(self) -> ProgramVariant:
        """The variants of its parts that are made ahead."""
        return functools.reduce(operator.or_, (part.ahead for part in self.parts), PLAIN_VARIANT)

    @property
    def features(self) -> Features:
        """The features of its steps."""
        return self.packing.features(self._features)

    def _features(self) -> Features:
        sides, precision = self.sides, self.graph.precision
        more: list[Feature] = [feature for part in self.parts for feature in part.features(self)]
        more += [plan.feature(number) for number, plan in enumerate(sides)]
        if any(plan.spare for plan in sides):
            more.append(Feature(DraftedRows(), DraftChains()))
        more += self.drafter.features()
        processors = check_processors(self.processors)
        late = next((masks for part in self.parts if (masks := part.masks) is not None), NO_MASKS)
        return features_of(processors, self.model.vocab_size, *more, deterministic=precision.deterministic, late=late)

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
            "spare": {plan.name: plan.spare for plan in self.sides if plan.spare},
            "processors": [processor.key for processor in self.processors],
            **self.drafter.facts(),
            **self.placement.key(),
            **{name: value for part in self.parts for name, value in part.key.items()},
        }
