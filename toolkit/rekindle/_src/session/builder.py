"""Opening a model: from the arguments of `open` to the engine of a session, on the session's device thread.

`build` is the whole way, in order; the functions below it are its steps, in the order of their use. Programs are loaded
or compiled in other threads from the moment that the model's shapes are known, while the weights are read. A session of
several processes has the first half of the way, `make_parts`, in each of them; followers put nothing on top.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax

from rekindle import tiny
from rekindle._src.core import shared_cache
from rekindle._src.core.activity import NO_WAIT, ProgramWait
from rekindle._src.core.config import EngineConfig, cache_folder
from rekindle._src.core.dtypes import DType
from rekindle._src.core.memory import give_back, given_back
from rekindle._src.core.mesh_shape import MeshReport, checked_mesh
from rekindle._src.core.records import units_for
from rekindle._src.core.tapped import TapFacts, check_named
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.engine import Engine, Resources
from rekindle._src.execution.runner import Runner
from rekindle._src.kvcache import AnyCache, CostModel, HostTier, PagePool, PrefixCache, Tiers, TreeStates, TreeTails
from rekindle._src.kvcache.caches import trees
from rekindle._src.kvcache.kept import KeptCaptures
from rekindle._src.kvcache.persist import snapshot
from rekindle._src.kvcache.tiers.disk import DiskTier, StoredCaptures
from rekindle._src.kvcache.tiers.restoring import promote, restore, restore_states
from rekindle._src.models.adapters.adapted import merged
from rekindle._src.models.base import ALONE, Graph, LoadedModel, Placement
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.checkpoint import CheckpointPlan, describe, read
from rekindle._src.models.loading.gguf.files import is_file
from rekindle._src.models.loading.hub import readable_name
from rekindle._src.models.loading.sentence_transformers import embedder_of
from rekindle._src.models.placement import MeshPlacement, placement_of
from rekindle._src.models.unpacking import unpacked_model, words
from rekindle._src.processes.others import OtherProcesses
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs import store as program_store
from rekindle._src.programs.buckets import ADAPTED, Key, prefill_rows
from rekindle._src.programs.collectives import collective_times
from rekindle._src.programs.demand import Demand, StepPrograms
from rekindle._src.programs.hybrid_layers import least_pages, span, state_slots, tail_pages
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.store import ExecutableStore, ProgramStore
from rekindle._src.programs.taps import tap_facts, variants_of
from rekindle._src.programs.user_functions import LogitsProcessor, Tap, check_places, check_results
from rekindle._src.programs.warming import Warming, finish_at_exit, needed_after_restart, warm
from rekindle._src.scheduling.admission import AdapterSlots
from rekindle._src.scheduling.data_scheduler import DataScheduler, ShardScheduler
from rekindle._src.scheduling.scheduler import Scheduler
from rekindle._src.scheduling.sequence import Limits
from rekindle._src.session.adapters import AdapterShelf
from rekindle._src.session.open_request import OpenRequest, precompiles
from rekindle._src.session.resolve import deterministic, of_one_shard, resolve
from rekindle._src.session.weights import Weights, page_identity, state_identity
from rekindle._src.structured.grammar import Grammars
from rekindle._src.text.chat import ChatTemplate
from rekindle._src.text.detokenizer import real_detokenizer
from rekindle._src.text.generation_config import Defaults, defaults_of
from rekindle._src.text.generation_config import describe as in_words
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import ConfigError, OutOfMemory, RekindleError
from rekindle_kernels import EDGE, configure, traits, unavailable_reason

if TYPE_CHECKING:
    from rekindle._src.processes.greeting import ProcessReport

log = logging.getLogger("rekindle.engine")
# The options that are each process's own, or that only the process with the scheduler uses.
OWN = frozenset(
    {"cache_dir", "coordinator", "restore", "quiet", "log_every", "step_timeout", "policy", "seed", "max_queue"}
)
STATE_SHARE = 4  # one in so many bytes of host memory is for states or window pages, in models that have them
Agree = Callable[["ProcessReport"], int]  # with the other processes, on the KV pages that all have room for


def build(request: OpenRequest) -> Front:
    """Return a session's front over its engine. Raise typed errors, after freeing all that was loaded until then."""
    try:
        with contextlib.ExitStack() as undo:
            front = _build(request, undo)
            undo.pop_all()
        return front
    except (RekindleError, TypeError):
        raise
    except Exception as error:
        no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if no_memory or "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemory(_shortage(request, error)) from error
        raise


