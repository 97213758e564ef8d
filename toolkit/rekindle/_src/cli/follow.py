"""`rekindle follow`: give a leader's session this process's devices, until it ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from rekindle._src.processes.greeting import Place
from rekindle._src.session.following import follow

LAST_SECONDS = 2.0  # for a call in progress, after the leader is gone


def run(arguments: argparse.Namespace) -> int:
    place = Place(arguments.process, arguments.processes)
    follow(
        arguments.coordinator,
        place,
        model=arguments.model,
        cache_dir=arguments.cache_dir,
        wait=arguments.wait,
        say=_say,
        lost=_lost,
    )
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
