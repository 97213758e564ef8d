"""One engine in a process of its own: commands as JSON lines on standard input, answers on standard output.

    python serve.py NAME             commands open, generate, forget, close; waits, idle, between them
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
        if name in engine.CONVERTED and not done(setting):
            engine.module(name).convert(setting)
            done(setting, now=True)
        say(answers, {})
        return
    opened = engine.module(name).open(setting)
    answer = opened.generate([prompt], [1])
    say(answers, {"ids": answer.ids, "peak_bytes": peak()})
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
            elif do == "close":
                opened.close()
                answer = {"peak_bytes": peak()}
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


def peak() -> int:
    """The largest resident size since the process was executed; ru_maxrss would begin with its parent's."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
