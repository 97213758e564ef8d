"""Where an opening has its models from: checkpoints whose headers were read, or a model in memory."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast, get_args

import jax
import numpy as np

from rekindle import tiny
from rekindle._src.core.config import DraftSource, EngineConfig
from rekindle._src.core.dtypes import DType
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.core.names import nearest
from rekindle._src.models.base import Graph, LoadedModel, Placement, abstract_model, graph_of, kinds_in
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import CheckpointPlan, describe, read
from rekindle._src.models.loading.hub import on_disk
from rekindle._src.models.loading.kept_weights import MappedWeights
from rekindle._src.models.loading.load_progress import Report
from rekindle._src.models.placement import MeshPlacement, placement_of
from rekindle._src.models.unpacking import unpacked_model
from rekindle._src.opening.open_request import OpenRequest
from rekindle.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rekindle._src.opening.picture_plan import PicturesPlan

T = TypeVar("T")
Leaves = tuple[jax.ShapeDtypeStruct, ...]
Kinds = tuple[tuple[str, str], ...]  # of matrices, by their paths
HEAD_PATH = "drafter."  # what paths of a draft head begin with
HEAD_MARK = "-with-head-"  # in the fingerprint of a model, before that of a head of another checkpoint
Brought = Callable[[Path], MappedWeights | None]


class ModelSource(abc.ABC):
    """A model before it is on the devices of a session: all that a blueprint needs of it, and its weights."""

    name: str  # for people to read
    folder: Path | None  # of tokenizer and chat template: a folder or a GGUF file
    fingerprint: str  # of config and weights
    graph: Graph
    drafter: CheckpointSource | None = None  # the small model or assistant that drafts for it, if there is one

    @abc.abstractmethod
    def placed(self, config: EngineConfig) -> tuple[EngineConfig, Placement]:
        """Return the options with what the model decides of them, and the devices that share it."""

    @abc.abstractmethod
    def leaves(self, placement: Placement) -> Leaves:
        """Return the shapes of its leaves on these devices."""

    @abc.abstractmethod
    def added_bytes(self, placement: Placement) -> int:
        """Return the bytes of memory that putting its weights there takes on each device."""

    @abc.abstractmethod
    def pictures(self, config: EngineConfig) -> PicturesPlan | None:
        """Return how it reads pictures; None if it reads text alone."""

    @abc.abstractmethod
    def load(
        self, placement: Placement, progress: Report | None = None, brought: Brought = lambda kept: None
    ) -> LoadedModel:
        """Put its weights on the devices. `brought` returns weights of the cache that are in memory already."""

    def lends(self, model: LoadedModel) -> bool:
        """True if the arrays of a model that was loaded from here are the caller's."""
        return False


class CheckpointSource(ModelSource):
    """A checkpoint whose headers were read."""

    def __init__(self, name: str, plan: CheckpointPlan) -> None:
        self.name, self.plan = name, plan
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
            plan = describe(
                folder,
                dtype=config.dtype,
                quantize=config.quantize,
                cache_dir=config.cache_folder,
                divided=config.mesh is not None,
                seen=None if request.ahead is None else request.ahead.seen,
                device_memory=config.device_memory,
                projector=config.projector,
                drafts=config.drafts == "mtp",
            )
        finally:
            shown.hidden = False
        return cls(str(request.model), plan)

    def placed(self, config: EngineConfig) -> tuple[EngineConfig, Placement]:
        return config, placement_of(checked_mesh(config.mesh), self.graph, processes=config.processes)

    def leaves(self, placement: Placement) -> Leaves:
        return tuple(placement.shapes(self.plan.shapes))

    def added_bytes(self, placement: Placement) -> int:
        return placement.bytes_per_device(self.plan.shapes)

    def pictures(self, config: EngineConfig) -> PicturesPlan | None:
        if self.plan.found.stored.others is None:
            return None
        from rekindle._src.opening.picture_plan import pictures_plan  # it imports a lot

        return pictures_plan(self.plan, config)

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
        """A model that was made on a mesh keeps that mesh."""
        placement = placement_of(checked_mesh(config.mesh), self.graph, processes=config.processes)
        if config.dtype == "auto":
            # Pages in fewer bits than the weights that are here would cost digits that the caller loaded on purpose.
            config = dataclasses.replace(config, dtype=cast(DType, self.graph.precision.weights))
        current = self._model.placement
        if not isinstance(current, MeshPlacement):
            return config, placement
        if config.mesh is not None and placement.key() != current.key():
            problem = f"is not that of the model, which lies on {current!r}"
            raise ConfigError("mesh", config.mesh, problem, "Leave it out")
        return dataclasses.replace(config, mesh=current.mesh), current

    def leaves(self, placement: Placement) -> Leaves:
        return self._shapes if self._is_on(placement) else tuple(placement.shapes(self._shapes))

    def added_bytes(self, placement: Placement) -> int:
        return 0 if self._is_on(placement) else placement.bytes_per_device(self._shapes)

    def pictures(self, config: EngineConfig) -> PicturesPlan | None:
        return None

    def load(
        self, placement: Placement, progress: Report | None = None, brought: Brought = lambda kept: None
    ) -> LoadedModel:
        return placement.model(self._model)

    def lends(self, model: LoadedModel) -> bool:
        return model is self._model

    def _is_on(self, placement: Placement) -> bool:
        return self._model.placement == placement


