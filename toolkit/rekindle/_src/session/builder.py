"""Builds the parts of a session from a model and options; runs on the device thread while the session opens."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from rekindle import tiny
from rekindle._src.core.config import EngineConfig, cache_folder
from rekindle._src.core.mesh_report import MeshReport
from rekindle._src.core.mesh_shape import checked_mesh
from rekindle._src.core.progress import in_notebook
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.device import Contexts
from rekindle._src.dispatch.messages import Engine
from rekindle._src.execution.runner import Runner
from rekindle._src.kvcache import CostModel, HostTier, PagePool, PrefixCache, Tiers
from rekindle._src.kvcache.persist.identity import Identity
from rekindle._src.kvcache.persist.segment import LeafSpec
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.restoring import restore
from rekindle._src.models.base import Graph, LoadedModel
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import Described, describe, load, read
from rekindle._src.models.loading.load_progress import LoadProgress, Report
from rekindle._src.models.loading.swap_weights import replace_weights
from rekindle._src.models.placement import Placement, placed
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs import program_key
from rekindle._src.programs.buckets import prefill_rows
from rekindle._src.programs.determinism import deterministic
from rekindle._src.programs.processors import LogitsProcessor
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.store import ExecutableStore, ProgramStore
from rekindle._src.programs.warming import Warming, needed_after_restart, warm
from rekindle._src.scheduling.scheduler import Limits, Scheduler
from rekindle._src.session.opening_progress import OpeningProgress
from rekindle._src.session.resolve import resolve
from rekindle._src.structured.grammar import Grammars
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.detokenizer import real_detokenizer
from rekindle._src.text.generation_config import checkpoint_sampling, told
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import OutOfMemory, RekindleError
from rekindle_kernels import configure, traits

log = logging.getLogger("rekindle.engine")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRequest:
    """The arguments of `open`, checked."""

    model: str | Path | LoadedModel
    config: EngineConfig
    processors: Sequence[LogitsProcessor] = ()
    progress: Report | None = None
    contexts: Contexts = contextlib.nullcontext
    shown: OpeningProgress = dataclasses.field(default_factory=lambda: OpeningProgress("model"))


def build(request: OpenRequest) -> Engine:
    """Everything a session needs, ready to run. Raises typed errors; what was loaded until then is freed."""
    try:
        return _build(request)
    except (RekindleError, TypeError):
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemory(_shortage(request, error)) from error
        raise


def _build(request: OpenRequest) -> Engine:
    configure(cache_folder=cache_folder())  # of kernels: the user's folder, since kernels are shared by all sessions
    described = request.model if isinstance(request.model, LoadedModel) else _describe(request)
    model, graph, shapes, weight_bytes = _shapes(described)
    placement = placed(checked_mesh(request.config.mesh), graph)
    if placement is not None:
        weight_bytes = placement.bytes_per_device(shapes)
        shapes = placement.shapes(shapes)
    config = resolve(request.config, model, weight_bytes=weight_bytes, placement=placement)
    if config.deterministic:
        graph = deterministic(graph, config)
    programs = stored_programs(model, graph, shapes, config, request.processors, placement=placement)
    precompile = _precompile(config.precompile)
    request.shown.compiling = programs.describe_compiling
    # Programs need shapes alone, so they are loaded or compiled while the weights are read.
    warming = Warming(
        programs,
        precompile,
        restoring=config.restore is not None,
        progress=request.shown.warmed if precompile == "all" else None,  # otherwise nothing waits for them
        contexts=request.contexts,
    )
    try:
        request.shown.stage = "weights"
        loaded = _loaded(request, described, placement)
        return _engine(request, config, loaded, programs, warming, prefer_ready=precompile == "background")
    except BaseException:
        warming.stop()
        raise


def _engine(
    request: OpenRequest,
    config: EngineConfig,
    loaded: LoadedModel,
    programs: Programs,
    warming: Warming,
    *,
    prefer_ready: bool,
) -> Engine:
    owned, model = loaded is not request.model, loaded.config
    name = model.model_type if isinstance(request.model, LoadedModel) else str(request.model)
    tiers = _tiers(loaded, config, name)
    runner = Runner(loaded, config, host_tier=tiers, programs=programs, prefer_ready=prefer_ready)
    assert config.device_pages is not None, "resolved"
    most = prefill_rows(config.max_tokens_per_step, config.max_requests)
    padded = not traits(loaded.graph.precision.implementation).skips_padding
    limits = Limits.of(config, max_prefill_rows=most, padded=padded)
    # The admission limiter bounds the queue; a burst may be queued whole before the first of it runs.
    limits = dataclasses.replace(
        limits, max_queue=config.max_queue + config.max_requests, longest=model.max_position_embeddings
    )
    assert config.page_size is not None, "resolved"
    pool = PagePool(config.device_pages)
    cache = None
    if tiers is not None:
        cache = PrefixCache(pool, config.page_size, page_identity(loaded, config).root, host_tier=tiers)
        if config.restore is not None:
            request.shown.stage = f"restoring {config.restore}"
            # Before waiting for programs, so that pages are read meanwhile.
            runner.prefault(restore(cache, tiers, config.restore).pages)
    request.shown.stage = "programs"
    try:
        warming.opened()
    except BaseException:
        if tiers is not None:
            tiers.close()
        raise
    scheduler = Scheduler(limits, pool, cache=cache, policy=config.policy, seed=config.seed)
    if tiers is not None:
        tiers.busy = lambda: scheduler.has_work
    folder = loaded.folder
    tokenizer = Tokenizer.load(folder) if folder is not None else Tokenizer(None, eos_ids=model.eos_token_ids)
    weights = _Weights(loaded, runner, config, tiers, owned=owned, placement=programs.parts.placement)

    def release() -> None:
        warming.stop()
        programs.close()
        weights.release()
        if tiers is not None:
            tiers.close()

    def prepare_restart() -> bool:
        missing = [key for key in needed_after_restart(programs) if not programs.ready(key)][:1]
        warm(programs, missing, contexts=request.contexts, workers=1)
        return bool(missing)

    return Engine(
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        detokenizer=real_detokenizer(tokenizer),
        config=config,
        program_wait=runner.program_wait,
        mesh=_mesh(programs, config),
        sampling=_sampling(folder, config, request.model),
        longest=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        chat=ChatTemplate.load(folder) if folder is not None else None,
        model=name,
        swap=weights.swap,
        recover=runner.recover,
        prepare_restart=prepare_restart,
        release=release,
        grammars=Grammars(tokenizer, model.vocab_size) if tokenizer.has_text else None,
        think_ids=tokenizer.pair("<think>", "</think>"),
        processors=tuple(processor.name for processor in request.processors),
        characters_per_token=(lambda: tokenizer.characters_per_token) if tokenizer.has_text else None,
    )


def _mesh(programs: Programs, config: EngineConfig) -> MeshReport | None:
    placement = programs.parts.placement
    if placement is None:
        return None
    assert config.page_size is not None, "resolved"
    return placement.report(paged.page_bytes(placement.local.config, config.page_size, config.kv_dtype))


def _loaded(request: OpenRequest, described: LoadedModel | Described, placement: Placement | None) -> LoadedModel:
    """The weights on their devices."""
    if isinstance(described, LoadedModel):
        return described if placement is None else placement.model(described)
    return read(described, progress=_reports(request), placement=placement)


def _sampling(folder: Path | None, config: EngineConfig, model: object) -> Sampling | None:
    """What the checkpoint asks requests to be sampled with, which is said once."""
    if folder is None or config.generation_config == "greedy":
        return None
    found = checkpoint_sampling(folder)
    if found is not None:
        log.info(
            'requests to %s are sampled as it asks: %s. generation_config="greedy" turns it off', model, told(found)
        )
    return found


def _describe(request: OpenRequest) -> Described:
    assert not isinstance(request.model, LoadedModel), "a loaded model describes itself"
    config, shown = request.config, request.shown
    folder = tiny.folder() if request.model == "tiny" else request.model
    shown.stage = "the checkpoint's headers"
    shown.hidden = not Path(folder).expanduser().exists()  # the hub shows its downloads itself
    try:
        return describe(folder, dtype=config.dtype, quantize=config.quantize, cache_dir=cache_folder(config.cache_dir))
    finally:
        shown.hidden = False


def _reports(request: OpenRequest) -> Report:
    def report(progress: LoadProgress) -> None:
        request.shown.weights(progress)
        if request.progress is not None:
            request.progress(progress)

    return report


def _shapes(model: LoadedModel | Described) -> tuple[ModelConfig, Graph, Sequence[Any], int]:
    """Config, graph, leaves or their shapes, and how many bytes are still to be loaded."""
    if isinstance(model, LoadedModel):
        return model.config, model.graph, model.leaves, 0
    return model.found.config, model.graph, model.shapes, model.nbytes


def stored_programs(
    model: ModelConfig,
    graph: Graph,
    leaves: Sequence[Any],
    config: EngineConfig,
    processors: Sequence[LogitsProcessor] = (),
    *,
    placement: Placement | None = None,
) -> Programs:
    """The programs of a resolved config, including those of earlier sessions. Only the shapes of leaves are read."""
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
    store = ProgramStore(ExecutableStore(folder), model.model_type, program_key.digest(fields), devices)
    return Programs(model, graph, leaves, config, processors=processors, store=store, placement=placement)


def page_identity(model: LoadedModel, config: EngineConfig, name: str = "") -> Identity:
    """What pages of this model belong to, and what those of other processes are compared with."""
    assert config.page_size is not None, "resolved"
    layers = paged.abstract(model.config, 1, config.page_size, config.kv_dtype)
    leaves = [(leaf.shape[1:], str(leaf.dtype)) for leaf in jax.tree.leaves(layers)]
    layout = f"{jax.default_backend()} {len(layers)} layers {sorted(set(leaves))}"
    if config.deterministic:
        layout += " deterministic"  # others' pages hold nearly the same numbers, but not the same
    payload = tuple(LeafSpec((len(layers), *shape), dtype) for shape, dtype in leaves[: len(leaves) // len(layers)])
    return Identity(
        model.fingerprint,
        config.kv_dtype,
        config.page_size,
        layout,
        name,
        leaves=payload,
        vocab_size=model.config.vocab_size,
    )


def _tiers(model: LoadedModel, config: EngineConfig, name: str) -> Tiers | None:
    """The tiers below the device; None without a prefix cache."""
    if not config.prefix_cache:
        return None
    assert config.page_size is not None, "resolved"
    disk = None
    if config.disk_memory:
        disk = DiskTier(cache_folder(config.cache_dir), config.disk_memory, page_identity(model, config, name))
    return Tiers(HostTier(config.host_memory), CostModel(config.page_size), disk)


class _Weights:
    """The weights in use; those that were loaded here are freed when they are replaced or the session ends."""

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        config: EngineConfig,
        tiers: Tiers | None,
        *,
        owned: bool,
        placement: Placement | None,
    ) -> None:
        self._model, self._runner, self._config, self._tiers, self._owned = model, runner, config, tiers, owned
        self._placement = placement

    def swap(self, weights: Any) -> bytes:
        """Put other weights in place; returns the root key of the cache for them."""
        owned = isinstance(weights, str | Path)
        name = str(weights) if owned else ""
        if owned:
            weights = load(weights, dtype=self._config.dtype, quantize=self._config.quantize)
        model = replace_weights(self._model, weights, placement=self._placement)
        if owned and self._placement is not None:
            _delete(weights)  # they were loaded on their way to the mesh only
        self._runner.swap_weights(model.leaves)
        self.release()
        self._model, self._owned = model, owned or self._placement is not None
        identity = page_identity(model, self._config, name)
        if self._tiers is not None and self._tiers.disk is not None:
            self._tiers.disk.identity = identity
        return identity.root

    def release(self) -> None:
        if self._owned:
            _delete(self._model)


def _delete(model: LoadedModel) -> None:
    for leaf in model.leaves:
        leaf.delete()


def _precompile(asked: str) -> str:
    if asked != "auto":
        return asked
    return "background" if in_notebook() else "lazy"


def _shortage(request: OpenRequest, error: BaseException) -> str:
    config = request.config
    statistics = jax.local_devices()[0].memory_stats() or {}
    free = statistics.get("bytes_limit", 0) - statistics.get("bytes_in_use", 0)
    room = f"{free / 2**30:.1f} GiB are free on the device" if statistics else "the host's memory is used up"
    asked = f"device_memory={config.device_memory}, device_pages={config.device_pages}, dtype={config.dtype!r}"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"opening {request.model!r} ({asked}) ran out of memory: {first}. {room}. Lower device_memory or quantize"
