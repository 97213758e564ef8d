"""Building a session's engine from a model and options, on the device thread while the session opens."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from rekindle._src.core import freed_memory
from rekindle._src.core.config import EngineConfig, cache_folder
from rekindle._src.core.mesh_report import MeshReport
from rekindle._src.core.sampling import Sampling
from rekindle._src.dispatch.messages import Engine
from rekindle._src.execution.runner import Runner
from rekindle._src.kvcache import AnyCache, CostModel, HostTier, PrefixCache, Tiers
from rekindle._src.kvcache.tiers.disk import DiskTier
from rekindle._src.kvcache.tiers.divided_disk import DividedDiskTier
from rekindle._src.kvcache.tiers.divided_host import DividedHostTier
from rekindle._src.kvcache.tiers.promoting import promote
from rekindle._src.kvcache.tiers.restoring import restore
from rekindle._src.models.base import LoadedModel
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.models.unpacking import unpacked_model, words
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.collectives import collective_times
from rekindle._src.programs.keys import Key
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.warming import needed_after_restart, warm
from rekindle._src.session.parts import OpenRequest, Parts, make_parts
from rekindle._src.session.schedulers import make_scheduling
from rekindle._src.session.weights import Weights, page_identity
from rekindle._src.structured.grammar import Grammars
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.detokenizer import real_detokenizer
from rekindle._src.text.generation_config import checkpoint_sampling, describe
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import OutOfMemory, RekindleError
from rekindle_kernels import configure, unavailable_reason

if TYPE_CHECKING:
    from rekindle._src.processes.team import Team

log = logging.getLogger("rekindle.engine")


def build(request: OpenRequest) -> Engine:
    """Return a session's engine, ready to run. Raise typed errors, after freeing all that was loaded until then."""
    try:
        return _build(request)
    except (RekindleError, TypeError):
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemory(_shortage(request, error)) from error
        raise


def _build(request: OpenRequest) -> Engine:
    configure(cache_folder=cache_folder())  # kernels lie in the user's folder, since all sessions share them
    if isinstance(request.model, LoadedModel):
        request = dataclasses.replace(request, model=unpacked_model(request.model))
    team = None if request.config.processes == 1 else _gathered(request)
    try:
        parts = make_parts(request, None if team is None else team.agree)
        try:
            return _engine(request, parts, team)
        except BaseException:
            parts.warming.stop()
            raise
    except BaseException:
        if team is not None:
            team.close()
        raise


@functools.cache
def _say_without_kernels(reason: str) -> None:
    log.warning("no native kernels on this CPU, so XLA does their work, more slowly: %s", reason)


def _tokenizer(model: LoadedModel) -> Tokenizer:
    """Load the tokenizer. It keeps the GIL, 20 ms for a vocabulary of 49,000 tokens: best while programs are loaded."""
    if model.folder is not None:
        return Tokenizer.load(model.folder)
    return Tokenizer(None, eos_ids=model.config.eos_token_ids)


def _gathered(request: OpenRequest) -> Team:
    """Gather the followers of this session, and join JAX's service with them."""
    from rekindle._src.session.leading import gather

    return gather(request)


def _engine(request: OpenRequest, parts: Parts, team: Team | None) -> Engine:
    config, loaded, programs, warming, prefer_ready = parts
    owned, model = loaded is not request.model, loaded.config
    name = model.model_type if isinstance(request.model, LoadedModel) else str(request.model)
    if team is not None:
        request.shown.stage = "the other processes"
        team.begin(programs)  # when all processes have their weights
    if warming.waits_for_kernels:
        request.shown.stage = "compiling native kernels for this processor, once"
    warming.wait_for_kernels()
    reason = unavailable_reason()
    if reason is not None and "REKINDLE_NATIVE" not in reason:
        _say_without_kernels(reason)
    if words(loaded.graph):
        level = logging.INFO if loaded.graph.precision.unpacked else logging.WARNING
        log.log(level, "weights of %s are held as %s", name, _weights_held(loaded, config))
    tiers = _tiers(loaded, config, name, team)
    shard_config = programs.config
    runner = Runner(loaded, shard_config, host_tier=tiers, programs=programs, prefer_ready=prefer_ready, recorder=team)
    scheduler, cache = make_scheduling(config, loaded, programs, tiers)
    try:
        if tiers is not None and config.restore is not None:
            request.shown.stage = f"restoring {config.restore}"
            # Before waiting for programs, so that pages are read meanwhile.
            runner.prefault(restore(cache, tiers, config.restore).pages)
            _expect(runner, cache, tiers, warming.restorable())
        request.shown.stage = "vocabulary"
        tokenizer = _tokenizer(loaded)
        freed_memory.give_back()  # memory that reading a large vocabulary took
        request.shown.stage = "programs"
        warming.opened()
    except BaseException:
        if tiers is not None:
            tiers.close()
        raise
    if tiers is not None:
        tiers.busy = lambda: scheduler.has_work
    folder = loaded.folder
    weights = Weights(loaded, runner, config, tiers, owned=owned, placement=programs.parts.placement, team=team)

    def release() -> None:
        if team is not None:
            team.close()
        warming.stop()
        programs.close()
        weights.release()
        if tiers is not None:
            tiers.close()

    def prepare_restart(asked: bool) -> bool:
        if warming.in_peace and not asked:
            return True
        missing = [key for key in needed_after_restart(programs) if not programs.ready(key)][:1]
        warm(programs, missing, contexts=request.contexts, workers=1)
        if not missing:
            programs.end_parts()
            programs.flush()
        return bool(missing)

    sampling = _sampling(folder, config, request.model)
    chat = ChatTemplate.load(folder) if folder is not None else None
    if folder is not None and is_file(folder):
        from rekindle._src.models.loading.gguf.header import forget_headers  # other formats don't need it

        forget_headers()
    return Engine(
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        detokenizer=real_detokenizer(tokenizer),
        config=config,
        program_wait=runner.program_wait,
        mesh=_mesh(programs, config),
        collective_seconds=_collectives(programs),
        sampling=sampling,
        longest=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        chat=chat,
        model=name,
        weights=_weights_held(loaded, config),
        swap=weights.swap,
        recover=runner.recover,
        prepare_restart=prepare_restart,
        release=release,
        watch=None if team is None else team.watch,
        grammars=Grammars(tokenizer, model.vocab_size) if tokenizer.has_text else None,
        think_ids=tokenizer.pair("<think>", "</think>"),
        processors=tuple(processor.name for processor in request.processors),
        characters_per_token=(lambda: tokenizer.characters_per_token) if tokenizer.has_text else None,
    )


