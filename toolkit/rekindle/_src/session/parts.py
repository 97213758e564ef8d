"""The parts that every process of a session has: the resolved config, the weights on their devices, and the programs.

A session of one process makes them and puts a scheduler on top. In a session of several processes each one makes them,
and followers put nothing on top.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rekindle import tiny
from rekindle._src.core import freed_memory
from rekindle._src.core.config import EngineConfig, cache_folder
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.core.progress import in_notebook
from rekindle._src.core.shared_cache import shared_cache
from rekindle._src.dispatch.device import Contexts
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.models.base import Graph, LoadedModel
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import Described, describe, read
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.models.loading.load_progress import LoadProgress, Report
from rekindle._src.models.placement import Placement, placement_of
from rekindle._src.programs import program_key
from rekindle._src.programs.determinism import deterministic
from rekindle._src.programs.late_store import LateStore
from rekindle._src.programs.processors import LogitsProcessor, check_results
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.store import ExecutableStore, ProgramStore
from rekindle._src.programs.warming import Warming
from rekindle._src.session.opening_progress import OpeningProgress
from rekindle._src.session.resolve import of_one_shard, resolve
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.processes.facts import Facts
    from rekindle._src.session.head_start import HeadStart

Agree = Callable[["Facts"], int]  # with the other processes, on the KV pages that all have room for


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRequest:
    """The arguments of `open`, checked."""

    model: str | Path | LoadedModel
    config: EngineConfig
    processors: Sequence[LogitsProcessor] = ()
    progress: Report | None = None
    contexts: Contexts = contextlib.nullcontext
    given_up: Callable[[], bool] = lambda: False  # True when the caller no longer waits for the session
    shown: OpeningProgress = dataclasses.field(default_factory=lambda: OpeningProgress("model"))
    ahead: HeadStart | None = None


class Parts(NamedTuple):
    """The parts of a session in one process."""

    config: EngineConfig  # resolved
    model: LoadedModel
    programs: Programs
    warming: Warming
    prefer_ready: bool


def make_parts(request: OpenRequest, agree: Agree | None = None) -> Parts:
    """Load or compile programs, and load the weights meanwhile."""
    shared_cache.attach(request.config.shared_cache, (cache_folder(), cache_folder(request.config.cache_dir)))
    _check_snapshot(request.config)
    described = request.model if isinstance(request.model, LoadedModel) else _describe(request)
    model, graph, shapes, weight_bytes = _shapes(described)
    mesh_config, placement = _placement(request.config, described, graph)
    if placement is not None and not _is_placed(described):
        weight_bytes = placement.bytes_per_device(shapes)
        shapes = placement.shapes(shapes)
    config = resolve(mesh_config, model, weight_bytes=weight_bytes, placement=placement)
    if agree is not None:
        config = _agreed(config, described, agree)
    if config.deterministic:
        graph = deterministic(graph, config)
    programs = stored_programs(
        model, graph, shapes, config, request.processors, placement=placement, late=True, name=_name_of(described)
    )
    if not programs.traced_processors:
        check_results(request.processors, model.vocab_size)
    precompile = precompiles(config.precompile)
    request.shown.compiling = programs.describe_compiling
    # Programs need shapes alone, so they are loaded or compiled while the weights are read.
    warming = Warming(
        programs,
        precompile,
        restoring=config.restore is not None,
        progress=request.shown.warmed if precompile == "all" else None,  # otherwise opening does not wait for them
        contexts=freed_memory.given_back(request.contexts),  # memory that reading stored programs took
    )
    try:
        request.shown.stage = "weights"
        loaded = _loaded(request, described, placement)
    except BaseException:
        warming.stop()
        raise
    return Parts(config, loaded, programs, warming, prefer_ready=precompile == "background")


def _check_snapshot(config: EngineConfig) -> None:
    """Raise StoreError for a missing snapshot before anything is loaded, unless a shared cache may have it."""
    shared = config.shared_cache or os.environ.get(shared_cache.VARIABLE)
    name = None if config.restore == "auto" or shared else config.restore
    if name is not None and config.prefix_cache and config.disk_memory:
        snapshot.find(cache_folder(config.cache_dir), snapshot.check_name(name))


def _is_placed(described: LoadedModel | Described) -> bool:
    """True if a model already lies on the devices of a mesh."""
    return isinstance(described, LoadedModel) and described.placement is not None


def _placement(
    config: EngineConfig, described: LoadedModel | Described, graph: Graph
) -> tuple[EngineConfig, Placement | None]:
    """Return the config with its mesh, and the devices that share the model. A model made on a mesh keeps that mesh."""
    placement = placement_of(checked_mesh(config.mesh), graph, processes=config.processes)
    current = described.placement if isinstance(described, LoadedModel) else None
    if current is None:
        return config, placement
    if config.mesh is not None and (placement is None or placement.key() != current.key()):
        raise ConfigError("mesh", config.mesh, f"is not that of the model, which lies on {current!r}", "Leave it out")
    return dataclasses.replace(config, mesh=current.mesh), current


def _agreed(config: EngineConfig, described: LoadedModel | Described, agree: Agree) -> EngineConfig:
    from rekindle._src.processes.facts import facts

    assert isinstance(described, Described), "other processes read a checkpoint, too"
    assert config.device_pages is not None, "resolved"
    assert config.device_memory is not None, "resolved"
    local_facts = facts(config, model=described.found.config.digest(), fingerprint=described.found.fingerprint)
    pages = agree(local_facts)
    page = config.device_memory // config.device_pages
    return dataclasses.replace(config, device_pages=pages, device_memory=pages * page)


def _loaded(request: OpenRequest, described: LoadedModel | Described, placement: Placement | None) -> LoadedModel:
    """Return the model with its weights on their devices."""
    if isinstance(described, LoadedModel):
        return described if placement is None or _is_placed(described) else placement.model(described)
    if request.ahead is None:
        return read(described, progress=_reports(request), placement=placement)
    return read(described, progress=_reports(request), placement=placement, brought=request.ahead.weights)


def _describe(request: OpenRequest) -> Described:
    assert not isinstance(request.model, LoadedModel), "a loaded model describes itself"
    config, shown = request.config, request.shown
    folder = tiny.folder() if request.model == "tiny" else request.model
    shown.stage = "the checkpoint's headers"
    shown.hidden = not Path(folder).expanduser().exists()  # the hub shows its downloads itself
    try:
        return describe(
            folder,
            dtype=config.dtype,
            quantize=config.quantize,
            cache_dir=cache_folder(config.cache_dir),
            divided=config.mesh is not None,
            seen=None if request.ahead is None else request.ahead.seen,
            device_memory=config.device_memory,
        )
    finally:
        shown.hidden = False


def _reports(request: OpenRequest) -> Report:
    def report(progress: LoadProgress) -> None:
        request.shown.weights(progress)
        if request.progress is not None:
            request.progress(progress)

    return report


def _shapes(model: LoadedModel | Described) -> tuple[ModelConfig, Graph, Sequence[Any], int]:
    """Return config, graph, leaves or their shapes, and the number of bytes still to be loaded."""
    if isinstance(model, LoadedModel):
        return model.config, model.graph, model.leaves, 0
    return model.found.config, model.graph, model.shapes, model.nbytes


def _name_of(described: LoadedModel | Described) -> str:
    folder = described.folder if isinstance(described, LoadedModel) else described.found.folder
    return "" if folder is None else readable_name(folder)


def stored_programs(
    model: ModelConfig,
    graph: Graph,
    leaves: Sequence[Any],
    config: EngineConfig,
    processors: Sequence[LogitsProcessor] = (),
    *,
    placement: Placement | None = None,
    late: bool = False,
    name: str = "",
) -> Programs:
    """Return the programs of a resolved config, those of earlier sessions too. Only the shapes of leaves are read.

    `name` is the model's name in `rekindle cache ls`. With `late`, programs that are compiled for a first text are
    stored after it, and `flush` waits for that.
    """
    config = of_one_shard(config, 1 if placement is None else placement.data)
    fields = {
        "environment": program_key.environment(),
        "model": model.digest(),
        "leaves": [(path, leaf.shape, str(leaf.dtype)) for path, leaf in zip(graph.paths, leaves, strict=True)],
        "config": program_key.config_fields(config),
        "processors": [processor.key for processor in processors],
    }
    if placement is not None:
        fields["mesh"] = placement.key()
    folder = cache_folder(config.cache_dir) / "programs"
    devices = None if placement is None else tuple(placement.devices)
    program_store = ProgramStore(ExecutableStore(folder), name or model.model_type, program_key.digest(fields), devices)
    store = LateStore(program_store) if late else program_store
    return Programs(model, graph, leaves, config, processors=processors, store=store, placement=placement)


def precompiles(asked: str) -> str:
    """Resolve the option `precompile` for this process: "auto" is "background" in notebooks and "lazy" elsewhere."""
    if asked != "auto":
        return asked
    return "background" if in_notebook() else "lazy"
