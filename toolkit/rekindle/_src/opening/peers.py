"""The other processes that share a model: gathering them, and what all of them agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle._src.capabilities import ENTRIES
from rekindle._src.opening.blueprint import Blueprint
from rekindle._src.opening.open_request import OpenRequest, precompiles
from rekindle._src.opening.source import CheckpointSource, ModelSource
from rekindle._src.processes.others import OtherProcesses
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.processes.facts import ProcessReport

# The options that are each process's own, or that only the process with the scheduler uses.
OWN = frozenset(
    {"cache_dir", "coordinator", "restore", "quiet", "log_every", "step_timeout", "policy", "seed", "max_queue"}
)
Agree = Callable[["ProcessReport"], int]  # with the other processes, on the KV pages that all have room for


def gather(request: OpenRequest) -> OtherProcesses:
    """Wait for the followers, if any, and join JAX's service with them. Raise ConfigError if they can't be joined."""
    config = request.config
    if config.processes == 1:
        return OtherProcesses()
    from rekindle._src.processes import joining  # a session of one process does without it

    if not isinstance(request.model, str | Path):
        raise ConfigError(
            "model",
            type(request.model).__name__,
            "is in this process only, and others share it",
            "Pass a folder or hub id that all of them can read",
        )
    if request.processors:
        names = [processor.name for processor in request.processors]
        problem = "are functions of this process, which others can't call"
        raise ConfigError("processors", names, problem, "Leave them out, or use a mesh")
    for entry in ENTRIES:
        entry.refuse_processes(request.additions)
    assert config.coordinator is not None, "checked with the config"

    def waiting(joined: int) -> None:
        request.shown.stage = f"process {joined + 1} of {config.processes}"

    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in OWN}
    options |= {"mesh": dict(options["mesh"]), "precompile": precompiles(config.precompile)}
    session = {"model": str(request.model), "options": options}
    return joining.lead(config.coordinator, config.processes, session, waiting=waiting, given_up=request.given_up)


def agreed(plan: Blueprint, source: ModelSource, agree: Agree | None) -> Blueprint:
    """Return the blueprint that all processes can follow; `agree` is None without others."""
    if agree is None:
        return plan
    from rekindle._src.processes.facts import facts

    assert isinstance(source, CheckpointSource), "other processes read a checkpoint, too"
    found = source.plan.found
    return plan.with_pages(agree(facts(plan.config, model=found.config.digest(), fingerprint=found.fingerprint)))