def _build(request: OpenRequest, undo: contextlib.ExitStack) -> Front:
    """Do all that opening takes; what an error has to end is left in `undo`."""
    # The other processes, if any, and what each process has: its part of the model, and programs that are being made.
    configure(cache_folder=cache_folder())  # kernels lie in the user's folder, since all sessions share them
    if isinstance(request.model, LoadedModel):
        request = dataclasses.replace(request, model=unpacked_model(request.model))
    others = OtherProcesses() if request.config.processes == 1 else _gathered(request)
    undo.callback(others.close)
    parts = make_parts(request, others.agreement, with_text=True)
    undo.callback(parts.warming.stop)
    config, loaded, programs, warming = parts.config, parts.model, parts.programs, parts.warming
    name = loaded.config.model_type if isinstance(request.model, LoadedModel) else str(request.model)

    def show(stage: str) -> None:
        request.shown.stage = stage

    # Native kernels: no step runs before they are there.
    others.begin(programs, show)  # when all processes have their weights
    if warming.waits_for_kernels:
        request.shown.stage = "compiling native kernels for this processor, once"
    warming.wait_for_kernels()
    _say_what_is_slow(loaded, config, name)

    shelf = _shelf(request, loaded.config, programs)
    owned = loaded is not request.model
    merge = None
    if request.merge is not None:
        request.shown.stage = "merging an adapter"
        merge = shelf.merge(request.merge)
        loaded = merged(loaded, merge)

    # Tiers, runner and scheduler.
    tiers = _tiers(loaded, config, name, others)
    state_tiers = _state_tiers(loaded, config, tiers)
    all_tiers = [each for each in (tiers, state_tiers) if each is not None]
    for each in all_tiers:
        undo.callback(each.close)
    runner = Runner(
        loaded,
        programs.config,
        host_tier=tiers,
        state_tier=state_tiers,
        programs=programs,
        prefer_ready=parts.prefer_ready,
        recorder=others,
    )
    demand = Demand(programs, contexts=request.contexts)
    finish_at_exit(demand)
    alone = programs.shards.count == 1 and not programs.parts.multi_process
    on_demand = StepPrograms(programs, demand) if alone else None
    scheduler, cache = make_scheduling(config, loaded, programs, tiers, state_tiers, runner.program_wait, on_demand)

    # Restored pages, read while the vocabulary is, and the programs that their first request needs.
    if tiers is not None and config.restore is not None:
        request.shown.stage = f"restoring {config.restore}"
        # Before waiting for programs, so that pages are read meanwhile.
        runner.prefault(restore(cache, tiers, config.restore).pages)
        if state_tiers is not None:
            restore_states(state_tiers, config.restore)
        if cache is not None and cache.kept is not None and tiers.disk is not None:
            cache.kept.stored = StoredCaptures(tiers.disk)
        _expect(runner, cache, tiers, warming.restorable())
    request.shown.stage = "vocabulary"
    assert parts.tokenizer is not None, "asked for"
    tokenizer = parts.tokenizer.result()
    give_back()  # memory that reading a large vocabulary took
    request.shown.stage = "programs"
    warming.opened()

    # The engine.
    for each in all_tiers:
        each.busy = lambda: scheduler.has_work
    model, folder = loaded.config, loaded.folder
    weights = Weights(
        loaded, runner, config, tiers, owned=owned, others=others, state_tiers=state_tiers, merge=merge
    )  # fmt: skip

    def release() -> None:
        others.close()
        warming.stop()
        demand.stop()
        programs.close()
        weights.release()
        for each in all_tiers:
            each.close()

    def prepare_restart(demanded: bool) -> bool:
        if warming.in_peace and not demanded:
            return True
        missing = [key for key in needed_after_restart(programs) if not programs.ready(key)][:1]
        warm(programs, missing, contexts=request.contexts, workers=1)
        if not missing:
            programs.replace_parts()
            programs.flush()
        return bool(missing)

    defaults, embedder = _defaults(folder, config, request.model), embedder_of(folder, model)
    chat = ChatTemplate.load(folder) if folder is not None else None
    if folder is not None and is_file(folder):
        from rekindle._src.models.loading.gguf.header import forget_headers  # other formats don't need it

        forget_headers()
    expect_chat = _chat_expected(warming, chat, tokenizer, drawn=defaults.chat is not None)
    if precompiles(config.precompile) == "background":
        expect_chat()
    resources = Resources(
        weights=_weights_held(loaded, config),
        mesh=_mesh(loaded, config),
        model=lambda: weights.model,
        merged=merge is not None,
        swap=weights.swap,
        set_aside=runner.set_aside if others.agreement is None else None,
        sleep=weights.sleep if others.agreement is None else None,
        wake=weights.wake,
        recover=runner.recover,
        collective_seconds=_collectives(loaded, programs),
        prepare_restart=prepare_restart,
        watch=others.watch,
        drop_altered=_dropping(cache, tiers),
        release=release,
    )
    return Front(
        backend=Engine(scheduler, runner, config, resources),
        tokenizer=tokenizer,
        detokenizer=real_detokenizer(tokenizer),
        config=config,
        program_wait=runner.program_wait,
        expect_chat=expect_chat,
        sampling=defaults.sampling,
        chat_sampling=defaults.chat,
        longest=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        embedder=embedder,
        chat=chat,
        model=name,
        grammars=Grammars(tokenizer, model.vocab_size) if tokenizer.has_text else None,
        taps=parts.taps,
        think_ids=tokenizer.pair("<think>", "</think>"),
        processors=tuple(processor.name for processor in request.processors),
        adapters=shelf,
        characters_per_token=(lambda: tokenizer.characters_per_token) if tokenizer.has_text else None,
    )


