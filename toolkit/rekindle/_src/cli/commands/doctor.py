"""`rekindle doctor`: check an installation, and show a fix for each problem."""

from __future__ import annotations

import argparse

from rekindle._src.cli import usage
from rekindle._src.cli.usage import Parser
from rekindle._src.core.config import EngineConfig
from rekindle.errors import ConfigError

NEEDS = ("rekindle._src.cli.doctor",)


def options(command: Parser) -> None:
    command.add("--cache-dir", "the cache directory to check")
    command.add("--model", "a checkpoint to check for NaN and infinity in weights and layers")
    mesh, kind = usage.text_form(EngineConfig, "mesh"), usage.text_form(EngineConfig, "quantize")
    command.add("--mesh", "check that so many devices can share a model: 4, model=4,expert=2", **mesh)
    shape = "only show the memory that a folder or a shape such as 70b needs on each device of --mesh"
    command.add("--plan", shape, metavar="SHAPE")
    command.add("--device", "with --plan: the kind of device (default H100); here: this machine's", default="H100")
    command.add("--quantize", "with --plan", **kind)
    command.add("--kv-dtype", "with --plan", **usage.text_form(EngineConfig, "kv_dtype"))
    command.add("--context", "with --plan: tokens of a request (default 8192; here: the session's)", type=int)
    command.flag("--tune", "with --plan: the memory and the seconds of training an adapter on this machine, too")
    command.flag("--json", "print the checks as JSON")
    command.flag("--report", "print one text for an issue, without home directory, user name and secrets")
    command.checks += _check, usage.check_models


def _check(arguments: argparse.Namespace) -> None:
    if arguments.report and arguments.json:
        raise ConfigError("--report", True, "is text, and --json is none", "Pass one of them")
    if arguments.context is not None and arguments.context < 1:
        raise ConfigError(
            "--context", arguments.context, "must be at least 1", "Pass tokens of a request, or leave it out"
        )
    planned = {"--quantize": arguments.quantize, "--kv-dtype": arguments.kv_dtype, "--context": arguments.context}
    planned["--tune"] = arguments.tune or None
    for option, value in planned.items():
        if value is not None and not arguments.plan:
            raise ConfigError(option, value, "is of a plan", "Pass --plan SHAPE as well, or leave it out")


def run(arguments: argparse.Namespace) -> int:
    from rekindle._src.cli import doctor

    return doctor.run(arguments)