class ShapeSource(ModelSource):
    """A model of which only the config is there: enough for a blueprint, and nothing to load."""

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

    def pictures(self, config: EngineConfig) -> PicturesPlan | None:
        return None

    def load(
        self, placement: Placement, progress: Report | None = None, brought: Brought = lambda kept: None
    ) -> LoadedModel:
        raise AssertionError(f"{self.name} is a shape, which has no weights")


class HeadSource(ModelSource):
    """A model and a head of another checkpoint that drafts for it: together, a model with a head of its own."""

    def __init__(self, model: ModelSource, head: CheckpointSource) -> None:
        """Raise ConfigError for a head that was made for another model."""
        self._model, self._head = model, head
        self._lent = False
        self.name, self.folder = model.name, model.folder
        self.fingerprint = f"{model.fingerprint}{HEAD_MARK}{head.fingerprint}"
        self.graph = with_head(model.graph, _fitted(head, model.graph.config), head.graph)

    def placed(self, config: EngineConfig) -> tuple[EngineConfig, Placement]:
        """The head is then the model's own."""
        config, placement = self._model.placed(config)
        return dataclasses.replace(config, drafts="mtp"), placement

    def leaves(self, placement: Placement) -> Leaves:
        return self._joined(self._model.leaves(placement), self._head.leaves(placement))

    def added_bytes(self, placement: Placement) -> int:
        return self._model.added_bytes(placement) + self._head.added_bytes(placement)

    def pictures(self, config: EngineConfig) -> PicturesPlan | None:
        return self._model.pictures(config)

    def load(
        self, placement: Placement, progress: Report | None = None, brought: Brought = lambda kept: None
    ) -> LoadedModel:
        model = self._model.load(placement, progress, brought)
        self._lent = self._model.lends(model)
        head = self._head.load(placement)
        _check_tokens(self._head.name, head)
        leaves = self._joined(model.leaves, head.leaves)
        return dataclasses.replace(
            model, config=self.graph.config, graph=self.graph, leaves=leaves, fingerprint=self.fingerprint
        )

    def lends(self, model: LoadedModel) -> bool:
        return self._lent

    def _joined(self, model: Sequence[T], head: Sequence[T]) -> tuple[T, ...]:
        """Return the leaves of both in the order of the graph."""
        by_path = dict(zip(self._model.graph.paths, model, strict=True))
        own = zip(self._head.graph.paths, head, strict=True)
        by_path |= {f"{HEAD_PATH}{path}": leaf for path, leaf in own}
        return tuple(by_path[path] for path in self.graph.paths)


def with_head(model: Graph, config: ModelConfig, head: Graph) -> Graph:
    """Return the graph of a model with a head of its own, from both. `config` is the head's, as it reads this model."""
    kinds = model.precision.kinds, head.precision.kinds
    if any(kinds) or model.precision.quantize != head.precision.quantize:
        kinds = kinds_in(model), kinds_in(head)
    precision = dataclasses.replace(
        model.precision,
        kinds=_with_paths(*kinds),
        unpacked=_with_paths(model.precision.unpacked, head.precision.unpacked),
    )
    return graph_of(dataclasses.replace(model.config, draft_head=config), precision)[0]


def _with_paths(model: Kinds, head: Kinds) -> Kinds:
    return *model, *((f"{HEAD_PATH}{path}", kind) for path, kind in head)


