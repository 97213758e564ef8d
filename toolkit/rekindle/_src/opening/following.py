"""A follower: loads its part of a leader's model, and repeats the leader's calls until the session ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from rekindle._src.channels.channel import Channel, MessageKind, as_json, from_json
from rekindle._src.channels.greeting import ProcessPlace
from rekindle._src.core.config import EngineConfig
from rekindle._src.kvcache.persist.segment import LeafSpec
from rekindle._src.kvcache.tiers.disk import DiskTier, part_identity
from rekindle._src.models.base import LoadedModel
from rekindle._src.opening.blueprint import Blueprint, blueprint
from rekindle._src.opening.build import attach_caches
from rekindle._src.opening.open_request import OpeningProgress, OpenRequest
from rekindle._src.opening.peers import agreed
from rekindle._src.opening.programs import SessionPrograms
from rekindle._src.opening.source import ModelSource, source_of
from rekindle._src.opening.weights import Weights, delete, replacement
from rekindle._src.processes import joining
from rekindle._src.processes.facts import ProcessReport, encoded
from rekindle._src.processes.replay import LONGEST_ERROR, LoadedWeights, Replay
from rekindle._src.processes.team import PING_SECONDS
from rekindle._src.programs.host_pages import PageParts
from rekindle._src.programs.programs import Programs
from rekindle.errors import ProcessLost, RekindleError

Say = Callable[[str], object]


def follow(
    coordinator: str,
    place: ProcessPlace,
    *,
    model: str | None = None,
    cache_dir: str | None = None,
    wait: float = joining.JOIN_SECONDS,
    say: Say = lambda text: None,
    lost: Callable[[BaseException], object] = lambda error: None,
) -> None:
    """Take part in one session. Returns when its leader has closed it.

    `model` is the checkpoint's place on this machine, if it differs from the leader's. `say` is called with a message
    on each event, and `lost`, in another thread, when the leader is gone, while a call may still wait for it.
    """
    channel = joining.connect(coordinator, place, wait=wait)
    ended = threading.Event()
    threading.Thread(target=_ping, args=(channel, ended), name="rekindle ping", daemon=True).start()
    try:
        session = joining.enter(channel, place)
        say(f"process {place.process} of {place.processes} follows {coordinator}")
        with contextlib.ExitStack() as owners:
            plan, source = _agreed_plan(channel, session, coordinator, model, cache_dir)
            programs = SessionPrograms.open(plan, OpeningProgress(plan.name), contextlib.nullcontext)
            owners.callback(programs.close)
            weights = Weights.open(plan, source)
            del source  # no headers are needed once the weights are here
            programs.opened()
            channel.send(MessageKind.LOADED)
            say(f"it has its part of {model or session['model']}")
            disk = _disk(plan, programs.all, weights.model.fingerprint)
            load = _loader(plan, weights.model)
            Replay(channel, programs.all, _loaded(weights.model), load, disk=disk, lost=lost).run()
    except BaseException as error:
        with contextlib.suppress(RekindleError):
            channel.send(MessageKind.FAILED, as_json({"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}))
        raise
    finally:
        ended.set()
        channel.close()


def _agreed_plan(
    channel: Channel, session: dict[str, Any], coordinator: str, model: str | None, cache_dir: str | None
) -> tuple[Blueprint, ModelSource]:
    def agree(facts: ProcessReport) -> int:
        channel.send(MessageKind.FACTS, encoded(facts))
        kind, content = channel.receive()
        if kind is MessageKind.FAILED:
            raise ProcessLost(f"the leader ends the session: {from_json(content).get('error')}")
        if kind is not MessageKind.AGREED:
            raise ProcessLost(f"the leader sent a {kind.name} message before the session was open")
        pages = from_json(content).get("device_pages")
        if not isinstance(pages, int):
            raise ProcessLost("the leader does not say how many pages there are")
        return pages

    options = session.get("options")
    if not isinstance(options, dict):
        raise ProcessLost("the leader does not say which options the session has")
    config = EngineConfig.of({**options, "coordinator": coordinator, "cache_dir": cache_dir, "quiet": True})
    attach_caches(config)
    request = OpenRequest(model or str(session.get("model")), config)
    source = source_of(request)
    return agreed(blueprint(request, source), source, agree), source


def _disk(plan: Blueprint, programs: Programs, fingerprint: str) -> DiskTier | None:
    """Return the disk tier for this process's parts of pages, or None."""
    config, page_parts = plan.config, PageParts.of(programs.recipes.parts, programs.recipes.kv)
    if not (config.prefix_cache and config.disk_memory):
        return None
    leaves = [LeafSpec(tuple(shape[1:]), str(np.dtype(dtype))) for shape, dtype in page_parts.layout]
    identity = part_identity(plan.page_identity(fingerprint), [own.tolist() for own in page_parts.own_heads], leaves)
    disk = DiskTier(config.cache_folder, config.disk_memory, identity)
    disk.scan()
    return disk


def _loaded(model: LoadedModel) -> LoadedWeights:
    return LoadedWeights(model.leaves, model.fingerprint, lambda: delete(model))


def _loader(plan: Blueprint, model: LoadedModel) -> Callable[[str], LoadedWeights]:
    def load(weights: str) -> LoadedWeights:
        return _loaded(replacement(model, weights, plan.config))

    return load


def _ping(channel: Channel, ended: threading.Event) -> None:
    while not ended.wait(PING_SECONDS):
        try:
            channel.ping()
        except RekindleError:
            return  # the receiving thread reports it