QUESTION = "What is the difference between a crocodile and an alligator?"  # as long as most first messages


def _chat_expected(
    warming: Warming, chat: ChatTemplate | None, tokenizer: Tokenizer, *, drawn: bool
) -> Callable[[], None]:
    """Return a function that makes the programs of a first message ahead; it does nothing for a model without chats."""
    if chat is None or not tokenizer.has_text:
        return lambda: None

    def tokens() -> int:
        text = chat.prepare([{"role": "user", "content": QUESTION}])()
        return len(tokenizer.encode(text, add_special_tokens=False))

    return lambda: warming.expect(tokens, drawn=drawn)


def _shortage(request: OpenRequest, error: BaseException) -> str:
    config = request.config
    statistics = jax.local_devices()[0].memory_stats() or {}
    free = statistics.get("bytes_limit", 0) - statistics.get("bytes_in_use", 0)
    room = f"{free / 2**30:.1f} GiB are free on the device" if statistics else "the host's memory is used up"
    options = f"device_memory={config.device_memory}, device_pages={config.device_pages}, dtype={config.dtype!r}"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"opening {request.model!r} ({options}) ran out of memory: {reason}. {room}. Lower device_memory or quantize"


def _gathered(request: OpenRequest) -> OtherProcesses:
    """Wait for the followers, and join JAX's service with them. Raise ConfigError for what can't be shared."""
    from rekindle._src.processes import joining  # a session of one process does without it

    config = request.config
    if not isinstance(request.model, str | Path):
        raise ConfigError(
            "model",
            type(request.model).__name__,
            "is in this process only, and others share it",
            "Pass a folder or hub id that all of them can read",
        )
    for option, entries in (("processors", request.processors), ("taps", request.taps)):
        if entries:
            names = [entry.name for entry in entries]
            problem = "are functions of this process, which others can't call"
            raise ConfigError(option, names, problem, "Leave them out, or use a mesh")
    if request.steering:
        problem = "needs a model in one process"
        raise ConfigError("steering", list(request.steering), problem, "Leave it out, or use a mesh")
    assert config.coordinator is not None, "checked with the config"

    def waiting(joined: int) -> None:
        request.shown.stage = f"process {joined + 1} of {config.processes}"

    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in OWN}
    options |= {"mesh": dict(options["mesh"]), "precompile": precompiles(config.precompile)}
    session = {"model": str(request.model), "options": options}
    return joining.lead(config.coordinator, config.processes, session, waiting=waiting, given_up=request.given_up)


# The parts that every process of a session has.


class Parts(NamedTuple):
    """The parts of a session in one process."""

    config: EngineConfig  # resolved
    model: LoadedModel
    programs: Programs
    warming: Warming
    taps: TapFacts | None
    prefer_ready: bool
    tokenizer: Future[Tokenizer] | None = None


