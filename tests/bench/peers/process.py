"""An engine's process as the runner sees it: questions and answers, and how much of the machine it uses meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


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
            [python, str(HERE / "serve.py"), name, *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**inherited, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
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
