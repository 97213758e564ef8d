"""Opening a model: from the arguments of `open` to the engine of a session, on the session's device thread.

`build` is the one place that knows the order. Each owner is opened from the blueprint, and all are closed in reverse,
by an error or at the session's end. Programs are loaded or compiled in other threads from the moment that the model's
shapes are known, while the weights and the vocabulary are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
from collections.abc import Iterator
from contextlib import closing

import jax

from rekindle._src.capabilities.plans import Owner
from rekindle._src.core import shared_cache
from rekindle._src.core.config import EngineConfig, cache_folder
from rekindle._src.dispatch.backend import Front
from rekindle._src.dispatch.engine import Engine
from rekindle._src.drafts.kind import DraftOpening
from rekindle._src.execution.runner import Runner
from rekindle._src.models.unpacking import words
from rekindle._src.opening import peers
from rekindle._src.opening.blueprint import Blueprint, blueprint
from rekindle._src.opening.cache import SessionCache, check_snapshot
from rekindle._src.opening.device import ModelDevice, Sleeper, weights_in_words
from rekindle._src.opening.open_request import OpenRequest, precompiles
from rekindle._src.opening.programs import SessionPrograms
from rekindle._src.opening.source import source_of
from rekindle._src.opening.vocabulary import TextSettings, Vocabulary
from rekindle._src.opening.weights import Weights
from rekindle._src.text.detokenizers import real_detokenizer
from rekindle._src.text.tokenizer import Tokenizer
from rekindle.errors import OutOfMemory, RekindleError
from rekindle_kernels import configure, unavailable_reason

log = logging.getLogger("rekindle.engine")


def build(request: OpenRequest) -> Front:
    """Return a session's front over its engine. Raise typed errors, after freeing all that was loaded until then."""
    with _telling_shortage(request), contextlib.ExitStack() as owners:
        attach_caches(request.config)
        others = owners.enter_context(closing(peers.gather(request)))
        check_snapshot(request.config)  # before anything is loaded
        source = source_of(request)
        plan = peers.agreed(blueprint(request, source), source, others.agreement)
        capabilities = _owners(plan, request, owners, None)  # before anything takes long
        programs = owners.enter_context(closing(SessionPrograms.open(plan, request.shown, request.contexts)))
        vocabulary = Vocabulary.begin(plan)
        request.show("weights")
        read = Weights.open(plan, source, progress=request.report, brought=request.brought, others=others)
        weights = owners.enter_context(closing(read))
        del source  # nothing of the model itself is needed once its weights are here
        others.begin(programs.all, request.show)  # when all processes have their weights
        programs.wait_for_kernels(request.show)
        _say_what_is_slow(weights_in_words(weights.model, plan), plan)
        for change in [owner.change for owner in capabilities if owner.change is not None]:
            request.show(change.stage)
            weights.change(change.change)
        cache = owners.enter_context(closing(SessionCache.open(plan, weights.model.fingerprint, others)))
        opening = DraftOpening(programs.all, request.show, cache.lose_drafts, lambda: weights.model)
        drafter = owners.enter_context(closing(plan.drafts.open(opening)))
        runner = Runner(
            dataclasses.replace(weights.model, leaves=plan.leaves_of(weights.model)),
            programs.all.config,
            host_tier=cache.tiers,
            side_tiers=[store.tiers for store in cache.stores],
            programs=programs.all,
            prefer_ready=plan.precompile == "background",
            recorder=others,
            drafter=drafter,
        )
        scheduler = cache.schedule(programs, runner.program_wait)
        cache.restore(runner, programs, request.show)
        request.show("vocabulary")
        tokenizer = vocabulary.tokenizer()
        plan.drafts.check(tokenizer)
        capabilities += _owners(plan, request, owners, tokenizer)
        request.show("programs")
        programs.opened()
        cache.opened()
        sleepers: list[Sleeper] = [*capabilities, drafter]
        device = ModelDevice(plan, weights, programs, cache, runner, others, sleepers, (drafter.swapped,))
        engine = Engine(scheduler, runner, plan.config, device)
        front = _front(engine, plan, programs, vocabulary.texts(), tokenizer)._replace(
            program_wait=runner.program_wait,
            services={kind: service for owner in capabilities for kind, service in owner.services.items()},
        )
        device.owners = owners.pop_all()
        return front


def _owners(
    plan: Blueprint, request: OpenRequest, owners: contextlib.ExitStack, tokenizer: Tokenizer | None
) -> list[Owner]:
    """Open the owners of capabilities: without the tokenizer the early ones, and with it the others."""
    session = plan.session(request.show)
    return [
        owners.enter_context(closing(owner))  # at once: a later one may not open
        for one in plan.capabilities
        if one.early == (tokenizer is None) and (owner := one.open(session, tokenizer)) is not None
    ]


def attach_caches(config: EngineConfig) -> None:
    """Use the cache folder for kernels, which all sessions share, and the shared cache if the options name one."""
    configure(cache_folder=cache_folder())
    shared_cache.attach(config.shared_cache, (cache_folder(), config.cache_folder))


def _front(
    engine: Engine,
    plan: Blueprint,
    programs: SessionPrograms,
    texts: TextSettings,
    tokenizer: Tokenizer,
) -> Front:
    """Return the front, which turns prompts into requests and tokens into text."""
    (defaults, chat, embedder), model = texts, plan.model
    expect_chat = programs.expecting_chat(chat, tokenizer, drawn=defaults.chat is not None)
    if precompiles(plan.config.precompile) == "background":
        expect_chat()
    return Front(
        backend=engine,
        tokenizer=tokenizer,
        detokenizer=real_detokenizer(tokenizer),
        config=plan.config,
        expect_chat=expect_chat,
        sampling=defaults.sampling,
        chat_sampling=defaults.chat,
        longest=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        embedder=embedder,
        chat=chat,
        model=plan.name,
        processors=tuple(processor.name for processor in plan.programs.processors),
        characters_per_token=(lambda: tokenizer.characters_per_token) if tokenizer.has_text else None,
    )


def _say_what_is_slow(weights: str, plan: Blueprint) -> None:
    """Log missing kernels, and weights held in a format other than the checkpoint's."""
    reason = unavailable_reason()
    if reason is not None and "REKINDLE_NATIVE=0" not in reason:
        _say_without_kernels(reason)
    if words(plan.graph):
        level = logging.INFO if plan.graph.precision.unpacked else logging.WARNING
        log.log(level, "weights of %s are held as %s", plan.name, weights)


@functools.cache
def _say_without_kernels(reason: str) -> None:
    log.warning("no native kernels on this CPU, so XLA does their work, more slowly: %s", reason)


@contextlib.contextmanager
def _telling_shortage(request: OpenRequest) -> Iterator[None]:
    """Raise OutOfMemory, with the options that decide, for any error of too little memory."""
    try:
        yield
    except (RekindleError, TypeError):
        raise
    except Exception as error:
        no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if no_memory or "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemory(_shortage(request, error)) from error
        raise


def _shortage(request: OpenRequest, error: BaseException) -> str:
    config = request.config
    statistics = jax.local_devices()[0].memory_stats() or {}
    free = statistics.get("bytes_limit", 0) - statistics.get("bytes_in_use", 0)
    room = f"{free / 2**30:.1f} GiB are free on the device" if statistics else "the host's memory is used up"
    options = f"device_memory={config.device_memory}, device_pages={config.device_pages}, dtype={config.dtype!r}"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"opening {request.model!r} ({options}) ran out of memory: {reason}. {room}. Lower device_memory or quantize"