def make_parts(request: OpenRequest, agree: Agree | None = None, *, with_text: bool = False) -> Parts:
    """Load or compile programs, and load the weights meanwhile; `with_text`, also the tokenizer."""
    # The checkpoint's headers, and the devices.
    shared_cache.attach(request.config.shared_cache, (cache_folder(), cache_folder(request.config.cache_dir)))
    _check_snapshot(request.config)
    described = request.model if isinstance(request.model, LoadedModel) else _describe(request)
    model, graph, shapes = _shapes(described)
    mesh_config, placement = _placement(request.config, described, graph)
    weight_bytes = 0  # that are still to be put on each device
    if not isinstance(described, LoadedModel) or described.placement != placement:
        weight_bytes, shapes = placement.bytes_per_device(shapes), placement.shapes(shapes)

    # The options, resolved, and the programs that follow from them.
    if mesh_config.dtype == "auto" and isinstance(described, LoadedModel):
        # Pages in fewer bits than the weights that are here would cost digits that the caller loaded on purpose.
        mesh_config = dataclasses.replace(mesh_config, dtype=cast(DType, graph.precision.weights))
    config = resolve(mesh_config, model, weight_bytes=weight_bytes, placement=placement)
    if agree is not None:
        config = _agreed(config, described, agree)
    if config.deterministic:
        graph = deterministic(graph, config)
    taps = _tap_facts(request, model, config)
    programs = stored_programs(
        model, graph, shapes, config, request.processors, placement=placement, name=_name_of(described),
        ahead=ADAPTED * bool(request.adapters) + variants_of(request.steering), taps=request.taps,
    )  # fmt: skip
    if not programs.traced_processors:
        check_results(request.processors, model.vocab_size)
    precompile = precompiles(config.precompile)
    if precompile == "background" and model.only_embeds:
        precompile = "lazy"  # of the programs that are made ahead, it needs none
    request.shown.compiling = programs.describe_compiling
    # Programs need shapes alone, so they are loaded or compiled while the weights are read.
    warming = Warming(
        programs,
        precompile,
        restoring=config.restore is not None,
        progress=request.shown.warmed if precompile == "all" else None,  # otherwise opening does not wait for them
        contexts=given_back(request.contexts),  # memory that reading stored programs took
    )

    # The weights.
    tokenizer = _tokenizer(described) if with_text else None
    try:
        request.shown.stage = "weights"
        loaded = _loaded(request, described, placement)
    except BaseException:
        warming.stop()
        raise
    return Parts(config, loaded, programs, warming, taps, precompile == "background", tokenizer)


def _tap_facts(request: OpenRequest, model: ModelConfig, config: EngineConfig) -> TapFacts | None:
    """Return what can be tapped; None if nothing. Raise ConfigError for taps that do not fit the model."""
    facts = tap_facts(model, processes=config.processes)
    custom = check_places(request.taps, facts)
    check_named(request.steering, facts)
    keeps = "" if config.prefix_cache else "prefix_cache is off"
    keeps = keeps or ("" if config.capture_memory else "capture_memory is 0")
    return facts and facts._replace(custom=custom, steering=request.steering, keeps=keeps)


def _check_snapshot(config: EngineConfig) -> None:
    """Raise StoreError for a missing snapshot before anything is loaded, unless a shared cache may have it."""
    shared = config.shared_cache or os.environ.get(shared_cache.VARIABLE)
    name = None if config.restore == "auto" or shared else config.restore
    if name is not None and config.prefix_cache and config.disk_memory:
        snapshot.find(cache_folder(config.cache_dir), snapshot.check_name(name))


def _describe(request: OpenRequest) -> CheckpointPlan:
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


def _shapes(model: LoadedModel | CheckpointPlan) -> tuple[ModelConfig, Graph, Sequence[Any]]:
    """Return config, graph, and leaves or their shapes."""
    if isinstance(model, LoadedModel):
        return model.config, model.graph, model.leaves
    return model.found.config, model.graph, model.shapes


def _placement(
    config: EngineConfig, described: LoadedModel | CheckpointPlan, graph: Graph
) -> tuple[EngineConfig, Placement]:
    """Return the config with its mesh, and the devices that share the model. A model made on a mesh keeps that mesh."""
    placement = placement_of(checked_mesh(config.mesh), graph, processes=config.processes)
    current = described.placement if isinstance(described, LoadedModel) else ALONE
    if not isinstance(current, MeshPlacement):
        return config, placement
    if config.mesh is not None and placement.key() != current.key():
        raise ConfigError("mesh", config.mesh, f"is not that of the model, which lies on {current!r}", "Leave it out")
    return dataclasses.replace(config, mesh=current.mesh), current


