"""`rekindle warm`: compile a model's programs ahead of time and store them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING

from rekindle._src.cli import usage
from rekindle._src.cli.usage import Parser, engine_options
from rekindle._src.core.config import EngineConfig
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle._src.programs.warming import WarmingProgress

NEEDS = ("rekindle._src.opening.blueprint",)


def options(command: Parser) -> None:
    command.add(
        "model", "a folder, a GGUF file, a hub id, a name of `rekindle ls`, or 'tiny'", nargs="?", default="tiny"
    )
    usage.add_engine(command, None)  # all that a server takes, also what changes no program
    usage.add_additions(command)
    command.add("--device-kind", "fail unless this machine's device is of this kind, such as 'cpu'")
    command.flag("--json", "print the programs as JSON")
    command.checks.append(usage.check_models)


def run(arguments: argparse.Namespace) -> int:
    """Compile a model's programs into the store, so that the first session only loads them.

    No weights are read, neither of the model nor of adapters, since programs depend only on their shapes.
    """
    from rekindle._src.capabilities import checked
    from rekindle._src.opening.blueprint import blueprint
    from rekindle._src.opening.open_request import OpenRequest
    from rekindle._src.opening.source import source_of
    from rekindle._src.programs.programs import Programs
    from rekindle._src.programs.warming import warm
    from rekindle_kernels import build_kernels

    config = EngineConfig.of(engine_options(arguments))
    if config.processes > 1:
        fix = "Open the session once with precompile='all'; each process then stores its own"
        raise ConfigError("--processes", config.processes, "can't be warmed by one of them", fix)
    if arguments.device_kind is not None:
        _check_kind(arguments.device_kind)
    request = OpenRequest(arguments.model, config, additions=checked(usage.additions(arguments)))
    plan = blueprint(request, source_of(request))
    programs = Programs.open(plan.programs)
    start = time.perf_counter()
    kernels = build_kernels(programs.recipes.kernels())
    if kernels is not None:
        kernels.wait()
    warm(programs, progress=None if arguments.json or config.quiet else _show)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(record) for record in programs.manifest()], indent=1))
    else:
        print(f"{len(programs.manifest())} programs are ready after {time.perf_counter() - start:.2f} s")
    return 0


def _check_kind(kind: str) -> None:
    """Raise ConfigError unless this machine's device is of this kind: programs can't be cross-compiled."""
    import jax

    device_kind = jax.local_devices()[0].device_kind
    if kind.casefold() != device_kind.casefold():
        problem = f"needs a device of that kind, and this machine has {device_kind!r}"
        fix = "Run this on such a machine and copy its cache directory's `programs` folder"
        raise ConfigError("--device-kind", kind, problem, fix)


def _show(warmed: WarmingProgress) -> None:
    program = warmed.program
    line = f"[{warmed.done:2}/{warmed.total}] {program.name:8} {program.origin} in {program.seconds:.2f} s"
    print(line, file=sys.stderr, flush=True)
