"""`rekindle bench`: measure this machine."""

from __future__ import annotations

import argparse

from rekindle._src.cli import usage
from rekindle._src.cli.usage import Parser
from rekindle.errors import ConfigError

NEEDS = ("rekindle._src.cli.bench",)


def options(command: Parser) -> None:
    usage.add_model(command, checked=_check)
    command.add("--workloads", "comma-separated names (default W1,W2,W3,W4)", default="W1,W2,W3,W4")
    command.add("--repeat", "runs of each workload; the median is shown", type=int, default=3)
    command.flag("--json", "print the figures as JSON")


def _check(arguments: argparse.Namespace) -> None:
    from rekindle._src.bench.shapes import is_shape
    from rekindle._src.bench.workloads import FRESH, WORKLOADS

    names, known = workload_names(arguments), sorted((*WORKLOADS, *FRESH))
    for name in names:
        if name not in known:
            raise ConfigError("--workloads", name, "is not known", f"Use some of {', '.join(known)}")
    if not names:
        raise ConfigError("--workloads", arguments.workloads, "names none", f"Use some of {', '.join(known)}")
    if arguments.repeat < 1:
        raise ConfigError("--repeat", arguments.repeat, "must be at least 1", "Use 3 for a median")
    if not is_shape(arguments.model):
        usage.check_model(arguments.model)


def workload_names(arguments: argparse.Namespace) -> list[str]:
    return [name.strip().upper() for name in arguments.workloads.split(",") if name.strip()]


def run(arguments: argparse.Namespace) -> int:
    from rekindle._src.cli import bench

    return bench.run(arguments, workload_names(arguments))