def _agreed(config: EngineConfig, described: LoadedModel | CheckpointPlan, agree: Agree) -> EngineConfig:
    from rekindle._src.processes.greeting import facts

    assert isinstance(described, CheckpointPlan), "other processes read a checkpoint, too"
    assert config.device_pages is not None, "resolved"
    assert config.device_memory is not None, "resolved"
    local_facts = facts(config, model=described.found.config.digest(), fingerprint=described.found.fingerprint)
    pages = agree(local_facts)
    page = config.device_memory // config.device_pages
    return dataclasses.replace(config, device_pages=pages, device_memory=pages * page)


def _name_of(described: LoadedModel | CheckpointPlan) -> str:
    folder = described.folder if isinstance(described, LoadedModel) else described.found.folder
    return "" if folder is None else readable_name(folder)


def stored_programs(
    model: ModelConfig,
    graph: Graph,
    leaves: Sequence[Any],
    config: EngineConfig,
    processors: Sequence[LogitsProcessor] = (),
    *,
    placement: Placement = ALONE,
    name: str = "",
    ahead: str = "",
    taps: Sequence[Tap] = (),
) -> Programs:
    """Return the programs of a resolved config, those of earlier sessions too. Only the shapes of leaves are read.

    `name` is the model's name in `rekindle cache ls`, and `ahead` as for `Programs`.
    """
    config = of_one_shard(config, placement.data)
    fields = {
        "environment": program_store.environment(),
        "model": model.digest(),
        "leaves": [(path, leaf.shape, str(leaf.dtype)) for path, leaf in zip(graph.paths, leaves, strict=True)],
        "config": program_store.config_fields(config),
        "states": state_slots(model, config.max_requests, shared=config.prefix_cache),
        "processors": [processor.key for processor in processors],
        "taps": [tap.key for tap in taps],
        **placement.key(),
    }
    assert config.device_pages is not None, "resolved"
    if tails := tail_pages(model, config, config.device_pages, apart=placement.pages_apart):
        fields["tails"] = tails
    folder = cache_folder(config.cache_dir) / "programs"
    digest, devices = program_store.digest(fields), tuple(placement.devices)
    store = ProgramStore(ExecutableStore(folder), name or model.model_type, digest, devices)
    return Programs(
        model, graph, leaves, config, processors=processors, taps=taps, ahead=ahead, store=store,
        placement=placement,
    )  # fmt: skip


def _loaded(request: OpenRequest, described: LoadedModel | CheckpointPlan, placement: Placement) -> LoadedModel:
    """Return the model with its weights on their devices."""
    if isinstance(described, LoadedModel):
        return placement.model(described)
    if request.ahead is None:
        return read(described, progress=request.report, placement=placement)
    return read(described, progress=request.report, placement=placement, brought=request.ahead.weights)


# What the process with the scheduler puts on top.


def _say_what_is_slow(loaded: LoadedModel, config: EngineConfig, name: str) -> None:
    """Log missing kernels, and weights that are held in another format than that of the checkpoint."""
    reason = unavailable_reason()
    if reason is not None and "REKINDLE_NATIVE" not in reason:
        _say_without_kernels(reason)
    if words(loaded.graph):
        level = logging.INFO if loaded.graph.precision.unpacked else logging.WARNING
        log.log(level, "weights of %s are held as %s", name, _weights_held(loaded, config))


@functools.cache
def _say_without_kernels(reason: str) -> None:
    log.warning("no native kernels on this CPU, so XLA does their work, more slowly: %s", reason)


def _weights_held(loaded: LoadedModel, config: EngineConfig) -> str:
    """Describe the formats of the weights, the memory of each, and why it is not the dtype alone."""
    reasons = [words(loaded.graph)]
    if config.quantize is not None:
        reasons.insert(0, f"by quantize={config.quantize!r}")
    elif " bits " in loaded.held:
        reasons.insert(0, "in the groups of the checkpoint: quantize is None")
    text = "; ".join(filter(None, reasons))
    return f"{loaded.held} ({text})" if text else loaded.held


