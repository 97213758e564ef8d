"""The features of a session's steps, and programs with them, without a session."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle._src.capabilities import ENTRIES
from rekindle._src.capabilities.captures.custom import Tap
from rekindle._src.capabilities.plans import OpenArguments
from rekindle._src.core.config import EngineConfig
from rekindle._src.models.base import ALONE, Graph, LoadedModel, Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.programs.features import Features
from rekindle._src.programs.plan import ProgramAddition, ProgramPlan
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.user_functions import LogitsProcessor


def parts_of(config: EngineConfig, *, taps: Sequence[Tap] = ()) -> tuple[ProgramAddition, ...]:
    """Return the parts of all capabilities, in a session with these options."""
    arguments = OpenArguments(config, {"taps": tuple(taps)})
    return tuple(part for entry in ENTRIES if (part := entry.plan(arguments)) is not None)


def session_features(
    model: ModelConfig,
    graph: Graph,
    config: EngineConfig,
    placement: Placement = ALONE,
    *,
    processors: Sequence[LogitsProcessor] = (),
    taps: Sequence[Tap] = (),
) -> Features:
    """Return the features of a session's steps."""
    parts = parts_of(config, taps=taps)
    return ProgramPlan(model, graph, (), config, placement, tuple(processors), parts).features


def session_programs(model: LoadedModel, config: EngineConfig) -> Programs:
    """Return the programs of a session, with all capabilities."""
    features = session_features(model.config, model.graph, config)
    return Programs(model.config, model.graph, model.leaves, config, features=features)
