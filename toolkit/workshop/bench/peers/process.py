"""An engine's process: as the runner sees it, with how much of the machine it uses, and what runs in it.

    python process.py NAME             commands open, generate, forget, memory, close; waits, idle, between them
    python process.py NAME convert     one Setting on standard input; writes the engine's own weights
    python process.py NAME first       one Setting with a prompt; one line when its first token is there

Commands are JSON lines on standard input, answers on standard output. NAME is one of engine.ENGINES; the Python that
runs this has to have it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

import engine

ROOT = Path(__file__).parents[4]


class EngineFailed(Exception):
    """An engine answered with an error, or not at all."""


def read(path: Path) -> str:
    """A file of a process that may have ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def family(pid: int) -> list[int]:
    """A process and those that it has started, as far as the system says."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")  # of each, those that it has started
    children = (int(child) for thread in threads for child in read(thread).split())
    return [pid, *(one for child in children for one in family(child))]


class Process:
    def __init__(self, name: str, python: str, log: IO[str], *more: str) -> None:
        # Every engine's modules are compiled, as they are where they are installed.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        paths = [str(ROOT / "toolkit"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        self.name = name
        self.started = time.perf_counter()
        self._child = subprocess.Popen(
            [python, __file__, name, *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**inherited, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(command) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineFailed(f"{self.name} ended with status {self._child.wait()}; its log says why")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def once(self, **command: Any) -> dict[str, Any]:
        """The only command of a process that ends by itself."""
        try:
            return self.ask(**command)
        finally:
            self.wait()

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def cpu_seconds(self) -> float:
        """Used so far by all its threads, and by processes that it has started."""
        used = 0
        for one in family(self._child.pid):
            fields = read(Path(f"/proc/{one}/stat")).rpartition(")")[2].split()
            used += int(fields[11]) + int(fields[12]) if fields else 0
        return used / os.sysconf("SC_CLK_TCK")

    def wait(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def settle(processes: list[Process], limit: float = 20.0) -> None:
    """Wait until nobody works: threads that spin after a product, or write a cache, would disturb the next one."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        before = sum(process.cpu_seconds() for process in processes)
        time.sleep(0.3)
        if sum(process.cpu_seconds() for process in processes) - before <= 0.02:
            return


class Load:
    """How many cores were busy with something that none of these processes did."""

    def __init__(self, processes: list[Process]) -> None:
        self._processes = processes
        self._start = time.perf_counter()
        self._before = self._others()

    def of_others(self) -> float:
        return max(0.0, self._others() - self._before) / (time.perf_counter() - self._start)

    def _others(self) -> float:
        """CPU seconds of everything else, this process included, which only waits."""
        try:
            with Path("/proc/stat").open() as file:
                user, nice, system, _idle, _waiting, *rest = map(int, file.readline().split()[1:9])
        except OSError:
            return 0.0
        used = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        return used - sum(process.cpu_seconds() for process in self._processes)


# What runs in the process.


def main(name: str, do: str = "serve") -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like; only answers go out
    if do == "serve":
        serve(name, answers)
        return
    command = json.loads(sys.stdin.readline())
    prompt = command.pop("prompt", None)
    setting = confined(engine.Setting(**command))
    if do == "convert":
        if name in engine.CONVERTED and not setting.file and not done(setting):
            engine.module(name).convert(setting)
            done(setting, now=True)
        say(answers, {})
        return
    opened = engine.module(name).open(setting)
    answer = opened.generate([prompt], [1])
    say(answers, {"ids": answer.ids, **memory()})
    opened.close()


def serve(name: str, answers: IO[str]) -> None:
    opened: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        answer: dict[str, Any] = {}
        try:
            if do == "open":
                start = time.perf_counter()
                opened = engine.module(name).open(confined(engine.Setting(**command)))
                answer = {"seconds": time.perf_counter() - start, "notes": opened.notes}
            elif do == "generate":
                answer = dataclasses.asdict(opened.generate(**command))
            elif do == "forget":
                opened.forget()
            elif do == "memory":
                answer = memory()
            elif do == "close":
                opened.close()
        except Exception as error:  # the others go on without this workload
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        say(answers, answer)
        if do == "close":
            return


def confined(setting: engine.Setting) -> engine.Setting:
    """The same cores for everybody: some thread pools follow the affinity, others the number."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: setting.threads])
    os.environ["OMP_NUM_THREADS"] = str(setting.threads)
    return setting


def done(setting: engine.Setting, *, now: bool = False) -> bool:
    mark = setting.weights / "complete"
    if now:
        setting.weights.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return mark.exists()


def say(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def memory() -> dict[str, int]:
    """Bytes of this process and its children: what is resident, and the most that was since each was executed.

    ru_maxrss would begin with the parent's.
    """
    if not Path("/proc/self/status").exists():
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"resident_bytes": most, "peak_bytes": most}
    statuses = [read(Path(f"/proc/{one}/status")) for one in family(os.getpid())]
    resident, most = (sum(_kilobytes(text, name) for text in statuses) << 10 for name in ("VmRSS", "VmHWM"))
    return {"resident_bytes": resident, "peak_bytes": most}


def _kilobytes(status: str, name: str) -> int:
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith(name)), 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