def _tiers(model: LoadedModel, config: EngineConfig, name: str, others: OtherProcesses) -> Tiers | None:
    """Return the tiers below the device; None without a prefix cache."""
    if not config.prefix_cache:
        return None
    assert config.page_size is not None, "resolved"
    disk, identity = None, page_identity(model, config, name)
    if config.disk_memory:
        disk = others.disk(cache_folder(config.cache_dir), config.disk_memory, identity)
    host = others.host(config.host_memory - (_state_budget(config) if _beside_pages(model) else 0))
    return Tiers(host, CostModel(config.page_size), disk, identity=identity)


def _state_tiers(model: LoadedModel, config: EngineConfig, pages: Tiers | None) -> Tiers | None:
    """Return the tiers for states, or for window pages; they share the disk and its budget with `pages`."""
    if pages is None or pages.identity is None or not _beside_pages(model):
        return None
    assert config.page_size is not None, "resolved"
    costs, identity = CostModel(config.page_size), state_identity(pages.identity, model, config)
    costs.mode = "always"  # one state, or one window, stands for all the tokens before it
    disk = None if pages.disk is None else DiskTier(pages.disk.folder, pages.disk.budget, identity)
    return Tiers(HostTier(_state_budget(config)), costs, disk, identity=identity)


def _beside_pages(model: LoadedModel) -> bool:
    """True if nodes of the tree have more than pages: states, or pages of layers with a window."""
    return model.config.is_recurrent or (model.placement.pages_apart and model.config.window > 0)


def _state_budget(config: EngineConfig) -> int:
    return config.host_memory // STATE_SHARE


class Scheduling(NamedTuple):
    """A scheduler, and the cache that it keeps pages in."""

    scheduler: Scheduler | DataScheduler
    cache: AnyCache | None


def make_scheduling(
    config: EngineConfig,
    model: LoadedModel,
    programs: Programs,
    tiers: Tiers | None,
    state_tiers: Tiers | None = None,
    program_wait: ProgramWait = NO_WAIT,
    on_demand: StepPrograms | None = None,
) -> Scheduling:
    """Make the scheduler with its page pool and prefix cache, or one of each for every data shard.

    `config` is the session's, resolved. Without `tiers` requests share no pages. Without `on_demand` a step waits for
    a program that is not ready, with all of its rows.
    """
    limits = _limits(config, model, programs)
    shards, states = programs.shards, _tree_states(limits, model, programs, tiers, state_tiers)
    caches: list[PrefixCache] = []
    root = b"" if tiers is None else page_identity(model, config).root
    kept = KeptCaptures(config.capture_memory, limits.page_size, root)  # of all shards: a digest says enough

    def pages(shard: int) -> tuple[PagePool, PrefixCache | None]:
        pool = PagePool(shards.pages, first=shard * shards.pages)
        if tiers is None:
            return pool, None
        caches.append(PrefixCache(pool, limits.page_size, root, host_tier=tiers, states=states, kept=kept))
        return pool, caches[-1]

    if shards.count == 1:
        pool, cache = pages(0)
        scheduler = Scheduler(
            limits,
            pool,
            cache=cache,
            policy=config.policy,
            seed=config.seed,
            adapters=AdapterSlots(*adapter_room(programs)),
            states=states,
            program_wait=program_wait,
            programs=on_demand,
        )
        return Scheduling(scheduler, cache)
    arrivals, schedulers = itertools.count(), list[ShardScheduler]()
    for shard in range(shards.count):
        pool, cache = pages(shard)
        first = shard * shards.slots
        schedulers.append(
            ShardScheduler(
                limits,
                pool,
                cache=cache,
                policy=config.policy,
                seed=config.seed,
                first_slot=first,
                arrivals=arrivals,
                program_wait=program_wait,
            )
        )
    data_scheduler = DataScheduler(schedulers)
    return Scheduling(data_scheduler, data_scheduler.cache)


def _tree_states(
    limits: Limits, model: LoadedModel, programs: Programs, tiers: Tiers | None, state_tiers: Tiers | None
) -> TreeStates | None:
    """Return the tree's slots for states, or for pages of layers with a window; None for a model that has neither.

    Without `tiers` there are no slots for states. Slots for pages of layers with a window are shared with sequences.
    """
    if programs.tails:
        size, needed = limits.page_size, least_pages(model.config, programs.config)
        spare = 0 if programs.tails == programs.config.device_pages else needed - 1
        return TreeTails(programs.tails, size, state_tiers, span=span(model.config, size), least=spare)
    if not model.config.is_recurrent:
        return None
    first = 1 + limits.max_requests  # after the scratch slot and those of running requests
    count = state_slots(model.config, limits.max_requests, shared=tiers is not None)
    return TreeStates(range(first, 1 + count), math.lcm(EDGE, limits.page_size), limits.page_size, state_tiers)


