"""Seconds from the start of a process to the text of a real file, and how fast it is from then on.

    python first_file.py MODEL.gguf [...] [--rounds 5] [--seconds 15] [--python VENV/bin/python]
        [--peer VENV/bin/python] [--kinds nothing programs everything]

Each round has an empty cache folder and three processes: without anything, with programs (and no weights), and with
everything; `--peer` adds one of llama.cpp's, of an environment with llama-cpp-python. Each opens a session and streams
texts. `speed` is tokens per second of each second after the first text over that of the last seconds, `least` the
lowest of them. `cpu` are the seconds of all cores until the first text, which other work on the machine changes least.
Memory is what is resident at the end: all of it, and what belongs to no file.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from first_text import variables

CHILD = """
import json, sys, time
began = float(sys.argv[2])
from pathlib import Path
%s
opened, times, texts, end, spent = time.time() - began, [], [], None, None
while end is None or time.time() < end:
    text = []
    for tokens in stream("The history of the city begins" + " again" * len(texts)):
        times += [time.time() - began] * max(1, len(tokens))
        text += tokens
        end, spent = end or time.time() + float(sys.argv[3]), spent or time.process_time()
        if len(text) >= 200 or time.time() > end:
            break
    texts.append(text)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
megabytes = {name: int(status[name].split()[0]) // 1000 for name in ("VmRSS", "RssAnon", "VmHWM")}
found = {"opened": opened, "times": times, "spent": spent, "first": texts[0], "weights": weights()}
print(json.dumps(found | megabytes))
"""
OURS = """
import rekindle
session = rekindle.open_sync(sys.argv[1])
def stream(prompt):
    return (d.token_ids for d in session.stream_sync(prompt, max_tokens=200, ignore_eos=True, temperature=0))
def weights():
    held = session._engine.device.weights
    session.close()
    return held
"""
PEER = """
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=2048, verbose=False)
def stream(prompt):
    return ([token] for token in model.generate(model.tokenize(prompt.encode()), temp=0.0))
weights = str
"""
KINDS = ["nothing", "programs", "everything"]


def once(python: str, model: str, cache: Path, seconds: float, part: str, *, installed: bool) -> dict[str, Any]:
    command = [python, "-c", CHILD % part, os.path.abspath(model), str(time.time()), str(seconds)]
    environment = variables(cache, installed=installed)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cache.parent)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def by_second(times: list[float]) -> list[int]:
    """Tokens in each whole second after the first text."""
    first = times[0]
    return [sum(first + at <= one < first + at + 1 for one in times) for at in range(max(1, int(times[-1] - first)))]


def summary(found: dict[str, Any]) -> dict[str, float]:
    each, first, opened = by_second(found["times"]), found["times"][0], found["opened"]
    final = statistics.median(each[-max(3, len(each) // 3) :])
    later = [count for at, count in enumerate(each) if first + at >= opened + 5]
    return {
        "open": opened, "text": first, "cpu": found["spent"], "tok/s": final, "least": min(each) / final,
        "from 5 s": min(later, default=0) / final, "resident": found["VmRSS"], "anonymous": found["RssAnon"],
        "most": found["VmHWM"],
    }  # fmt: skip


def main() -> None:
    environment = "the Python of an environment in which {} is installed".format
    given = harness.options(
        __doc__, "models", models=[""], rounds=5, seconds=15.0, kinds=(KINDS, KINDS),
        peer=(str, environment("llama-cpp-python")), python=(str, environment("rekindle")),
    )  # fmt: skip
    python, installed = given.python or sys.executable, given.python is not None
    if not installed:
        for folder in ("toolkit", "kernels"):
            compileall.compile_dir(harness.ROOT / folder, quiet=1)
    kinds = [*given.kinds, *["llama.cpp"] * bool(given.peer)]
    for model in given.models:
        rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        texts: list[list[int]] = []
        held: object = ""
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as folder:
                cache = Path(folder, "cache")
                for kind in kinds:
                    if kind == "programs":
                        shutil.rmtree(cache / "weights", ignore_errors=True)
                        shutil.rmtree(cache / "tokenizers", ignore_errors=True)
                    if kind == "llama.cpp":
                        found = once(given.peer, model, cache, given.seconds, PEER, installed=True)
                    else:
                        found = once(python, model, cache, given.seconds, OURS, installed=installed)
                        texts.append(found["first"])
                        held = found["weights"]
                    rows[kind].append(summary(found))
                    print(f"  {kind:11}{shown(rows[kind][-1])}  by second {by_second(found['times'])}", flush=True)
        least = min(map(len, texts), default=0)  # of one that the end of the measurement cut off
        same = all(text[:least] == texts[0][:least] for text in texts)
        print(f"{Path(model).name}: {held}; the same {least} tokens each time: {same}")
        for kind, some in rows.items():
            print(f"  {kind:11}{shown(harness.medians(some))}")


def shown(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in figures.items())


if __name__ == "__main__":
    main()
