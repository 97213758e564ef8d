"""Kernels compiled by processes of their own, while this one goes on: numba would keep the GIL for seconds.

Each process keeps the object file of every kernel that it has compiled, and ends by itself, also when this process has
ended before: its next start finds what is there. What ends such a process, LLVM's aborts included, is not tried here.

They take less than a program's share of a core that others want, though not much less: a session waits for them.

While another program's processes compile into the same folder, a program waits for them and starts none of its own:
twenty commands in a minute would otherwise have forty of them at work.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rekindle_kernels import private_files, system
from rekindle_kernels.native import build, cpu, kernel_files

MOST = 4  # processes
LONGEST = 600  # seconds after which a process is ended: others may wait for it
_POLL = 0.05
# What serves comes first, also before the imports, which take half a second of a core. At 10, where others kept two
# cores busy at 0, kernels of 20 s of a core were not there after nine minutes; 3 is half a share.
_CODE = (
    "import os, sys; os.nice(3); sys.path[:] = {path!r}; "
    "from rekindle_kernels.native import background_build as b; b.main()"
)
# The costliest first, so that the processes end together.
_COSTLY = ("gemm", "prefill", "matvec", "decode", "sample", "rope", "chain")


def missing(names: Iterable[str]) -> list[str]:
    """Return those kernels that would have to be compiled, the costliest first.

    None if object files can't be kept here, or REKINDLE_BACKGROUND_BUILD=0 asks for a single process: kernels are then
    compiled when a program that calls them is traced.
    """
    wanted = os.environ.get("REKINDLE_BACKGROUND_BUILD", "1") != "0"
    if not wanted or build.unavailable_reason() is not None or not build.can_compile():
        return []
    absent = [name for name in dict.fromkeys(names) if not build.is_there(name)]
    rank = {kind: index for index, kind in enumerate(_COSTLY)}
    return sorted(absent, key=lambda name: rank.get(name.split("_")[0], len(rank)))


def begun(names: Iterable[str]) -> BackgroundBuild | None:
    """Start compiling the missing kernels, or join another session that already does; None if no kernel is missing."""
    global _latest
    with _lock:
        absent = missing(names)
        if not absent:
            return None
        if _latest is None or not _latest.running or not {*absent} <= {*_latest.names}:
            _latest = BackgroundBuild(absent)
        return _latest


class BackgroundBuild:
    """Processes that compile kernels. If another program compiles some of them, they wait for it and compile
    the rest.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.since = time.monotonic()
        self.put_off: tuple[str, ...] = ()  # which this process does without, since waiting for them took too long
        self._told = False  # what failed
        self._lock = threading.Lock()
        self._elsewhere = True  # until this program has begun, which it does when no other one compiles
        self._processes: list[tuple[subprocess.Popen[str], Sequence[str]]] = []
        self._begin()
        _all.append(self)

    def _begin(self) -> None:
        """Start processes for the missing kernels, unless another program is compiling."""
        with self._lock, _claimed() as claim:
            if claim is None or not self._elsewhere:
                return
            self._elsewhere = False
            names = missing(self.names)
            count = min(MOST, len(names), cpu.usable_cores())
            self._processes = [_started(names[first::count], claim) for first in range(count)]

    @property
    def running(self) -> bool:
        """True if a process is still at work."""
        if self._elsewhere:
            self._begin()
        return self._elsewhere or any(process.poll() is None for process, _ in self._processes)

    @property
    def left(self) -> tuple[str, ...]:
        """The kernels that are neither stored nor refused yet."""
        return tuple(name for name in self.names if not build.is_there(name))

    def wait(self, stopped: Callable[[], bool] = lambda: False, *, longest: float = math.inf) -> bool:
        """Wait until all kernels are compiled or `stopped()` is True, and return True in the first case. A kernel that
        failed is refused from then on.

        `longest` seconds after the build began, this process does without the remaining kernels until it ends; they go
        on being compiled for the next one.
        """
        while self.running:
            if stopped():
                return False
            if time.monotonic() - self.since > longest:
                with self._lock:
                    self.put_off = self.put_off or self.left
                    build.put_off(self.put_off)
                return True
            time.sleep(_POLL)
        with self._lock:
            if not self._told:
                self._told = True
                for process, names in self._processes:
                    _refuse_failed(process, names)
        return True


_lock = threading.Lock()
_latest: BackgroundBuild | None = None
_all: list[BackgroundBuild] = []  # collected while its processes run, one would warn


def _refuse_failed(process: subprocess.Popen[str], names: Sequence[str]) -> None:
    """Refuse the kernels that an ended process could not compile."""
    assert process.stdout is not None, "a pipe"
    with process.stdout as told:
        lines = [line.rstrip("\n").split(" ", 1) for line in told]
    answers = {line[0]: line[-1] for line in lines}
    for name in names:
        reason = answers.get(name, f"the process that compiled it ended with status {process.returncode}")
        if reason != "ok" and not build.is_there(name):
            build.refuse(name, RuntimeError(reason))
        if name not in answers:
            return  # the kernels after it were not tried: they are compiled when they are needed


@contextlib.contextmanager
def _claimed() -> Iterator[Sequence[int] | None]:
    """Take the lock that keeps other programs waiting, and yield its descriptor; None if another program has it.

    The lock belongs to the folder and is released when the last process with the descriptor ends. Yields an empty
    sequence where locks are not available.
    """
    try:
        private_files.make_folder(kernel_files.folder())
        descriptor = system.open_file(kernel_files.folder(), os.O_RDONLY)
    except OSError:
        yield ()
        return
    try:
        claim: Sequence[int] | None = (descriptor,) if system.try_lock(descriptor) else None
    except OSError:  # a file system that has no locks
        claim = ()
    try:
        yield claim
    finally:
        os.close(descriptor)


def _started(names: Sequence[str], claim: Sequence[int]) -> tuple[subprocess.Popen[str], Sequence[str]]:
    """Return a process that compiles these kernels, one after the other, and has the descriptors of `claim` until
    then."""
    folder = [] if kernel_files.cache_folder is None else [f"--cache={kernel_files.cache_folder}"]
    command = [sys.executable, "-c", _CODE.format(path=sys.path), *folder, *names]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        pass_fds=claim,
        **system.own_group(),  # Ctrl-C is for the user's program; in a session of its own, Linux would ignore `nice`
    )
    return process, names


def main() -> None:
    """Compile the kernels that the command line names, and keep them; one line for each says how it went."""
    system.end_after(LONGEST)
    for argument in sys.argv[1:]:
        if argument.startswith("--cache="):
            kernel_files.cache_folder = Path(argument.removeprefix("--cache="))
            continue
        try:
            build.keep(argument)
            answer = "ok"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        with contextlib.suppress(OSError):  # who asked may be gone
            print(argument, answer, flush=True)
