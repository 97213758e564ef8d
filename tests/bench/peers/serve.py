"""One engine in a process of its own: commands as JSON lines on standard input, answers on standard output.

    python serve.py NAME             commands open, generate, forget, memory, close; waits, idle, between them
    python serve.py NAME convert     one Setting on standard input; writes the engine's own weights
    python serve.py NAME first       one Setting with a prompt; one line when its first token is there

NAME is one of engine.ENGINES; the Python that runs this has to have it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

import engine
import process


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
    statuses = [process.read(Path(f"/proc/{one}/status")) for one in process.family(os.getpid())]
    resident, most = (sum(_kilobytes(text, name) for text in statuses) << 10 for name in ("VmRSS", "VmHWM"))
    return {"resident_bytes": resident, "peak_bytes": most}


def _kilobytes(status: str, name: str) -> int:
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith(name)), 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
