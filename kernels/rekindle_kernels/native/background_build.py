"""Kernels compiled by processes of their own, while this one goes on: numba would keep the GIL for seconds.

Each process keeps the object file of every kernel that it has compiled, and ends by itself, also when this process has
ended before: its next start finds what is there. What ends such a process, LLVM's aborts included, is not tried here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence

from rekindle_kernels.native import build

MOST = 4  # processes
LONGEST = 600  # seconds after which a process gives up
_POLL = 0.05
_CODE = "import sys; sys.path[:] = {path!r}; from rekindle_kernels.native import background_build as b; b.main()"
# The costliest first, so that the processes end together.
_COSTLY = ("gemm", "prefill", "matvec", "decode", "sample", "rope", "chain")


def missing(names: Iterable[str]) -> list[str]:
    """Those kernels that would have to be compiled, the costliest first.

    None if object files can't be kept here, or REKINDLE_BACKGROUND_BUILD=0 asks for a single process: kernels are then
    compiled when a program that calls them is traced.
    """
    wanted = os.environ.get("REKINDLE_BACKGROUND_BUILD", "1") != "0"
    if not wanted or build.unavailable_reason() is not None or not build.keeps():
        return []
    absent = [name for name in dict.fromkeys(names) if not build.is_there(name)]
    rank = {kind: index for index, kind in enumerate(_COSTLY)}
    return sorted(absent, key=lambda name: rank.get(name.split("_")[0], len(rank)))


class BackgroundBuild:
    """Processes that compile kernels."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        count = max(1, min(MOST, len(names), _usable_cpus()))
        self._processes = [_started(names[first::count]) for first in range(count)]

    @property
    def running(self) -> bool:
        """Whether a process is still at work."""
        return any(process.poll() is None for process, _ in self._processes)

    def wait(self, stopped: threading.Event) -> bool:
        """Wait until all are done, or `stopped` is set; whether they are. Failures are said, and remembered."""
        while self.running:
            if stopped.is_set():
                return False
            time.sleep(_POLL)
        for process, names in self._processes:
            assert process.stdout is not None, "a pipe"
            with process.stdout as told:
                lines = [line.rstrip("\n").split(" ", 1) for line in told]
            answers = {name: reason for name, reason in lines if name in names}
            for name in names:
                reason = answers.get(name, f"the process that compiled it ended with status {process.returncode}")
                if reason != "ok" and not build.is_there(name):
                    build.refuse(name, RuntimeError(reason))
                    if name not in answers:
                        break  # those behind it were not tried: they are compiled when they are needed
        return True


def _started(names: Sequence[str]) -> tuple[subprocess.Popen[str], Sequence[str]]:
    """A process that compiles these kernels, one after the other."""
    folder = [] if build.cache_folder is None else [f"--cache={build.cache_folder}"]
    command = [sys.executable, "-c", _CODE.format(path=sys.path), *folder, *names]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        start_new_session=True,  # Ctrl-C is for the user's program
    )
    return process, names


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """Compile the kernels that the command line names, and keep them; one line for each says how it went."""
    os.nice(10)  # what serves comes first
    started = time.monotonic()
    for argument in sys.argv[1:]:
        if argument.startswith("--cache="):
            build.cache_folder = build.Path(argument.removeprefix("--cache="))
            continue
        if time.monotonic() - started > LONGEST:
            return
        try:
            build.keep(argument)
            answer = "ok"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        with contextlib.suppress(OSError):  # who asked may be gone
            print(argument, answer, flush=True)