def _fitted(head: CheckpointSource, model: ModelConfig) -> ModelConfig:
    """Return the config of a head as it reads a model. Raise ConfigError if it was made for another one."""
    own, fix = head.graph.config, "Use the head that was made for this model"
    if model.draft_head is not None:
        problem = f"is a head, and this {model.model_type} model has one of its own"
        refuse_drafter(head.name, problem, 'Use drafts="mtp"')
    reads = own.reads or (2, model.num_layers // 2, model.num_layers - 3)
    if not all(0 <= layer <= model.num_layers for layer in reads):
        shown = ", ".join(map(str, reads))[:80]
        refuse_drafter(head.name, f"reads the layers {shown}, and this model has {model.num_layers}", fix)
    wanted = own.hidden_size if own.eagle is None else own.eagle.hidden_size
    if wanted != model.hidden_size:
        problem = f"drafts for a model whose hidden states have {wanted:,} numbers, and this one's have"
        refuse_drafter(head.name, f"{problem} {model.hidden_size:,}", fix)
    if own.block is not None:
        if own.block.mask >= model.vocab_size:
            problem = f"has mask_token_id={own.block.mask:,}, and the vocabulary of this model has"
            refuse_drafter(head.name, f"{problem} {model.vocab_size:,} tokens", fix)
        return own
    spec = own.eagle
    assert spec is not None, "the checkpoint is a head"
    if not spec.own_embedding and own.hidden_size != model.hidden_size:
        problem = f"has no embedding, and hidden states of {own.hidden_size:,} numbers where this model's have"
        refuse_drafter(head.name, f"{problem} {model.hidden_size:,}", fix)
    if own.vocab_size != model.vocab_size:
        problem = f"has a vocabulary of {own.vocab_size:,} tokens, and this model one of {model.vocab_size:,}"
        refuse_drafter(head.name, problem, fix)
    return dataclasses.replace(own, reads=reads)


def _check_tokens(name: str, head: LoadedModel) -> None:
    """Raise CheckpointError unless all tokens that a head can draft are in the vocabulary."""
    by_path, spec = dict(zip(head.graph.paths, head.leaves, strict=True)), head.config.eagle
    if spec is None or "tokens" not in by_path:
        return
    ids = np.asarray(by_path["tokens"]) + (0 if spec.absolute else np.arange(spec.vocab_size))
    if ids.min() < 0 or ids.max() >= head.config.vocab_size or len(np.unique(ids)) != len(ids):
        raise CheckpointError(
            f"the tensor d2t of {name} names {ids.min():,.0f} to {ids.max():,.0f}, of a vocabulary of "
            f"{head.config.vocab_size:,} tokens, or one of them twice. Download it again."
        )


def source_of(request: OpenRequest) -> ModelSource:
    """Return where a model that is to be opened comes from, and the small model that drafts for it.

    Raise typed errors for one that can't be read.
    """
    if isinstance(request.model, LoadedModel):
        source: ModelSource = MemorySource(unpacked_model(request.model))
    else:
        source = CheckpointSource.open(request)
    drafter = drafter_for(source, request.config)
    if drafter is not None and drafter.graph.config.is_head:
        return HeadSource(source, drafter)
    source.drafter = drafter
    return source


def drafter_for(source: ModelSource, config: EngineConfig) -> CheckpointSource | None:
    """Read the headers of the model that is to draft for another; return None if drafts come from elsewhere.

    Raise ConfigError where no model can draft. `DraftPlan.of` checks that this one can.
    """
    name, model = config.draft_model, source.graph.config
    if name is None:
        return None
    folder = tiny.located(name)
    if on_disk(folder) is None and "/" not in name and ":" not in name:  # a misspelled word
        words = get_args(DraftSource)
        nearby = nearest(name, words)
        close = f"Did you mean {nearby!r}? " if nearby else ""
        fix = f"{close}Use one of {', '.join(map(repr, words))}, or a model"
        refuse_drafter(name, "is neither a known source nor a model on this machine", fix)
    config, placement = source.placed(config)
    if placement.data > 1 or placement.processes > 1:
        problem = "is another model, which can't draft in several data shards or processes"
        refuse_drafter(name, problem, "Use devices of one process, with one data shard")
    if model.is_bidirectional:
        refuse_drafter(name, f"drafts tokens, and this {model.model_type} model makes none", 'Use drafts="auto"')
    described = functools.partial(
        describe,
        folder,
        quantize=config.quantize,
        cache_dir=config.cache_folder,
        device_memory=config.device_memory,
    )
    plan, dtype = described(dtype=config.dtype), source.graph.precision.weights
    if plan.graph.config.is_head and plan.graph.precision.weights != dtype:  # they are one model then
        plan = described(dtype=cast(DType, dtype))
    if plan.graph.config.is_head and placement.divided:
        refuse_drafter(name, "is a head of another checkpoint, which can't be divided over devices", "Use one device")
    return CheckpointSource(name, plan)


def refuse_drafter(name: str, problem: str, fix: str) -> NoReturn:
    """Raise ConfigError for what `drafts` names."""
    raise ConfigError("drafts", name, problem, fix)
