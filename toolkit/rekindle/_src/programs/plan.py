"""The plan of a session's programs: a model's shapes, its devices, and the options of one data shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import Graph, Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs import store
from rekindle._src.programs.adapters import adapter_features
from rekindle._src.programs.buckets import PLAIN_VARIANT, ProgramVariant
from rekindle._src.programs.drafting import NO_DRAFTS, DraftChains, DraftPrograms
from rekindle._src.programs.feature import Feature
from rekindle._src.programs.features import Features, features_of
from rekindle._src.programs.pictures import Pictures
from rekindle._src.programs.side_caches import DevicePlan, side_caches, slots_of
from rekindle._src.programs.taps import tap_features
from rekindle._src.programs.user_functions import LogitsProcessor, Tap, check_processors


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramPlan:
    """Everything that decides what programs do. Plans with the same `key` have the same programs."""

    model: ModelConfig
    graph: Graph
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # of the whole model, as they lie on the devices
    config: EngineConfig  # resolved, of one data shard
    placement: Placement
    processors: tuple[LogitsProcessor, ...] = ()
    taps: tuple[Tap, ...] = ()
    ahead: ProgramVariant = PLAIN_VARIANT  # its programs are made ahead although most sessions make them as needed
    name: str = ""  # the model's in `rekindle cache ls`
    drafter: DraftPrograms = NO_DRAFTS

    @property
    def features(self) -> Features:
        """The features of its steps."""
        return session_features(
            self.model, self.graph, self.config, self.placement,
            processors=self.processors, taps=self.taps, ahead=self.ahead, drafter=self.drafter,
        )  # fmt: skip

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
            "taps": [tap.key for tap in self.taps],
            **self.drafter.facts(),
            **self.placement.key(),
        }


def session_features(
    model: ModelConfig,
    graph: Graph,
    config: EngineConfig,
    placement: Placement,
    *,
    processors: Sequence[LogitsProcessor] = (),
    taps: Sequence[Tap] = (),
    ahead: ProgramVariant = PLAIN_VARIANT,
    drafter: DraftPrograms = NO_DRAFTS,
) -> Features:
    """Return the features of steps of this model with these options of a session."""
    sides = side_caches(model, config, placement)
    more: list[Feature] = [*adapter_features(graph, config, placement, ahead)]
    if model.pictures is not None:
        early = ProgramVariant.PICTURES in ahead
        more.append(Pictures(model, config, graph.precision.stream, placement.data, ahead=early))
    more += tap_features(model, config, placement, taps, ahead)
    more += [plan.feature(number) for number, plan in enumerate(sides)]
    if any(plan.spare for plan in sides):
        more.append(DraftChains())
    more += drafter.features()
    deterministic = graph.precision.deterministic
    return features_of(check_processors(processors), model.vocab_size, *more, deterministic=deterministic)