def _expect(runner: Runner, cache: AnyCache | None, tiers: Tiers, ready: Sequence[Key]) -> None:
    """Prepare for a request for restored pages, which is likely to come at once: `ready` are programs that it needs."""
    if runner.rehearse(ready) and isinstance(cache, PrefixCache) and {*runner.programs.fills} <= {*ready}:
        promote(cache, runner.fill, page_bytes=0 if tiers.disk is None else tiers.disk.page_bytes)


def _mesh(programs: Programs, config: EngineConfig) -> MeshReport | None:
    placement = programs.parts.placement
    if placement is None:
        return None
    assert config.page_size is not None, "resolved"
    return placement.report(paged.page_bytes(placement.local.config, config.page_size, config.kv_dtype))


def _collectives(programs: Programs) -> Callable[[Mapping[str, int]], float] | None:
    """Return a function from the steps of each program to the seconds that their collectives take alone.

    The collectives are measured here, before there are any steps.
    """
    placement, config = programs.parts.placement, programs.config
    times = None if placement is None else collective_times(placement, config.max_requests, config.max_tokens_per_step)
    return None if times is None else times.steps


def _weights_held(loaded: LoadedModel, config: EngineConfig) -> str:
    """Describe the formats of the weights, the memory of each, and why it is not the dtype alone."""
    reasons = [words(loaded.graph)]
    if config.quantize is not None:
        reasons.insert(0, f"by quantize={config.quantize!r}")
    elif " bits " in loaded.held:
        reasons.insert(0, "in the groups of the checkpoint: quantize is None")
    text = "; ".join(filter(None, reasons))
    return f"{loaded.held} ({text})" if text else loaded.held


def _sampling(folder: Path | None, config: EngineConfig, model: object) -> Sampling | None:
    """Return the checkpoint's sampling defaults, and log them; None if it has none or they are turned off."""
    if folder is None or config.generation_config == "greedy":
        return None
    sampling = checkpoint_sampling(folder)
    if sampling is not None:
        log.info(
            'requests to %s are sampled as it asks: %s. generation_config="greedy" turns it off',
            model,
            describe(sampling),
        )
    return sampling


def _tiers(model: LoadedModel, config: EngineConfig, name: str, team: Team | None) -> Tiers | None:
    """Return the tiers below the device; None without a prefix cache."""
    if not config.prefix_cache:
        return None
    assert config.page_size is not None, "resolved"
    disk, identity = None, page_identity(model, config, name)
    if config.disk_memory:
        folder = cache_folder(config.cache_dir)
        if team is None:
            disk = DiskTier(folder, config.disk_memory, identity)
        else:
            disk = DividedDiskTier(folder, config.disk_memory, identity, team.pages)
    host = HostTier(config.host_memory) if team is None else DividedHostTier(config.host_memory, team.pages)
    return Tiers(host, CostModel(config.page_size), disk, identity=identity)


def _shortage(request: OpenRequest, error: BaseException) -> str:
    config = request.config
    statistics = jax.local_devices()[0].memory_stats() or {}
    free = statistics.get("bytes_limit", 0) - statistics.get("bytes_in_use", 0)
    room = f"{free / 2**30:.1f} GiB are free on the device" if statistics else "the host's memory is used up"
    options = f"device_memory={config.device_memory}, device_pages={config.device_pages}, dtype={config.dtype!r}"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"opening {request.model!r} ({options}) ran out of memory: {reason}. {room}. Lower device_memory or quantize"
