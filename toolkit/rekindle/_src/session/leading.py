"""The leader's part of opening a session of several processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rekindle._src.core.config import EngineConfig
from rekindle._src.processes import joining
from rekindle._src.processes.team import Team
from rekindle._src.session.parts import OpenRequest, precompiles
from rekindle.errors import ConfigError

# The options that are each process's own, or that only the process with the scheduler uses.
OWN = frozenset(
    {"cache_dir", "coordinator", "restore", "quiet", "log_every", "step_timeout", "policy", "seed", "max_queue"}
)


def gather(request: OpenRequest) -> Team:
    """Wait for the followers. Raise ConfigError for anything that can't be shared with them."""
    config = request.config
    if not isinstance(request.model, str | Path):
        raise ConfigError(
            "model",
            type(request.model).__name__,
            "is in this process only, and others share it",
            "Pass a folder or hub id that all of them can read",
        )
    if request.processors:
        names = [processor.name for processor in request.processors]
        raise ConfigError(
            "processors",
            names,
            "are functions of this process, which others can't call",
            "Leave them out, or use a mesh",
        )
    assert config.coordinator is not None, "checked with the config"

    def waiting(joined: int) -> None:
        request.shown.stage = f"process {joined + 1} of {config.processes}"

    session = {"model": str(request.model), "options": options_of(config)}
    return joining.lead(config.coordinator, config.processes, session, waiting=waiting, given_up=request.given_up)


def options_of(config: EngineConfig) -> dict[str, Any]:
    """Return the options that followers need, in their JSON form."""
    fields = (field.name for field in dataclasses.fields(config) if field.name not in OWN)
    options = {name: getattr(config, name) for name in fields}
    return {**options, "mesh": dict(options["mesh"]), "precompile": precompiles(config.precompile)}
