"""The sources of models to open: checkpoints with their headers read, or a model in memory."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax

from rekindle import tiny
from rekindle._src.core.config import EngineConfig
from rekindle._src.core.dtypes import DType
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.drafts.plan import DraftPlan, draft_plan, reads_own_head
from rekindle._src.models.base import Graph, LoadedModel, Placement, abstract_model
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import CheckpointPlan, WeightForm, describe, read
from rekindle._src.models.loading.hub import on_disk
from rekindle._src.models.loading.kept_weights import MappedWeights
from rekindle._src.models.loading.load_progress import Report
from rekindle._src.models.loading.rope_override import check_scaling, with_scaling
from rekindle._src.models.loading.stored import look
from rekindle._src.models.placement import MeshPlacement, placement_of
from rekindle._src.models.unpacking import unpacked_model
from rekindle._src.opening.open_request import OpenRequest
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.drafts.checkpoint import Target

Leaves = tuple[jax.ShapeDtypeStruct, ...]
Brought = Callable[[Path], MappedWeights | None]


class ModelSource(abc.ABC):
    """A model before it is on the devices of a session: all that a blueprint needs of it, and its weights."""

    name: str  # for people to read
    folder: Path | None  # of tokenizer and chat template: a folder or a GGUF file
    fingerprint: str  # of config and weights
    graph: Graph
    drafts: DraftPlan = DraftPlan()  # what drafts for it
    checkpoint: CheckpointPlan | None = None  # None for a model in memory

    @abc.abstractmethod
    def placed(self, config: EngineConfig) -> tuple[EngineConfig, Placement]:
        """Return the options as the model completes them, and the devices that share it."""

    @abc.abstractmethod
    def leaves(self, placement: Placement) -> Leaves:
        """Return the shapes of its leaves on these devices."""

    @abc.abstractmethod
    def added_bytes(self, placement: Placement) -> int:
        """Return the bytes of memory that putting its weights there takes on each device."""

    @abc.abstractmethod
    def load(
        self, placement: Placement, progress: Report | None = None, brought: Brought = lambda kept: None
    ) -> LoadedModel:
        """Put its weights on the devices. `brought` returns weights of the cache that are in memory already."""

    def lends(self, model: LoadedModel) -> bool:
        """True if the arrays of a model that was loaded from here are the caller's."""
        return False


class CheckpointSource(ModelSource):
    """A checkpoint with its headers read."""

    def __init__(self, name: str, plan: CheckpointPlan) -> None:
        self.name, self.plan, self.checkpoint = name, plan, plan
        self.folder, self.fingerprint, self.graph = plan.found.folder, plan.fingerprint, plan.graph

    @classmethod
    def open(cls, request: OpenRequest) -> CheckpointSource:
        """Read the headers of the checkpoint that is to be opened, after a download if it is not on this machine."""
        assert not isinstance(request.model, LoadedModel), "a loaded model is no checkpoint"
        config, shown = request.config, request.shown
        folder = tiny.located(request.model)
        shown.stage = "the checkpoint's headers"
        shown.hidden = on_disk(folder) is None  # the hub shows its downloads itself
        try:
            stored = None if request.ahead is None else request.ahead.seen
            plan = describe(
                stored
                or with_scaling(look(folder, config.projector, drafts=reads_own_head(config)), config.rope_scaling),
                WeightForm(config.dtype, config.quantize, divided=config.mesh is not None),
                cache_dir=config.cache_folder,
                device_memory=config.device_memory,
            )
        finally:
            shown.hidden = False
        check_scaling(plan.graph.config, config.rope_scaling)
        return cls(str(request.model), plan)

    def placed(self, config: EngineConfig) -> tuple[EngineConfig, Placement]:
        return config, placement_of(checked_mesh(config.mesh), self.graph, processes=config.processes)

    def leaves(self, placement: Placement) -> Leaves:
        return tuple(placement.shapes(self.plan.shapes))

    def added_bytes(self, placement: Placement) -> int:
        return placement.bytes_per_device(self.plan.shapes)

    def load(
        self, placement: Placement, progress: Report | None = None, brought: Brought = lambda kept: None
    ) -> LoadedModel:
        return read(self.plan, progress=progress, placement=placement, brought=brought)


class MemorySource(ModelSource):
    """A model that the caller has loaded."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.name, self.folder = model.config.model_type, model.folder
        self.fingerprint, self.graph = model.fingerprint, model.graph
        self._shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in model.leaves)

    def placed(self, config: EngineConfig) -> tuple[EngineConfig, Placement]:
        """A model made on a mesh keeps that mesh."""
        if config.rope_scaling is not None:
            fix = "Pass the folder or the GGUF file of the model in its place"
            raise ConfigError("rope_scaling", config.rope_scaling, "is for checkpoints, not for a model in memory", fix)
        placement = placement_of(checked_mesh(config.mesh), self.graph, processes=config.processes)
        if config.dtype == "auto":
            # Pages in fewer bits than the weights that are here would cost digits that the caller loaded on purpose.
            config = dataclasses.replace(config, dtype=cast(DType, self.graph.precision.weights))
        current = self._model.placement
        if not isinstance(current, MeshPlacement):
            return config, placement
        if config.mesh is not None and placement.key() != current.key():
            problem = f"differs from the model's mesh {current!r}"
            raise ConfigError("mesh", config.mesh, problem, "Leave it out")
        return dataclasses.replace(config, mesh=current.mesh), current

    def leaves(self, placement: Placement) -> Leaves:
        return self._shapes if self._is_on(placement) else tuple(placement.shapes(self._shapes))

    def added_bytes(self, placement: Placement) -> int:
        return 0 if self._is_on(placement) else placement.bytes_per_device(self._shapes)

    def load(
        self, placement: Placement, progress: Report | None = None, brought: Brought = lambda kept: None
    ) -> LoadedModel:
        return placement.model(self._model)

    def lends(self, model: LoadedModel) -> bool:
        return model is self._model

    def _is_on(self, placement: Placement) -> bool:
        return self._model.placement == placement


class ShapeSource(ModelSource):
    """A model that has only a config: enough for a blueprint, and nothing to load."""

    folder = None

    def __init__(self, name: str, config: ModelConfig, dtype: str, quantize: str | None = None) -> None:
        self.name = self.fingerprint = name
        self.graph, self._shapes = abstract_model(config, dtype, quantize)

    def placed(self, config: EngineConfig) -> tuple[EngineConfig, Placement]:
        return config, placement_of(checked_mesh(config.mesh), self.graph, processes=config.processes)

    def leaves(self, placement: Placement) -> Leaves:
        return tuple(placement.shapes(self._shapes))

    def added_bytes(self, placement: Placement) -> int:
        return placement.bytes_per_device(self._shapes)

    def load(
        self, placement: Placement, progress: Report | None = None, brought: Brought = lambda kept: None
    ) -> LoadedModel:
        raise AssertionError(f"{self.name} is a shape, which has no weights")


def source_of(request: OpenRequest) -> ModelSource:
    """Return where a model that is to be opened comes from, and what drafts for it.

    Raise typed errors for one that can't be read.
    """
    if isinstance(request.model, LoadedModel):
        source: ModelSource = MemorySource(unpacked_model(request.model))
    else:
        source = CheckpointSource.open(request)

    def target() -> Target:
        from rekindle._src.drafts.checkpoint import Target  # only what has weights asks for it

        config, placement = source.placed(request.config)
        return Target(source.graph, source.leaves(placement), placement, config)

    source.drafts = draft_plan(request.config, target, tiny.located)
    return source
