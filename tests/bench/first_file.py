"""Seconds from the start of a process to the text of a real file, and how fast it is from then on.

    python tests/bench/first_file.py MODEL.gguf [...] [--rounds 5] [--seconds 15] [--python VENV/bin/python]
        [--peer VENV/bin/python]

Each round has an empty cache folder and three processes: without anything, with programs (and no weights), and with
everything; `--peer` adds one of llama.cpp's, of an environment with llama-cpp-python. Each opens a session and streams
texts. `speed` is tokens per second of each second after the first text over that of the last seconds, `least` the
lowest of them. `cpu` are the seconds of all cores until the first text, which other work on the machine changes least.
Memory is what is resident at the end: all of it, and what belongs to no file.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHILD = """
import json, sys, time
began = float(sys.argv[2])
import rekindle
from pathlib import Path
model, seconds = sys.argv[1], float(sys.argv[3])
with rekindle.open_sync(model) as session:
    opened = time.time() - began
    times, texts, end, spent = [], [], None, None
    while end is None or time.time() < end:
        text = []
        prompt = "The history of the city begins" + " again" * len(texts)
        for delta in session.stream_sync(prompt, max_tokens=200, ignore_eos=True, temperature=0):
            times += [time.time() - began] * max(1, len(delta.token_ids))
            text += delta.token_ids
            end, spent = end or time.time() + seconds, spent or time.process_time()
            if time.time() > end:
                break
        texts.append(text)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    megabytes = {name: int(status[name].split()[0]) // 1000 for name in ("VmRSS", "RssAnon", "VmHWM")}
    weights = session._engine.resources.weights
    found = {"opened": opened, "times": times, "spent": spent, "first": texts[0], "weights": weights}
    print(json.dumps(found | megabytes))
"""
PEER = """
import json, sys, time
began = float(sys.argv[2])
from llama_cpp import Llama
from pathlib import Path
model = Llama(sys.argv[1], n_ctx=2048, verbose=False)
opened, times, texts, end, spent = time.time() - began, [], [], None, None
while end is None or time.time() < end:
    text = []
    prompt = "The history of the city begins" + " again" * len(texts)
    for token in model.generate(model.tokenize(prompt.encode()), temp=0.0):
        times.append(time.time() - began)
        text.append(token)
        end, spent = end or time.time() + float(sys.argv[3]), spent or time.process_time()
        if len(text) == 200 or time.time() > end:
            break
    texts.append(text)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
megabytes = {name: int(status[name].split()[0]) // 1000 for name in ("VmRSS", "RssAnon", "VmHWM")}
print(json.dumps({"opened": opened, "times": times, "spent": spent, "first": texts[0], "weights": "", **megabytes}))
"""
KINDS = ("nothing", "programs", "everything")


def once(
    python: str, model: str, cache: Path, seconds: float, *, installed: bool, child: str = CHILD
) -> dict[str, object]:
    import time

    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")  # an installed package comes with bytecode
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    if not installed:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "toolkit"), str(ROOT / "kernels")])
    environment["REKINDLE_CACHE"] = str(cache)
    command = [python, "-c", child, model, str(time.time()), str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cache.parent)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def by_second(found: dict[str, object]) -> list[int]:
    """Tokens in each whole second after the first text."""
    times: list[float] = found["times"]  # type: ignore[assignment]
    first = times[0]
    return [sum(first + at <= one < first + at + 1 for one in times) for at in range(max(1, int(times[-1] - first)))]


def summary(found: dict[str, object]) -> dict[str, float]:
    times: list[float] = found["times"]  # type: ignore[assignment]
    first, each = times[0], by_second(found)
    final = statistics.median(each[-max(3, len(each) // 3) :])
    opened: float = found["opened"]  # type: ignore[assignment]
    later = [count for at, count in enumerate(each) if first + at >= opened + 5]
    return {
        "open": opened,
        "text": first,
        "cpu": found["spent"],  # type: ignore[dict-item]
        "tok/s": final,
        "least": min(each) / final,
        "from 5 s": min(later, default=0) / final,
        "resident": found["VmRSS"],  # type: ignore[dict-item]
        "anonymous": found["RssAnon"],  # type: ignore[dict-item]
        "most": found["VmHWM"],  # type: ignore[dict-item]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--peer", help="the Python of an environment in which llama-cpp-python is installed")
    parser.add_argument("--python", help="the Python of an environment in which rekindle is installed")
    arguments = parser.parse_args()
    python, installed = arguments.python or sys.executable, arguments.python is not None
    if not installed:
        for folder in ("toolkit", "kernels"):
            compileall.compile_dir(ROOT / folder, quiet=1)
    for model in arguments.models:
        kinds = (*arguments.kinds, *(("llama.cpp",) if arguments.peer else ()))
        rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        texts: list[list[int]] = []
        held: object = ""
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as folder:
                cache = Path(folder, "cache")
                for kind in kinds:
                    if kind == "programs":
                        shutil.rmtree(cache / "weights", ignore_errors=True)
                        shutil.rmtree(cache / "tokenizers", ignore_errors=True)
                    if kind == "llama.cpp":
                        found = once(
                            arguments.peer, os.path.abspath(model), cache, arguments.seconds, installed=True, child=PEER
                        )
                    else:
                        found = once(python, os.path.abspath(model), cache, arguments.seconds, installed=installed)
                        texts.append(found["first"])  # type: ignore[arg-type]
                        held = found["weights"]
                    rows[kind].append(summary(found))
                    figures = "  ".join(f"{name} {value:.2f}" for name, value in rows[kind][-1].items())
                    print(f"  {kind:11}{figures}  by second {by_second(found)}", flush=True)
        least = min(map(len, texts), default=0)  # of one that the end of the measurement cut off
        same = all(text[:least] == texts[0][:least] for text in texts)
        print(f"{Path(model).name}: {held}; the same {least} tokens each time: {same}")
        for kind, some in rows.items():
            medians = {name: statistics.median(one[name] for one in some) for name in some[0]}
            print(f"  {kind:11}" + "  ".join(f"{name} {value:.2f}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