def adapter_room(programs: Programs) -> tuple[int, int]:
    """Return the slots and units of adapters on the device; zero where a session can't have any."""
    config = programs.config
    if not programs.adapted:
        return 0, 0
    return config.max_adapters, config.max_adapters * units_for(config.max_adapter_rank)


def _shelf(request: OpenRequest, model: ModelConfig, programs: Programs) -> AdapterShelf:
    """Return the session's adapters, with those that it is opened with."""
    config = request.config
    refused = "" if programs.adapted else "the model has several data shards, or several processes share it"
    dtype = programs.graph.precision.weights
    shelf = AdapterShelf(model, config.max_adapters, config.max_adapter_rank, dtype=dtype, refused=refused)
    for name, source in request.adapters.items():
        request.shown.stage = f"adapter {name}"
        shelf.put(shelf.read(name, source))
    return shelf


def _dropping(cache: AnyCache | None, tiers: Tiers | None) -> Callable[[str], object] | None:
    """Return a function that drops the pages that depend on a digest, from device and host memory."""
    if cache is None:
        return None

    def drop(digest: str) -> None:
        for tree in trees(cache):
            tree.drop_altered(digest, None if tiers is None else tiers.host.discard)

    return drop


def _limits(config: EngineConfig, model: LoadedModel, programs: Programs) -> Limits:
    """Return the limits of each data shard. The queue's limit is for all of them together."""
    shard = programs.config
    padded = not traits(model.graph.precision.implementation).skips_padding
    limits = Limits.of(
        shard,
        max_prefill_rows=prefill_rows(shard.max_tokens_per_step, shard.max_requests),
        padded=padded,
        edge=EDGE if model.config.is_recurrent else 1,
        whole=model.config.is_bidirectional,
        window=model.config.window if programs.tails else 0,
    )
    # The admission limiter bounds the queue; a burst may be queued whole before the first of it runs.
    return dataclasses.replace(
        limits,
        max_queue=config.max_queue + config.max_requests,
        longest=model.config.max_position_embeddings,
    )


def _expect(runner: Runner, cache: AnyCache | None, tiers: Tiers, ready: Sequence[Key]) -> None:
    """Prepare for a request for restored pages, which is likely to come at once: `ready` are programs that it needs."""
    if runner.rehearse(ready) and isinstance(cache, PrefixCache) and {*runner.programs.fills} <= {*ready}:
        promote(cache, runner.fill, page_bytes=0 if tiers.disk is None else tiers.disk.page_bytes)


def _tokenizer(described: LoadedModel | CheckpointPlan) -> Future[Tokenizer]:
    """Load the tokenizer in a thread. A large vocabulary takes 0.1 s, in which weights are read and programs made."""
    found = described if isinstance(described, LoadedModel) else described.found

    def load() -> Tokenizer:
        if found.folder is not None:
            return Tokenizer.load(found.folder)
        return Tokenizer(None, eos_ids=found.config.eos_token_ids)

    pool = ThreadPoolExecutor(1, thread_name_prefix="rekindle vocabulary")
    tokenizer = pool.submit(load)
    pool.shutdown(wait=False)
    return tokenizer


def _defaults(folder: Path | None, config: EngineConfig, model: object) -> Defaults:
    """Return the sampling of requests without options of their own; log what the checkpoint asks for."""
    if config.generation_config == "greedy":
        return Defaults()
    defaults = defaults_of(folder)
    if (sampling := defaults.sampling) is not None:
        log.info(
            'requests to %s are sampled as it asks: %s. generation_config="greedy" turns it off',
            model,
            in_words(sampling),
        )
    return defaults


def _mesh(loaded: LoadedModel, config: EngineConfig) -> MeshReport | None:
    assert config.page_size is not None, "resolved"
    local = loaded.placement.local_config(loaded.config)
    return loaded.placement.report(paged.page_bytes(local, config.page_size, config.kv_dtype))


def _collectives(loaded: LoadedModel, programs: Programs) -> Callable[[Mapping[str, int]], float] | None:
    """Return a function from the steps of each program to the seconds that their collectives take alone.

    The collectives are measured here, before there are any steps.
    """
    config = programs.config
    times = collective_times(loaded.placement, config.max_requests, config.max_tokens_per_step)
    return None if times is None else times.steps
