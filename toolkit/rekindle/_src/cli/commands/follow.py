"""`rekindle follow`: give this machine's devices to a session of several processes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from rekindle._src.cli.usage import Parser
from rekindle._src.core.mesh_shape import MAX_PROCESSES, address
from rekindle.errors import ConfigError

NEEDS = ("rekindle._src.opening.following",)
LAST_SECONDS = 2.0  # for a follower's call in progress, after the leader is gone


def options(command: Parser) -> None:
    command.add("--coordinator", "where the leader opens the session", required=True, metavar="HOST:PORT")
    command.add("--process", "which process this is, from 1", required=True, type=int, metavar="I")
    command.add("--processes", "how many there are, the leader included", required=True, type=int, metavar="N")
    command.add("--model", "where this machine has the model, if not where the leader has it")
    command.add("--cache-dir", "where programs persist")
    command.add("--wait", "seconds to wait for the leader (default 300)", type=float, default=300.0)
    command.checks.append(_check)


def _check(arguments: argparse.Namespace) -> None:
    address(arguments.coordinator, "--coordinator")
    process, processes = arguments.process, arguments.processes
    if not 2 <= processes <= MAX_PROCESSES:
        raise ConfigError("--processes", processes, "can't share a model", f"Use from 2 to {MAX_PROCESSES:,}")
    if not 0 < process < processes:
        problem, fix = "is not the number of a follower", f"Use from 1 to {processes - 1}; 0 is the leader"
        raise ConfigError("--process", process, problem, fix)


def run(arguments: argparse.Namespace) -> int:
    """Give a leader's session this process's devices, until it ends."""
    from rekindle._src.channels.greeting import ProcessPlace
    from rekindle._src.opening.following import follow

    place = ProcessPlace(arguments.process, arguments.processes)
    where = {"model": arguments.model, "cache_dir": arguments.cache_dir}
    follow(arguments.coordinator, place, wait=arguments.wait, say=_say, lost=_lost, **where)
    _say("the session has ended")
    return 0


def _say(text: str) -> None:
    print(f"rekindle: {text}", file=sys.stderr, flush=True)


def _lost(error: BaseException) -> None:
    """End the process soon, even if a call waits for a collective sum that the leader no longer joins."""

    def end() -> None:
        _say(f"the leader is gone: {error}")
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread may be in a call that never returns

    timer = threading.Timer(LAST_SECONDS, end)
    timer.daemon = True
    timer.start()
